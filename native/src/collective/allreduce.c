/*
 * Allreduce. Over one arena each segment passes three stages on all ranks of a host:
 *
 *     fill    packs the shares that others own into my slot, scaled on the way
 *     reduce  reduces my own share straight from my private memory and the peers' slots
 *     drain   unpacks the other shares from the slots
 *
 * Small data takes one phase instead of two, data of one rank alone none.
 *
 * Over several hosts (two-level form) the owner's share stays in its slot, is reduced with the same owner's share on
 * the other hosts by ring or recursive doubling, and is then drained. So a link carries 2(h-1)/h of the data once,
 * whatever the number of ranks per host. A rank that is alone on its host has nobody to share memory with: where a
 * segment lies in one tensor it travels from and to the output itself, and no slot is used. That is nobody else's
 * business: what travels is the same.
 */
#include <math.h>

#include "collective/collective.h"

static struct hr_range segment_of(const struct hr_allreduce *run, size_t k) {
    return hr_segment(run->segments.team->tuning.segment, run->fused.bytes, k);
}

/* Whether the owner's own share passes its slot, to be scaled or packed as the others' are: all get the same bits. */
static int packs_own_share(const struct hr_allreduce *run) {
    return run->prescale != 1.0 || !run->fused.codec->is_plain;
}

/* Whether the owner, too, gets its result from its slot. */
static int drains_own_share(const struct hr_allreduce *run) {
    return run->segments.team->host_count > 1 || !run->fused.codec->is_plain;
}

/*
 * On one host, the slot that carries an owner's result: its successor's, where the successor's contribution to that
 * share was. The owner has just read these lines and gets them to itself by writing; the successor gets them back by
 * reading and writes them next. In the owner's own slot the result would cost every line two more trips between the
 * cores.
 */
static char *result_slot(const struct hr_allreduce *run, int owner, size_t k) {
    const int carrier = run->segments.team->host_count > 1 ? owner : (owner + 1) % run->segments.team->local_size;
    return hr_segments_slot(&run->segments, carrier, k);
}

static struct hr_range own_share(const struct hr_allreduce *run, size_t k) {
    return hr_share(segment_of(run, k).bytes, run->segments.team->local_rank, run->owners);
}

/* The piece of which segment k is a part, if it travels without a slot; else NULL. What is packed needs one. */
static const struct hr_piece *whole_piece(const struct hr_allreduce *run, size_t k) {
    if (run->segments.team->local_size > 1 || !run->fused.codec->is_plain || run->partial_scale != 1.0) {
        return NULL;
    }
    const struct hr_range segment = segment_of(run, k);
    const struct hr_piece *piece = &run->fused.pieces[hr_fused_find(&run->fused, segment.offset)];
    return segment.offset + segment.bytes <= piece->offset + piece->bytes ? piece : NULL;
}

/* The place that my share of segment k travels from and to. */
static char *travelling(const struct hr_allreduce *run, size_t k) {
    const struct hr_piece *piece = whole_piece(run, k);
    return piece == NULL
               ? hr_segments_slot(&run->segments, run->segments.team->local_rank, k) + own_share(run, k).offset
               : piece->output + (segment_of(run, k).offset - piece->offset);
}

static void fill(struct hr_segments *segments, size_t k) {
    struct hr_allreduce *run = (struct hr_allreduce *)segments;
    struct hr_team *team = segments->team;
    const struct hr_range segment = segment_of(run, k);
    char *slot = hr_segments_slot(&run->segments, team->local_rank, k);
    const struct hr_piece *whole = whole_piece(run, k);
    if (whole != NULL && (whole->output != whole->input || run->prescale != 1.0)) {
        hr_fused_pack(&run->fused, segment.offset, segment.bytes, travelling(run, k), team->node->kernel, run->prescale,
                      HR_STORE_ORDINARY);
    }
    for (int owner = 0; owner < run->owners && whole == NULL; owner++) {
        if (owner == team->local_rank && !packs_own_share(run)) {
            continue;
        }
        const struct hr_range share = hr_share(segment.bytes, owner, run->owners);
        hr_fused_pack(&run->fused, segment.offset + share.offset, share.bytes, slot + share.offset, team->node->kernel,
                      run->prescale, segments->trial.store);
    }
}

/* Reduces `bytes` at `at` within segment k; `mine` is my contribution, NULL if it is in my slot, too. */
static void reduce_part(struct hr_allreduce *run, size_t k, size_t at, size_t bytes, const char *mine, char *target,
                        char *copy, struct hr_scale scale) {
    struct hr_team *team = run->segments.team;
    for (int i = 0; i < team->local_size; i++) {
        team->sources[i] = i == team->local_rank && mine != NULL ? mine : hr_segments_slot(&run->segments, i, k) + at;
    }
    const struct hr_codec *codec = run->fused.codec;
    hr_kernel_reduce(team->node->kernel, codec->wire_dtype, run->reduce_op, target, copy, team->sources,
                     team->local_size, bytes / codec->wire_bytes, scale, run->segments.trial.store);
}

static void reduce(struct hr_segments *segments, size_t k) {
    struct hr_allreduce *run = (struct hr_allreduce *)segments;
    struct hr_team *team = segments->team;
    if (team->local_rank >= run->owners || whole_piece(run, k) != NULL) {
        return;
    }
    const struct hr_range segment = segment_of(run, k);
    const struct hr_range share = hr_share(segment.bytes, team->local_rank, run->owners);
    const struct hr_scale scale = team->host_count > 1 ? hr_scale_by(run->partial_scale) : run->postscale;
    char *slot = result_slot(run, team->local_rank, k);
    size_t at = share.offset;
    struct hr_cut cut = hr_cut_begin(&run->fused, segment.offset + at, share.bytes);
    while (hr_cut_next(&cut)) {
        const char *mine = packs_own_share(run) ? NULL : cut.piece->input + cut.skip;
        if (drains_own_share(run)) {
            reduce_part(run, k, at, cut.bytes, mine, slot + at, NULL, scale);
        } else {
            reduce_part(run, k, at, cut.bytes, mine, cut.piece->output + cut.skip, slot + at, scale);
        }
        at += cut.bytes;
    }
}

static void drain(struct hr_segments *segments, size_t k) {
    struct hr_allreduce *run = (struct hr_allreduce *)segments;
    struct hr_team *team = segments->team;
    const struct hr_range segment = segment_of(run, k);
    for (int owner = 0; owner < run->owners && whole_piece(run, k) == NULL; owner++) {
        if (owner == team->local_rank && !drains_own_share(run)) {
            continue; /* written by reduce */
        }
        const struct hr_range share = hr_share(segment.bytes, owner, run->owners);
        hr_fused_unpack(&run->fused, segment.offset + share.offset, share.bytes,
                        result_slot(run, owner, k) + share.offset, team->node->kernel, HR_STORE_ORDINARY);
    }
}

/*
 * On one host of two ranks, where the codec is plain and nothing is scaled on the way in, nobody but me reads what I
 * drain. So segment k + 2 may take the place of segment k as it comes out, in one pass if both are of one size, and
 * HR_PHASE_DRAINED is not asked for. Equal on all ranks.
 */
static void exchange(struct hr_segments *segments, size_t k) {
    const struct hr_allreduce *run = (struct hr_allreduce *)segments;
    struct hr_team *team = segments->team;
    const struct hr_fused *fused = &run->fused;
    const int peer = 1 - team->local_rank;
    const struct hr_range segment = segment_of(run, k);
    const struct hr_range next = segment_of(run, k + 2);
    const struct hr_range out = hr_share(segment.bytes, peer, run->owners);
    const struct hr_range in = hr_share(next.bytes, peer, run->owners);
    const size_t out_offset = segment.offset + out.offset;
    const size_t in_offset = next.offset + in.offset;
    const enum hr_store store = segments->trial.store;
    char *slot = hr_segments_slot(&run->segments, team->local_rank, k);
    if (next.bytes == segment.bytes) {
        hr_fused_exchange(fused, out_offset, in_offset, out.bytes, slot + out.offset, team->node->kernel, store);
    } else {
        hr_fused_unpack(fused, out_offset, out.bytes, slot + out.offset, team->node->kernel, HR_STORE_ORDINARY);
        hr_fused_pack(fused, in_offset, in.bytes, slot + in.offset, team->node->kernel, 1.0, store);
    }
}

static const struct hr_segments_ops one_host = {.fill = fill, .reduce = reduce, .drain = drain};
static const struct hr_segments_ops exchanging = {.fill = fill, .reduce = reduce, .drain = drain, .exchange = exchange};

/* ---- Several hosts ---- */

size_t hr_two_level_scratch_bytes(const struct hr_tuning *tuning, int host_count, size_t value_bytes, size_t most,
                                  const struct hr_cross_ops *large) {
    /* the last segment may have a small share only */
    const size_t small = hr_cross_scratch_bytes(&hr_cross_doubling, host_count, value_bytes,
                                                hr_smaller(most, tuning->doubling), tuning->piece);
    const size_t whole = hr_cross_scratch_bytes(large, host_count, value_bytes, most, tuning->piece);
    return hr_round_up(small > whole ? small : whole, HR_CROSS_ALIGNMENT);
}

static void begin(struct hr_segments *segments, size_t k, struct hr_cross *cross) {
    const struct hr_allreduce *run = (struct hr_allreduce *)segments;
    const struct hr_team *team = run->segments.team;
    const struct hr_range share = own_share(run, k);
    struct hr_cross_call call = hr_cross_call_of(team, run->fused.codec);
    call.data = travelling(run, k);
    call.count = share.bytes / run->fused.codec->wire_bytes;
    call.reduce_op = run->reduce_op;
    call.scratch =
        team->cross_scratch + (segments->count == 1 ? 0 : k % HR_SEGMENTS_TRAVELLING_MAX * run->scratch_bytes);
    hr_cross_begin(share.bytes <= team->tuning.doubling ? &hr_cross_doubling : &hr_cross_ring, cross, &call);
}

static void finish(struct hr_segments *segments, size_t k) {
    struct hr_allreduce *run = (struct hr_allreduce *)segments;
    if (segments->team->local_rank < run->owners && hr_scale_changes(run->postscale)) {
        const struct hr_codec *codec = run->fused.codec;
        char *at = travelling(run, k);
        hr_kernel_scale(segments->team->node->kernel, codec->wire_dtype, at, at,
                        own_share(run, k).bytes / codec->wire_bytes, run->postscale, HR_STORE_ORDINARY);
    }
}

static const struct hr_segments_ops several_hosts = {
    .fill = fill, .reduce = reduce, .begin = begin, .finish = finish, .drain = drain};

/* ---- Small data on one host: everybody shows everything and reduces everything, in rank order ---- */

static void flat_fill(struct hr_segments *segments, size_t k) {
    const struct hr_allreduce *run = (struct hr_allreduce *)segments;
    hr_fused_pack(&run->fused, 0, run->fused.bytes, hr_segments_slot(segments, segments->team->local_rank, k),
                  segments->team->node->kernel, run->prescale, HR_STORE_ORDINARY);
}

static void flat_drain(struct hr_segments *segments, size_t k) {
    struct hr_allreduce *run = (struct hr_allreduce *)segments;
    const struct hr_fused *fused = &run->fused;
    const int is_plain = fused->codec->is_plain;
    if (!is_plain) {
        char result[HR_FLAT_MAX]; /* packed here too: fused with others or not, a tensor gets the same bits */
        reduce_part(run, k, 0, fused->bytes, NULL, result, NULL, run->postscale);
        hr_fused_unpack(fused, 0, fused->bytes, result, segments->team->node->kernel, HR_STORE_ORDINARY);
    }
    for (size_t i = 0; i < fused->count && is_plain; i++) {
        const struct hr_piece *piece = &fused->pieces[i];
        reduce_part(run, k, piece->offset, piece->bytes, NULL, piece->output, NULL, run->postscale);
    }
}

static const struct hr_segments_ops flat = {.fill = flat_fill, .drain = flat_drain};

/* ---- One rank ---- */

/* Packs what would travel all the same, so that a script sees what it would see with more ranks. */
static void run_alone(const struct hr_allreduce *run) {
    const struct hr_fused *fused = &run->fused;
    const struct hr_codec *codec = fused->codec;
    const struct hr_kernel *kernel = run->segments.team->node->kernel;
    char packed[HR_FLAT_MAX];
    if (codec->is_plain && run->prescale == 1.0 && !hr_scale_changes(run->postscale)) {
        hr_fused_unpack(fused, 0, fused->bytes, NULL, kernel, HR_STORE_ORDINARY);
        return;
    }
    for (size_t at = 0; at < fused->bytes; at += sizeof packed) {
        const size_t bytes = hr_smaller(fused->bytes - at, sizeof packed);
        hr_fused_pack(fused, at, bytes, packed, kernel, run->prescale, HR_STORE_ORDINARY);
        hr_kernel_scale(kernel, codec->wire_dtype, packed, packed, bytes / codec->wire_bytes, run->postscale,
                        HR_STORE_ORDINARY);
        hr_fused_unpack(fused, at, bytes, packed, kernel, HR_STORE_ORDINARY);
    }
}

double hr_partial_scale(const struct hr_codec *codec, int reduce_op, double postscale) {
    const double size = postscale < 0 ? -postscale : postscale;
    if (codec->wire_dtype != HORO_FLOAT16 || reduce_op != HORO_SUM || !(size < 1.0)) {
        return 1.0;
    }
    int exponent;
    (void)frexp(size, &exponent);
    return ldexp(1.0, exponent - 1);
}

/* ---- The task ---- */

hr_status hr_allreduce_begin(struct hr_allreduce *run, struct hr_team *team, const struct hr_fused *fused,
                             int reduce_op, double prescale, struct hr_scale postscale) {
    *run = (struct hr_allreduce){
        .segments = {.team = team},
        .fused = *fused,
        .reduce_op = reduce_op,
        .prescale = prescale,
        .partial_scale = 1.0,
        .postscale = postscale,
        .owners = fused->bytes <= team->tuning.flat ? 1 : team->owner_count,
    };
    struct hr_segments *segments = &run->segments;
    if (team->size == 1) {
        run_alone(run);
    }
    if (team->size == 1 || fused->bytes == 0) {
        hr_segments_begin(segments, NULL, HR_PHASE_REDUCED, 0);
        return HORO_OK;
    }
    const struct hr_segments_ops *ops = &several_hosts;
    if (team->host_count > 1) {
        run->partial_scale = hr_partial_scale(fused->codec, reduce_op, postscale.factor);
        run->postscale.factor /= run->partial_scale;
        segments->carries = team->local_rank < run->owners;
        /* room for two of the largest shares, which cannot be moved once anything travels; for one of small data */
        const size_t segment_bytes = segment_of(run, 0).bytes;
        const size_t at_once = segment_bytes == fused->bytes ? 1 : HR_SEGMENTS_TRAVELLING_MAX;
        run->scratch_bytes =
            hr_two_level_scratch_bytes(&team->tuning, team->host_count, fused->codec->wire_bytes,
                                       hr_share_most(segment_bytes, run->owners), &hr_cross_ring);
        HR_TRY(hr_segments_reserve_scratch(team, at_once * run->scratch_bytes));
    } else if (fused->bytes <= team->tuning.flat) {
        ops = &flat;
    } else {
        ops = team->local_size == 2 && !packs_own_share(run) ? &exchanging : &one_host;
        if (fused->bytes >= team->tuning.stream) {
            segments->trial = hr_store_try(&team->allreduce_stores, fused->bytes);
        }
    }
    hr_segments_begin(segments, ops, ops == &flat ? HR_PHASE_FILLED : HR_PHASE_REDUCED,
                      hr_divide_up(fused->bytes, team->tuning.segment));
    return HORO_OK;
}
