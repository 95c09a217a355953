/*
 * Allreduce over several hosts (two-level form): the owner's share stays in its slot, is reduced with the same owner's
 * share on the other hosts by ring or recursive doubling, and is then gathered from the slots. So a link carries
 * 2(h-1)/h of the data once, whatever the number of ranks per host.
 *
 * A rank that is alone on its host has nobody to share memory with: where a segment lies in one tensor it travels from
 * and to the output itself, and no slot is used. That is nobody else's business: what travels is the same.
 */
#include "collective/two_level.h"

static struct hr_allreduce *run_of(struct hr_segments *segments) {
    return (struct hr_allreduce *)segments; /* its first member */
}

static struct hr_range own_share(const struct hr_stages *call, size_t k) {
    return hr_stages_share(call, hr_stages_segment(call, k), call->team->local_rank);
}

const struct hr_cross_ops *hr_two_level_cross(const struct hr_tuning *tuning, size_t share_bytes) {
    return share_bytes <= tuning->doubling ? &hr_cross_doubling : &hr_cross_ring;
}

size_t hr_two_level_scratch_bytes(const struct hr_tuning *tuning, int host_count, int owners, size_t block_bytes,
                                  size_t segment_bytes) {
    const size_t most = hr_share_most(hr_share_unit(block_bytes), segment_bytes, owners);
    /* the last segment may have a small share only */
    const size_t small_most = most < tuning->doubling ? most : tuning->doubling;
    const size_t small = hr_cross_doubling.scratch_bytes(host_count, block_bytes, small_most, tuning->piece);
    const size_t large = hr_two_level_cross(tuning, most)->scratch_bytes(host_count, block_bytes, most, tuning->piece);
    return hr_round_up(small > large ? small : large, HR_CROSS_ALIGNMENT);
}

/*
 * Room for two of the largest shares, before anything travels: it cannot be moved then. Small data gets one: it is one
 * segment.
 */
static int reserve_scratch(struct hr_allreduce *run) {
    struct hr_team *team = run->segments.team;
    const size_t segment_bytes = hr_stages_segment(&run->stages, 0).bytes;
    const size_t at_once = segment_bytes == run->fused.bytes ? 1 : HR_SEGMENTS_TRAVELLING_MAX;
    run->scratch_bytes = hr_two_level_scratch_bytes(&team->tuning, team->host_count, run->stages.owners,
                                                    run->fused.codec->block_bytes, segment_bytes);
    return hr_segments_reserve_scratch(team, at_once * run->scratch_bytes);
}

int hr_members_advance(struct hr_members *members, const struct hr_team *team, size_t at_once) {
    const size_t left = (size_t)(team->size - members->next);
    members->ranks = team->rank_by_host + members->next;
    members->count = (int)(left < at_once ? left : at_once);
    members->next += members->count;
    return members->count;
}

/* The piece of which segment k is a part, if it travels without a slot; else NULL. What is packed needs one. */
static const struct hr_piece *whole_piece(const struct hr_stages *call, size_t k) {
    if (call->team->local_size > 1 || !hr_codec_is_plain(call->fused->codec) || call->partial_scale != 1.0) {
        return NULL;
    }
    const struct hr_range segment = hr_stages_segment(call, k);
    const struct hr_piece *piece = &call->fused->pieces[hr_fused_find(call->fused, segment.offset)];
    return segment.offset + segment.bytes <= piece->offset + piece->bytes ? piece : NULL;
}

/* The place that my share of segment k travels from and to. */
static char *travelling(const struct hr_stages *call, size_t k) {
    const struct hr_piece *piece = whole_piece(call, k);
    return piece == NULL ? hr_stages_slot(call, call->team->local_rank, k) + own_share(call, k).offset
                         : piece->output + (hr_stages_segment(call, k).offset - piece->offset);
}

static void fill(struct hr_segments *segments, size_t k) {
    struct hr_stages *call = &run_of(segments)->stages;
    const struct hr_piece *piece = whole_piece(call, k);
    if (piece == NULL) {
        hr_stages_fill(call, k);
    } else if (piece->output != piece->input || call->prescale != 1.0) {
        const struct hr_range segment = hr_stages_segment(call, k);
        hr_fused_pack(call->fused, segment.offset, segment.bytes, travelling(call, k), call->team->node->kernel,
                      call->prescale, HR_STORE_ORDINARY);
    }
}

static void reduce(struct hr_segments *segments, size_t k) {
    struct hr_stages *call = &run_of(segments)->stages;
    if (whole_piece(call, k) == NULL) {
        hr_stages_reduce(call, k);
    }
}

static int begin(struct hr_segments *segments, size_t k, struct hr_cross *cross) {
    const struct hr_allreduce *run = run_of(segments);
    const struct hr_stages *call = &run->stages;
    const struct hr_team *team = call->team;
    const struct hr_range share = own_share(call, k);
    struct hr_cross_call cross_call = hr_cross_call_of(team, call->fused->codec);
    cross_call.data = travelling(call, k);
    cross_call.count = hr_codec_blocks(call->fused->codec, share.bytes);
    cross_call.reduce_op = call->reduce_op;
    cross_call.scratch =
        team->cross_scratch + (segments->count == 1 ? 0 : k % HR_SEGMENTS_TRAVELLING_MAX * run->scratch_bytes);
    return hr_two_level_cross(&team->tuning, share.bytes)->begin(cross, &cross_call);
}

static void finish(struct hr_segments *segments, size_t k) {
    struct hr_stages *call = &run_of(segments)->stages;
    if (hr_stages_owns(call) && hr_scale_changes(call->postscale)) {
        const struct hr_codec *codec = call->fused->codec;
        const size_t blocks = hr_codec_blocks(codec, own_share(call, k).bytes);
        codec->scale(codec, call->team->node->kernel, travelling(call, k), blocks, call->postscale);
    }
    if (whole_piece(call, k) == NULL) {
        hr_team_arrive(call->team, HR_PHASE_REDUCED, hr_stages_parity(call, k));
    }
}

static void drain(struct hr_segments *segments, size_t k) {
    struct hr_stages *call = &run_of(segments)->stages;
    if (whole_piece(call, k) == NULL) {
        hr_stages_drain(call, k);
    }
}

static const struct hr_segments_ops several_hosts = {
    .fill = fill, .reduce = reduce, .begin = begin, .finish = finish, .drain = drain};

int hr_two_level_begin(struct hr_allreduce *run) {
    run->segments.ops = &several_hosts;
    run->segments.carries = hr_stages_owns(&run->stages);
    run->segments.drain_phase = HR_PHASE_REDUCED;
    return reserve_scratch(run);
}
