/* The part that takes what callers have submitted, and their reports, to the lanes. */
#include "engine/membership/membership.h"
#include "engine/report/report.h"

/* All of the queue is announced, or fails with the group, since it is no longer there. */
static int announce(struct hr_engine *engine) {
    int status = HORO_OK;
    struct hr_request *next = NULL;
    for (struct hr_request *request = hr_requests_take_queue(&engine->requests); request != NULL; request = next) {
        struct hr_lane *lane = request->port->lane;
        next = request->next;
        lane->part.is_quiet = 0;
        hr_engine_expect_removal(engine, request);
        if (status == HORO_OK) {
            const int joins = request->call.op == HORO_JOIN;
            status = joins ? hr_join_begin(lane, request) : hr_lane_announce(lane, request);
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
    for (int i = 0; engine->held_joins > 0 && i < engine->lane_count; i++) {
        const int joined = hr_join_go_on(engine->lanes[i]);
        HR_TRY(joined);
        moved |= joined;
    }
    return moved;
}

const struct hr_part_ops hr_part_submissions = {.rank = HR_PART_SUBMISSIONS, .turn = turn};
