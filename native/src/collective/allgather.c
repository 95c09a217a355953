/*
 * Allgather over one arena; over several it is two_level_gather.c. Every rank shows its next segment and copies the
 * others' out.
 */
#include "collective/collective.h"
#include "collective/two_level.h"

/* Segment k of what one rank contributes; empty behind its end. */
static struct hr_range part_of(const struct hr_team *team, const struct hr_fused *fused, size_t k) {
    const size_t segment_bytes = team->tuning.segment;
    return fused->bytes > k * segment_bytes ? hr_segment(segment_bytes, fused->bytes, k) : (struct hr_range){0};
}

static void fill(struct hr_segments *segments, size_t k) {
    const struct hr_allgather *run = (struct hr_allgather *)segments;
    const struct hr_team *team = segments->team;
    const struct hr_fused *mine = &run->by_rank[team->rank];
    const struct hr_range part = part_of(team, mine, k);
    hr_fused_pack(mine, part.offset, part.bytes, hr_segments_slot(segments, team->local_rank, k), team->node->kernel,
                  1.0, run->store);
}

/* Now that its inputs are in the cache. */
static void keep(struct hr_segments *segments, size_t k) {
    const struct hr_allgather *run = (struct hr_allgather *)segments;
    const struct hr_fused *mine = &run->by_rank[segments->team->rank];
    const struct hr_range part = part_of(segments->team, mine, k);
    hr_fused_put(mine, part.offset, part.bytes, NULL, segments->team->node->kernel, run->result_store);
}

static void drain(struct hr_segments *segments, size_t k) {
    const struct hr_allgather *run = (struct hr_allgather *)segments;
    struct hr_team *team = segments->team;
    for (int i = 1; i < team->local_size; i++) { /* each rank begins with another, so that not all read one slot */
        const int from = (team->local_rank + i) % team->local_size;
        const struct hr_fused *theirs = &run->by_rank[team->rank_of_local[from]];
        const struct hr_range part = part_of(team, theirs, k);
        hr_fused_put(theirs, part.offset, part.bytes, hr_segments_slot(segments, from, k), team->node->kernel,
                     run->result_store);
    }
}

static const struct hr_segments_ops one_host = {.fill = fill, .keep = keep, .drain = drain};

hr_status hr_allgather_begin(struct hr_allgather *run, struct hr_team *team, const struct hr_fused *by_rank) {
    *run = (struct hr_allgather){.segments = {.team = team}, .by_rank = by_rank};
    if (team->host_count > 1) {
        return hr_two_level_gather_begin(run);
    }
    size_t count = 0;
    size_t total = 0;
    for (int r = 0; r < team->size && team->size > 1; r++) {
        const size_t segments = hr_divide_up(by_rank[r].bytes, team->tuning.segment);
        count = segments > count ? segments : count;
        total += by_rank[r].bytes;
    }
    if (count == 0) { /* of one rank */
        hr_fused_put(&by_rank[team->rank], 0, by_rank[team->rank].bytes, NULL, team->node->kernel, HR_STORE_ORDINARY);
    }
    run->store = hr_store_choose_for_move(team, by_rank[team->rank].bytes);
    run->result_store = hr_store_choose_for_result(team, total);
    run->segments.ops = &one_host;
    run->segments.drain_phase = HR_PHASE_FILLED;
    hr_segments_begin(&run->segments, count);
    return HORO_OK;
}
