/* The loop that turns the parts of the engine, and the end of the group, which is its first part. */
#ifndef HR_ENGINE_DRIVE_H
#define HR_ENGINE_DRIVE_H

#include "engine/engine.h"
#include "engine/gpu/gpu.h"

/* A number that changes whenever something has moved here, in any lane. */
static inline uint64_t hr_drive_moves(const struct hr_engine *engine) {
    uint64_t moves = engine->driver.lane_moves;
    for (int i = 0; i < engine->lane_count; i++) {
        moves += hr_lane_moves(engine->lanes[i]);
    }
    return moves;
}

/* token.c: the background thread */
void *hr_engine_main(void *engine);
/* With the lock held: whether a caller may take the token. */
static inline int hr_token_is_free(const struct hr_driver *driver) {
    return driver->owner == HR_TOKEN_FREE || driver->owner == HR_TOKEN_WATCH;
}
/* With the lock held, which it lets go meanwhile: takes it at now_ns, and drives as hr_engine_drive. */
void hr_token_drive(struct hr_engine *engine, const struct hr_request *request, int64_t now_ns, int64_t deadline_ns);
/* Likewise: until the token is free, requests are done, or the deadline. */
void hr_token_wait(struct hr_engine *engine, int64_t deadline_ns);

/*
 * loop.c, for the owner of the token: drives until `until` is done, the deadline has passed, or a signal came. The
 * background thread, whose `until` is NULL: until no part needs it; where it serves other hosts, until there is nothing
 * to do but wait, or a caller wants to: 1, and its sleep on all that may come is prepared.
 */
int hr_engine_drive(struct hr_engine *engine, const struct hr_request *until, int64_t deadline_ns);

/* The part is turned from now on, or no longer. The driver, with the lock held. */
void hr_drive_add(struct hr_engine *engine, struct hr_part *part, const struct hr_part_ops *ops, void *owner);
void hr_drive_remove(struct hr_engine *engine, const struct hr_part *part);
/* Whether somebody must drive, by the driver or with the lock held while nobody drives. */
int hr_drive_needs(const struct hr_engine *engine);

/* stall.c: the time of the next look while others are waited for, and when questions should have been answered. */
int64_t hr_stall_next_look_ns(const struct hr_node *node, int64_t now_ns);
int64_t hr_stall_answers_ns(const struct hr_engine *engine);

extern const struct hr_part_ops hr_part_end;         /* leave.c */
extern const struct hr_part_ops hr_part_submissions; /* announce.c */
extern const struct hr_part_ops hr_part_gpu;         /* nccl.c */
extern const struct hr_part_ops hr_part_lane;        /* lane.c */
extern const struct hr_part_ops hr_part_links;       /* loop.c */
extern const struct hr_part_ops hr_part_stall;       /* stall.c */
extern const struct hr_part_ops hr_part_deadlock;    /* blocked.c */

#endif
