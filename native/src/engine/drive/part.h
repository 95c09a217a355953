/*
 * A part: whatever the loop of the engine turns (loop.c). Each action exists once, in a turn, which is the only look
 * at whether there is something to do. All of it is the driver's, but for `needs`.
 */
#ifndef HR_ENGINE_PART_H
#define HR_ENGINE_PART_H

#include <stdint.h>

#include "base/status.h"

/* No time: the part has nothing that is due. */
#define HR_NEVER INT64_MAX

/* The order in which the loop turns them. */
enum hr_part_rank {
    HR_PART_END,         /* leave.c: leaving, and the end of the group */
    HR_PART_SUBMISSIONS, /* submissions.c: what callers have submitted, and their reports */
    HR_PART_ABSENCE,     /* membership/join.c: of a team, while a request there is held back */
    HR_PART_GPU,         /* nccl.c */
    HR_PART_LANE,        /* group/lane.c: one for each team, the world first */
    HR_PART_LINKS,       /* the loop's own: the supervision of links */
    HR_PART_STALL,       /* stall.c */
    HR_PART_DEADLOCK,    /* blocked.c */
};

struct hr_part;

struct hr_part_ops {
    enum hr_part_rank rank;
    /* One pass over what can move: HR_STILL, HR_MOVED or a status. Never waits. NULL: the part has times only. */
    int (*turn)(struct hr_part *part);
    /*
     * Does what is due; returns the next time, whatever has been expected before: that may be an earlier one, which has
     * taken the place of this. NULL: the part has no times.
     */
    int64_t (*due)(struct hr_part *part, int64_t now_ns);
    /* Whether somebody must drive for it, by the driver or with the lock held while nobody drives. NULL: never. */
    int (*needs)(const struct hr_part *part);
    int is_called; /* by other ranks of the host, with hr_node_call: then the thread looks at `needs`, unkicked too */
    /* Whether something is under way there that a peer may hold up, besides requests that are pending. NULL: never. */
    int (*expects)(const struct hr_part *part);
    /* From now_ns on something is under way that a peer may hold up; 0: nothing is any more. NULL: all the same. */
    void (*await)(struct hr_part *part, int64_t now_ns);
    /* A number that changes whenever something has moved there. NULL: nothing that counts does. */
    uint64_t (*moves)(const struct hr_part *part);
    /* The group ends, in order or not: it begins nothing more. NULL: there is nothing to be given up. */
    void (*end)(struct hr_part *part, int has_failed);
};

struct hr_part {
    const struct hr_part_ops *ops;
    void *owner;
    struct hr_part *next;
    int64_t next_ns; /* when a wait must end for it, and `due` is called */
    int is_quiet;    /* nothing is under way: it is turned in one of so many turns, and before a sleep */
};

/* The wait ends at this time, if not before. */
static inline void hr_part_expect(struct hr_part *part, int64_t at_ns) {
    part->next_ns = at_ns < part->next_ns ? at_ns : part->next_ns;
}

#endif
