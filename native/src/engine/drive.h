/* The loop that turns the parts of the engine, and the end of the group, which is its first part. */
#ifndef HR_ENGINE_DRIVE_H
#define HR_ENGINE_DRIVE_H

#include "engine/engine.h"

/* A number that changes whenever something has moved here, in any lane. */
static inline uint64_t hr_drive_moves(const struct hr_engine *engine) {
    uint64_t moves = engine->driver.lane_moves;
    for (int i = 0; i < engine->lane_count; i++) {
        moves += hr_lane_moves(engine->lanes[i]);
    }
    return moves;
}

/* drive.c: the part is turned from now on, or no longer. The driver, with the lock held. */
void hr_drive_add(struct hr_engine *engine, struct hr_part *part, const struct hr_part_ops *ops, void *owner);
void hr_drive_remove(struct hr_engine *engine, const struct hr_part *part);
/* Whether somebody must drive, by the driver or with the lock held while nobody drives. */
int hr_drive_needs(const struct hr_engine *engine);

/* stall.c: the time of the next look while others are waited for, and when questions should have been answered. */
int64_t hr_stall_next_look_ns(const struct hr_node *node, int64_t now_ns);
int64_t hr_stall_answers_ns(const struct hr_engine *engine);

extern const struct hr_part_ops hr_part_end;         /* leave.c */
extern const struct hr_part_ops hr_part_submissions; /* announce.c */
extern const struct hr_part_ops hr_part_nccl;        /* by_nccl.c */
extern const struct hr_part_ops hr_part_lane;        /* lane.c */
extern const struct hr_part_ops hr_part_links;       /* drive.c */
extern const struct hr_part_ops hr_part_stall;       /* stall.c */
extern const struct hr_part_ops hr_part_deadlock;    /* blocked.c */

#endif
