/*
 * Reduce-scatter. The part of every rank is cut into `share_count` shares; a segment takes one of them of each rank on
 * one host, and of each rank and owner on several. On all ranks the same share lies at the same place of the slot.
 *
 * On one host the ranks show what they have of one another's shares, and each reduces its own straight from its private
 * memory and the others' slots into its output.
 *
 * On several, share j belongs to segment j / owners and to owner j % owners, and lies in the region of that owner in
 * the slot: all shares there, in order of their hosts one behind the other. An owner reduces its region over its host,
 * into its own slot; then with its like on the other hosts, so that it has the shares of its own host's ranks; and each
 * rank takes its own out of the slots of the owners. So all links carry the same, and each all but one host's part of
 * it once.
 */
#include "collective/collective.h"

/* Whether this rank's own contribution is read from its slot, too: see allreduce.c. */
static int packs_own(const struct hr_reducescatter *run) {
    return run->prescale != 1.0 || !run->codec->is_plain;
}

/* One share over the ranks of this host: into the outputs, or else into my slot. */
static void reduce_share(const struct hr_reducescatter *run, size_t k, const struct hr_walk *walk, int to_outputs,
                         struct hr_scale scale) {
    struct hr_team *team = run->segments.team;
    const struct hr_fused *part = &run->shares.by_rank[walk->rank];
    char *slot = hr_segments_slot(&run->segments, team->local_rank, k);
    size_t at = walk->at;
    struct hr_cut cut = hr_cut_begin(part, walk->share.offset, walk->share.bytes);
    while (hr_cut_next(&cut)) {
        for (int r = 0; r < team->local_size; r++) {
            team->sources[r] = r == team->local_rank && !packs_own(run) ? cut.piece->input + cut.skip
                                                                        : hr_segments_slot(&run->segments, r, k) + at;
        }
        char *target = to_outputs ? cut.piece->output + cut.skip : slot + at;
        hr_kernel_reduce(team->node->kernel, run->codec->wire_dtype, run->reduce_op, target, NULL, team->sources,
                         team->local_size, cut.bytes / run->codec->wire_bytes, scale, HR_STORE_ORDINARY);
        at += cut.bytes;
    }
}

static void fill(struct hr_segments *segments, size_t k) {
    const struct hr_reducescatter *run = (struct hr_reducescatter *)segments;
    const struct hr_team *team = segments->team;
    char *slot = hr_segments_slot(segments, team->local_rank, k);
    for (int owner = 0; owner < run->shares.owners; owner++) {
        struct hr_walk walk = hr_walk_begin(segments->team, &run->shares, k, owner);
        while (hr_walk_on(&walk)) {
            /* on one host a share is its rank's, on several its owner's to reduce */
            const int is_own = team->host_count == 1 ? walk.rank == team->rank : owner == team->local_rank;
            if (!is_own || packs_own(run)) {
                hr_fused_pack(&run->shares.by_rank[walk.rank], walk.share.offset, walk.share.bytes, slot + walk.at,
                              team->node->kernel, run->prescale, segments->trial.store);
            }
        }
    }
}

/* ---- One host ---- */

static void drain(struct hr_segments *segments, size_t k) {
    struct hr_reducescatter *run = (struct hr_reducescatter *)segments;
    struct hr_team *team = segments->team;
    const int to_outputs = run->codec->is_plain;
    const char *slot = hr_segments_slot(segments, team->local_rank, k);
    struct hr_walk walk = hr_walk_begin(segments->team, &run->shares, k, 0);
    while (hr_walk_on(&walk)) {
        if (walk.rank == team->rank) {
            const struct hr_range share = walk.share;
            const size_t skip = run->done > share.offset ? hr_smaller(run->done - share.offset, share.bytes) : 0;
            walk.share = (struct hr_range){share.offset + skip, share.bytes - skip};
            walk.at += skip;
            reduce_share(run, k, &walk, to_outputs, run->postscale);
            if (!to_outputs) {
                hr_fused_unpack(&run->shares.by_rank[team->rank], walk.share.offset, walk.share.bytes,
                                slot + walk.at, team->node->kernel, HR_STORE_ORDINARY);
            }
        }
    }
}

/* ---- Several hosts ---- */

static void reduce_region(struct hr_segments *segments, size_t k) {
    const struct hr_reducescatter *run = (struct hr_reducescatter *)segments;
    struct hr_walk walk = hr_walk_begin(segments->team, &run->shares, k, segments->team->local_rank);
    while (segments->carries && hr_walk_on(&walk)) {
        reduce_share(run, k, &walk, 0, hr_scale_by(run->partial_scale));
    }
}

static void begin(struct hr_segments *segments, size_t k, struct hr_cross *cross) {
    const struct hr_reducescatter *run = (struct hr_reducescatter *)segments;
    const struct hr_team *team = segments->team;
    char *scratch = team->cross_scratch + k % HR_SEGMENTS_TRAVELLING_MAX * run->scratch_bytes;
    struct hr_cross_part *parts = (struct hr_cross_part *)(void *)(scratch + run->piece_scratch_bytes);
    for (int host = 0; host < team->host_count; host++) {
        parts[host] = (struct hr_cross_part){0};
    }
    char *slot = hr_segments_slot(segments, team->local_rank, k);
    struct hr_walk walk = hr_walk_begin(segments->team, &run->shares, k, team->local_rank);
    char *region = slot + walk.at;
    while (hr_walk_on(&walk)) {
        struct hr_cross_part *part = &parts[team->host_of_rank[walk.rank]];
        part->data = part->bytes == 0 ? slot + walk.at : part->data;
        part->bytes += walk.share.bytes;
    }
    const size_t bytes = (size_t)(slot + walk.at + walk.share.bytes - region);
    const struct hr_cross_ops *ops = bytes <= team->tuning.doubling ? &hr_cross_doubling : &hr_cross_scatter_ring;
    struct hr_cross_call call = hr_cross_call_of(team, run->codec);
    call.data = region;
    call.count = bytes / run->codec->wire_bytes;
    call.parts = ops == &hr_cross_scatter_ring ? parts : NULL; /* instead of both */
    call.reduce_op = run->reduce_op;
    call.scratch = scratch;
    hr_cross_begin(ops, cross, &call);
}

static void finish(struct hr_segments *segments, size_t k) {
    const struct hr_reducescatter *run = (struct hr_reducescatter *)segments;
    struct hr_team *team = segments->team;
    struct hr_walk walk = hr_walk_begin(segments->team, &run->shares, k, team->local_rank);
    while (segments->carries && hr_scale_changes(run->postscale) && hr_walk_on(&walk)) {
        if (team->host_of_rank[walk.rank] == team->host) {
            char *at = hr_segments_slot(segments, team->local_rank, k) + walk.at;
            hr_kernel_scale(team->node->kernel, run->codec->wire_dtype, at, at,
                            walk.share.bytes / run->codec->wire_bytes, run->postscale, HR_STORE_ORDINARY);
        }
    }
}

static void drain_regions(struct hr_segments *segments, size_t k) {
    const struct hr_reducescatter *run = (struct hr_reducescatter *)segments;
    struct hr_team *team = segments->team;
    for (int owner = 0; owner < run->shares.owners; owner++) {
        struct hr_walk walk = hr_walk_begin(segments->team, &run->shares, k, owner);
        while (hr_walk_on(&walk)) {
            if (walk.rank == team->rank) {
                hr_fused_unpack(&run->shares.by_rank[walk.rank], walk.share.offset, walk.share.bytes,
                                hr_segments_slot(segments, owner, k) + walk.at, team->node->kernel, HR_STORE_ORDINARY);
            }
        }
    }
}

/* ---- The task ---- */

static const struct hr_segments_ops one_host = {.fill = fill, .drain = drain};
static const struct hr_segments_ops several_hosts = {
    .fill = fill, .reduce = reduce_region, .begin = begin, .finish = finish, .drain = drain_regions};

hr_status hr_reducescatter_begin(struct hr_reducescatter *run, struct hr_team *team, const struct hr_fused *by_rank,
                                 int reduce_op, double prescale, struct hr_scale postscale) {
    const struct hr_codec *codec = by_rank[0].codec;
    size_t longest = 0;
    size_t total = 0;
    size_t receivers = 0; /* of a reduce the root alone */
    for (int r = 0; r < team->size; r++) {
        longest = by_rank[r].bytes > longest ? by_rank[r].bytes : longest;
        total += by_rank[r].bytes;
        receivers += by_rank[r].bytes > 0;
    }
    receivers += receivers == 0;
    /* the region of an owner has room for a unit of each: a line, or a value where there are too many */
    const size_t owners_most = team->host_count == 1 ? 1 : (size_t)team->owner_count;
    const size_t unit = receivers * owners_most * HR_LINE <= team->tuning.segment ? HR_LINE : codec->wire_bytes;
    const size_t owners = hr_smaller(owners_most, team->tuning.segment / unit / receivers);
    if (owners == 0) {
        return HORO_ERR_RESOURCE;
    }
    *run = (struct hr_reducescatter){
        .segments = {.team = team, .carries = (size_t)team->local_rank < owners},
        .codec = codec,
        .reduce_op = reduce_op,
        .prescale = prescale,
        .partial_scale = 1.0,
        .postscale = postscale,
        .shares = {by_rank, unit, .owners = (int)owners, .region_bytes = team->tuning.segment / unit / owners * unit},
    };
    const int is_between = team->host_count > 1;
    if (is_between) {
        run->partial_scale = hr_partial_scale(codec, reduce_op, postscale.factor);
        run->postscale.factor /= run->partial_scale;
        run->piece_scratch_bytes = hr_two_level_scratch_bytes(&team->tuning, team->host_count, codec->wire_bytes,
                                                              run->shares.region_bytes, &hr_cross_scatter_ring);
        run->scratch_bytes = hr_round_up(
            run->piece_scratch_bytes + (size_t)team->host_count * sizeof(struct hr_cross_part), HR_CROSS_ALIGNMENT);
        HR_TRY(hr_segments_reserve_scratch(team, HR_SEGMENTS_TRAVELLING_MAX * run->scratch_bytes));
    } else if (total >= team->tuning.stream) {
        run->segments.trial = hr_store_try(&team->scatter_stores, total);
    }
    const size_t at_once = run->shares.region_bytes / unit / receivers * owners; /* units of each rank in a segment */
    const size_t count = hr_divide_up(hr_divide_up(longest, unit), at_once);
    run->shares.count = count * owners;
    hr_segments_begin(&run->segments, is_between ? &several_hosts : &one_host,
                      is_between ? HR_PHASE_REDUCED : HR_PHASE_FILLED, count);
    return HORO_OK;
}
