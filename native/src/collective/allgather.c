/*
 * Allgather over one arena; over several it is two_level_gather.c. Every rank shows its next segment and copies the others' out.
 */
#include "collective/collective.h"
#include "collective/segment.h"
#include "collective/two_level.h"

static void copy_own(const struct hr_group *group, const struct hr_fused *mine) {
    for (size_t i = 0; i < mine->count; i++) {
        const struct hr_piece *piece = &mine->pieces[i];
        group->kernel->copy(piece->output, piece->input, piece->bytes, HR_STORE_ORDINARY);
    }
}

static int run_segment(struct hr_group *group, const struct hr_fused *by_rank, size_t k, enum hr_store store) {
    const unsigned parity = (unsigned)(group->segment++ & 1);
    const size_t offset = k * group->arena.segment_bytes;
    HR_TRY(hr_group_await(group, HR_PHASE_DRAINED, parity));
    const struct hr_fused *mine = &by_rank[group->rank];
    if (mine->bytes > offset) {
        hr_fused_pack(mine, offset, hr_segment(group, mine->bytes, k).bytes,
                      hr_arena_slot(&group->arena, group->local_rank, parity), group->kernel, 1.0, store);
    }
    hr_group_arrive(group, HR_PHASE_FILLED, parity);
    HR_TRY(hr_group_await(group, HR_PHASE_FILLED, parity));
    for (int i = 0; i < group->local_size; i++) {
        const struct hr_fused *theirs = &by_rank[group->rank_of_local[i]];
        if (i != group->local_rank && theirs->bytes > offset) {
            hr_fused_unpack(theirs, offset, hr_segment(group, theirs->bytes, k).bytes,
                            hr_arena_slot(&group->arena, i, parity), group->kernel);
        }
    }
    hr_group_arrive(group, HR_PHASE_DRAINED, parity);
    return HORO_OK;
}

int hr_allgather(struct hr_group *group, const struct hr_fused *by_rank) {
    if (group->host_count > 1) {
        return hr_two_level_gather(group, by_rank);
    }
    copy_own(group, &by_rank[group->rank]);
    size_t segments = 0;
    for (int r = 0; r < group->size && group->size > 1; r++) {
        const size_t count = hr_segment_count(group, by_rank[r].bytes);
        segments = count > segments ? count : segments;
    }
    for (size_t k = 0; k < segments; k++) {
        HR_TRY(run_segment(group, by_rank, k, hr_store_choose(group, by_rank[group->rank].bytes)));
    }
    return HORO_OK;
}
