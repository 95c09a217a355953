/* Between the files of the driver: drive.c takes turns, drive_wait.c waits. */
#ifndef HR_ENGINE_DRIVE_H
#define HR_ENGINE_DRIVE_H

#include "engine/engine.h"
#include "engine/gpu.h"

static inline int hr_drive_is_aborted(const struct hr_engine *engine) {
    return hr_arena_aborted(&engine->node->arena).code != 0;
}

/* A number that changes whenever something has moved here, in any lane. */
static inline uint64_t hr_drive_moves(const struct hr_engine *engine) {
    uint64_t moves = engine->driver.lane_moves;
    for (int i = 0; i < engine->lane_count; i++) {
        moves += hr_lane_moves(engine->lanes[i]);
    }
    return moves;
}

/* Whether this turn or look may leave out a lane: where there are several, one in which nothing is under way. */
static inline int hr_drive_skips(const struct hr_engine *engine, int index) {
    const struct hr_lane *lane = engine->lanes[index];
    return index > 0 && lane->is_quiet && !lane->is_due &&
           atomic_load_explicit(&lane->pending, memory_order_relaxed) == 0 &&
           !hr_node_looks_at_quiet(engine->node, index);
}

/* ---- drive.c ---- */

/* The LEAVE record has been executed, and what other teams have begun is over, or is not waited for any longer. */
int hr_drive_may_close(const struct hr_engine *engine);
/* Whether something holds for any of the lanes that this rank leads. */
int hr_drive_any_leader(const struct hr_engine *engine, int (*holds)(const struct hr_lane *lane));
/* CLOSING: nobody needs this rank any more. */
int hr_drive_may_end(const struct hr_engine *engine);

/* ---- drive_wait.c ---- */

/* One wait for something to do. 1, or 0 if the caller should get back: its time is up, or a signal came. */
int hr_drive_wait_for_work(struct hr_engine *engine, int64_t spin_ns, int64_t deadline_ns);
/* The thread prepares to wait while callers may drive. 0: there is something to do. */
int hr_drive_watch(struct hr_engine *engine);
/* Whether something is under way that a peer may hold up. */
int hr_drive_expects_others(const struct hr_engine *engine);
/* Nothing is: the links are silent. */
void hr_drive_stop_expecting(struct hr_engine *engine);

#endif
