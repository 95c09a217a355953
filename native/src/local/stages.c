#include "local/stages.h"

/*
 * Whether the owner reads its own contribution from its slot: it must be scaled first, or packed as those of the others
 * are, so that a result does not depend on who owns it.
 */
static int packs_own_share(const struct hr_stages *call) {
    return call->prescale != 1.0 || !hr_codec_is_plain(call->fused->codec);
}

/* Whether the owner, too, gets its result from its slot. */
static int drains_own_share(const struct hr_stages *call) {
    return call->team->host_count > 1 || !hr_codec_is_plain(call->fused->codec);
}

/*
 * On one host, the slot that carries an owner's result: its successor's, where the successor's contribution to that
 * share was. The owner has just read these lines and gets them to itself by writing; the successor gets them back by
 * reading and writes them next. In the owner's own slot the result would cost every line two more trips between the
 * cores.
 */
static char *result_slot(const struct hr_stages *call, int owner, size_t k) {
    const int carrier = call->team->host_count > 1 ? owner : (owner + 1) % call->team->local_size;
    return hr_stages_slot(call, carrier, k);
}

void hr_stages_fill(struct hr_stages *call, size_t k) {
    struct hr_team *team = call->team;
    const struct hr_range segment = hr_stages_segment(call, k);
    char *slot = hr_stages_slot(call, team->local_rank, k);
    for (int owner = 0; owner < call->owners; owner++) {
        if (owner == team->local_rank && !packs_own_share(call)) {
            continue;
        }
        const struct hr_range share = hr_stages_share(call, segment, owner);
        hr_fused_pack(call->fused, segment.offset + share.offset, share.bytes, slot + share.offset, team->node->kernel,
                      call->prescale, call->store);
    }
    hr_team_arrive(team, HR_PHASE_FILLED, hr_stages_parity(call, k));
}

void hr_stages_reduce_part(struct hr_stages *call, size_t k, size_t at, size_t bytes, const char *mine, char *target,
                           char *copy, struct hr_scale scale) {
    struct hr_team *team = call->team;
    for (int i = 0; i < team->local_size; i++) {
        team->sources[i] = i == team->local_rank && mine != NULL ? mine : hr_stages_slot(call, i, k) + at;
    }
    const struct hr_codec *codec = call->fused->codec;
    codec->reduce(codec, team->node->kernel, call->reduce_op, target, copy, team->sources, team->local_size,
                  hr_codec_blocks(codec, bytes), scale, call->store);
}

void hr_stages_reduce(struct hr_stages *call, size_t k) {
    struct hr_team *team = call->team;
    if (!hr_stages_owns(call)) {
        return;
    }
    const struct hr_range segment = hr_stages_segment(call, k);
    const struct hr_range share = hr_stages_share(call, segment, team->local_rank);
    const struct hr_scale scale = team->host_count > 1 ? hr_scale_by(call->partial_scale) : call->postscale;
    char *slot = result_slot(call, team->local_rank, k);
    size_t at = share.offset;
    size_t left = share.bytes;
    for (size_t i = left == 0 ? 0 : hr_fused_find(call->fused, segment.offset + at); left > 0; i++) {
        const struct hr_piece *piece = &call->fused->pieces[i];
        const size_t skip = segment.offset + at - piece->offset;
        const size_t part = piece->bytes - skip < left ? piece->bytes - skip : left;
        const char *mine = packs_own_share(call) ? NULL : piece->input + skip;
        if (drains_own_share(call)) {
            hr_stages_reduce_part(call, k, at, part, mine, slot + at, NULL, scale);
        } else {
            hr_stages_reduce_part(call, k, at, part, mine, piece->output + skip, slot + at, scale);
        }
        at += part;
        left -= part;
    }
}

void hr_stages_drain(struct hr_stages *call, size_t k) {
    struct hr_team *team = call->team;
    const struct hr_range segment = hr_stages_segment(call, k);
    for (int owner = 0; owner < call->owners; owner++) {
        if (owner == team->local_rank && !drains_own_share(call)) {
            continue; /* written by hr_stages_reduce */
        }
        const struct hr_range share = hr_stages_share(call, segment, owner);
        hr_fused_unpack(call->fused, segment.offset + share.offset, share.bytes,
                        result_slot(call, owner, k) + share.offset, team->node->kernel);
    }
    hr_team_arrive(team, HR_PHASE_DRAINED, hr_stages_parity(call, k));
}

int hr_stages_may_exchange(const struct hr_stages *call) {
    return call->team->host_count == 1 && call->team->local_size == 2 && !packs_own_share(call);
}

void hr_stages_exchange(struct hr_stages *call, size_t k) {
    struct hr_team *team = call->team;
    const struct hr_fused *fused = call->fused;
    const int peer = 1 - team->local_rank;
    const struct hr_range segment = hr_stages_segment(call, k);
    const struct hr_range next = hr_stages_segment(call, k + 2);
    const struct hr_range out = hr_stages_share(call, segment, peer);
    const struct hr_range in = hr_stages_share(call, next, peer);
    const size_t out_offset = segment.offset + out.offset;
    const size_t in_offset = next.offset + in.offset;
    char *slot = hr_stages_slot(call, team->local_rank, k);
    if (next.bytes == segment.bytes) {
        hr_fused_exchange(fused, out_offset, in_offset, out.bytes, slot + out.offset, team->node->kernel, call->store);
    } else {
        hr_fused_unpack(fused, out_offset, out.bytes, slot + out.offset, team->node->kernel);
        hr_fused_pack(fused, in_offset, in.bytes, slot + in.offset, team->node->kernel, 1.0, call->store);
    }
    hr_team_arrive(team, HR_PHASE_FILLED, hr_stages_parity(call, k));
}
