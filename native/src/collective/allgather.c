/* Allgather over one arena. Every rank shows its next segment and copies the others' out. */
#include <string.h>

#include "collective/collective.h"

static void fill(struct hr_segments *segments, size_t k) {
    const struct hr_allgather *run = (struct hr_allgather *)segments;
    const struct hr_team *team = segments->team;
    const struct hr_fused *mine = &run->shares.by_rank[team->rank];
    const struct hr_range part = hr_segment(team->tuning.segment, mine->bytes, k);
    hr_fused_pack(mine, part.offset, part.bytes, hr_segments_slot(segments, team->local_rank, k), team->node->kernel,
                  1.0, segments->trial.store);
}

static void drain(struct hr_segments *segments, size_t k) {
    const struct hr_allgather *run = (struct hr_allgather *)segments;
    struct hr_team *team = segments->team;
    for (int i = 0; i < team->local_size; i++) { /* each rank begins with another, so that not all read one slot */
        const int from = (team->local_rank + i) % team->local_size;
        const char *slot = i == 0 ? NULL : hr_segments_slot(segments, from, k); /* its own part is its input */
        const struct hr_fused *theirs = &run->shares.by_rank[team->rank_of_local[from]];
        const struct hr_range part = hr_segment(team->tuning.segment, theirs->bytes, k);
        hr_fused_unpack(theirs, part.offset, part.bytes, slot, team->node->kernel, run->result_store);
    }
}

static const struct hr_segments_ops one_host = {.fill = fill, .drain = drain};

/*
 * ---- Several hosts (two-level form) ----
 *
 * The part of every rank is cut into `share_count` shares, an equal number for each owner and segment: share j belongs
 * to segment j / owners and lies in the slot of owner j % owners, all parts in order of their hosts one behind the
 * other. So the ranks of a host write what they have into their owners' slots; each owner gathers its slot with its
 * like on the other hosts, host by host a contiguous part; and everybody copies everything out of the slots of its
 * host. The links of all owners carry the same, whoever has how much.
 *
 * Small results travel by doubling, large ones round a ring, where each link carries all but one host's data once, in
 * both directions at once.
 *
 * A rank that is alone on its host needs no slot for a share that is one host's own and lies in one tensor: it travels
 * from and to the result. That is nobody else's business: what travels is the same.
 */

/* The place that a share travels from and to without a slot, or NULL. */
static char *direct_place(const struct hr_allgather *run, int rank, struct hr_range share) {
    const struct hr_team *team = run->segments.team;
    if (team->local_size > 1 || team->host_size[team->host_of_rank[rank]] > 1 || share.bytes == 0) {
        return NULL;
    }
    const struct hr_fused *part = &run->shares.by_rank[rank];
    const struct hr_piece *piece = &part->pieces[hr_fused_find(part, share.offset)];
    const size_t skip = share.offset - piece->offset;
    return skip + share.bytes <= piece->bytes ? piece->output + skip : NULL;
}

/* The place where a share lies here. */
static char *place_of(const struct hr_allgather *run, const struct hr_walk *walk, int owner, size_t k) {
    char *direct = direct_place(run, walk->rank, walk->share);
    return direct != NULL ? direct : hr_segments_slot(&run->segments, owner, k) + walk->at;
}

static void fill_owners(struct hr_segments *segments, size_t k) {
    const struct hr_allgather *run = (struct hr_allgather *)segments;
    struct hr_team *team = segments->team;
    for (int owner = 0; owner < run->shares.owners; owner++) {
        struct hr_walk walk = hr_walk_begin(run->segments.team, &run->shares, k, owner);
        while (hr_walk_on(&walk)) {
            if (walk.rank == team->rank) {
                hr_fused_pack(&run->shares.by_rank[walk.rank], walk.share.offset, walk.share.bytes,
                              place_of(run, &walk, owner, k), team->node->kernel, 1.0, HR_STORE_ORDINARY);
            }
        }
    }
}

static void begin(struct hr_segments *segments, size_t k, struct hr_cross *cross) {
    const struct hr_allgather *run = (struct hr_allgather *)segments;
    const struct hr_team *team = segments->team;
    struct hr_cross_part *parts = run->parts + k % HR_SEGMENTS_TRAVELLING_MAX * (size_t)team->host_count;
    memset(parts, 0, (size_t)team->host_count * sizeof *parts);
    struct hr_walk walk = hr_walk_begin(run->segments.team, &run->shares, k, team->local_rank);
    while (hr_walk_on(&walk)) {
        struct hr_cross_part *part = &parts[team->host_of_rank[walk.rank]];
        part->data = part->bytes == 0 ? place_of(run, &walk, team->local_rank, k) : part->data;
        part->bytes += walk.share.bytes;
    }
    struct hr_cross_call call = hr_cross_call_of(team, hr_codec_find(HORO_UINT8, 0));
    call.parts = parts;
    hr_cross_begin(run->cross, cross, &call);
}

static void drain_owners(struct hr_segments *segments, size_t k) {
    const struct hr_allgather *run = (struct hr_allgather *)segments;
    for (int owner = 0; owner < run->shares.owners; owner++) {
        struct hr_walk walk = hr_walk_begin(run->segments.team, &run->shares, k, owner);
        while (hr_walk_on(&walk)) {
            if (direct_place(run, walk.rank, walk.share) == NULL) {
                hr_fused_unpack(&run->shares.by_rank[walk.rank], walk.share.offset, walk.share.bytes,
                                place_of(run, &walk, owner, k), segments->team->node->kernel, HR_STORE_ORDINARY);
            }
        }
    }
}

static const struct hr_segments_ops several_hosts = {.fill = fill_owners, .begin = begin, .drain = drain_owners};

hr_status hr_allgather_begin(struct hr_allgather *run, struct hr_team *team, const struct hr_fused *by_rank) {
    *run = (struct hr_allgather){.segments = {.team = team}, .shares = {.by_rank = by_rank}};
    size_t longest = 0;
    size_t total = 0;
    int needs_slots = team->size > team->host_count;
    for (int r = 0; r < team->size; r++) {
        longest = by_rank[r].bytes > longest ? by_rank[r].bytes : longest;
        total += by_rank[r].bytes;
        needs_slots |= by_rank[r].count > 1;
    }
    if (team->host_count == 1) {
        run->segments.trial.store = hr_store_choose_for_move(team, by_rank[team->rank].bytes);
        run->result_store = hr_store_choose_for_result(team, total);
        if (team->size == 1) {
            hr_fused_unpack(by_rank, 0, total, NULL, team->node->kernel, run->result_store);
        }
        hr_segments_begin(&run->segments, &one_host, HR_PHASE_FILLED,
                          team->size == 1 ? 0 : hr_divide_up(longest, team->tuning.segment));
        return HORO_OK;
    }
    size_t rounding;
    const size_t parts = HR_SEGMENTS_TRAVELLING_MAX * (size_t)team->host_count;
    HR_TRY(hr_segments_reserve_scratch(team, parts * sizeof *run->parts));
    HR_TRY(hr_segments_choose_unit(team, (size_t)team->size, &run->shares.unit, &rounding));
    run->parts = (struct hr_cross_part *)(void *)team->cross_scratch;
    run->shares.owners = total <= team->tuning.gather_spread ? 1 : team->owner_count;
    run->cross = total <= team->tuning.gather_doubling ? &hr_cross_gather_doubling : &hr_cross_gather_ring;
    /* the bytes of all parts that one segment takes */
    const size_t at_once = needs_slots ? (team->tuning.segment - rounding) * (size_t)run->shares.owners
                                       : (size_t)team->size * team->tuning.gather_lone;
    const size_t count = hr_divide_up(total, at_once);
    run->shares.count = count * (size_t)run->shares.owners;
    run->segments.carries = team->local_rank < run->shares.owners;
    hr_segments_begin(&run->segments, &several_hosts, HR_PHASE_REDUCED, count);
    return HORO_OK;
}
