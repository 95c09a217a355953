/* The part that takes what callers have submitted, and their reports, to the lanes. */
#include "engine/report/report.h"

/* All of the queue is announced, or fails with the group, since it is no longer there. */
static int announce(struct hr_engine *engine) {
    int status = HORO_OK;
    struct hr_request *next = NULL;
    for (struct hr_request *request = hr_requests_take_queue(&engine->requests); request != NULL; request = next) {
        struct hr_lane *lane = request->port->lane;
        next = request->next;
        lane->part.is_quiet = 0;
        if (status == HORO_OK) {
            const struct hr_cargo *cargo = &request->cargo;
            status = cargo->hooks != NULL && cargo->hooks->announce != NULL
                         ? cargo->hooks->announce(cargo->owner, request)
                         : hr_lane_announce(lane, request);
        }
    }
    atomic_store_explicit(&engine->node->arena.blocks[engine->node->local_rank].pending,
                          atomic_load(&engine->drive.pending), memory_order_relaxed);
    return status;
}

static int turn(struct hr_part *part) {
    struct hr_engine *engine = part->owner;
    struct hr_blocked *blocked = &engine->blocked;
    int moved = HR_STILL;
    const int has_queue = atomic_load(&engine->requests.queued) != 0;
    /* where something is announced, the last report about this rank holds no more */
    if (atomic_load_explicit(&blocked->is_new, memory_order_relaxed) || (has_queue && blocked->is_told)) {
        HR_TRY(hr_engine_tell_blocked(engine));
        moved = HR_MOVED;
    }
    if (has_queue) {
        HR_TRY(announce(engine));
        moved = HR_MOVED;
    }
    return moved;
}

const struct hr_part_ops hr_part_submissions = {.rank = HR_PART_SUBMISSIONS, .turn = turn};
