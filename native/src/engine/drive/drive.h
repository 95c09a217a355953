/*
 * Drive: one loop over the parts of a rank, on whichever thread has the token, and the lock that all rooms share.
 * Nothing here knows what the parts are.
 *
 * The lock is the rank's one lock. "The driver" is whoever has the token; it has the lock only where a line says so.
 */
#ifndef HR_ENGINE_DRIVE_DRIVE_H
#define HR_ENGINE_DRIVE_DRIVE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "base/status.h"
#include "node/node.h"

/*
 * A part: whatever the loop of the engine turns. Each action exists once, in a turn, which is the only look
 * at whether there is something to do. All of it is the driver's, but for `needs`.
 */

/* No time: the part has nothing that is due. */
#define HR_NEVER INT64_MAX

/* The order in which the loop turns them. */
enum hr_part_rank {
    HR_PART_END,         /* leave.c: leaving, and the end of the group */
    HR_PART_SUBMISSIONS, /* engine.c: what callers have submitted, and their reports */
    HR_PART_ABSENCE,     /* membership/join.c: of a team, while a request there is held back */
    HR_PART_GPU,         /* nccl.c, once NCCL is used */
    HR_PART_LANE,        /* group/lane.c: one for each team, the world first */
    HR_PART_PAIRS,       /* pairs/pairs.c, once it is used */
    HR_PART_LINKS,       /* the loop's own: the supervision of links */
    HR_PART_STALL,       /* stall.c */
    HR_PART_DEADLOCK,    /* blocked.c */
    HR_PART_LATE,        /* late.c */
};

struct hr_part;

struct hr_part_ops {
    enum hr_part_rank rank;
    /* One pass over what can move: HR_STILL, HR_MOVED or a status. Never waits. NULL: the part has times only. */
    int (*turn)(struct hr_part *part);
    int outlives; /* the group: it is turned behind the end, too, once that is over (ENDED) */
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
void hr_part_expect(struct hr_part *part, int64_t at_ns);
/* An `await`: when nothing is under way any more, no wait ends for what is done. */
void hr_part_rest(struct hr_part *part, int64_t now_ns);

/* The owner of the right to turn the parts; see drive.c. */
enum hr_token { HR_TOKEN_FREE, HR_TOKEN_CALLER, HR_TOKEN_THREAD, HR_TOKEN_WATCH };

/* From the beginning to the end of the group; the first part has them one after another, see engine.h. */
enum hr_stage { HR_STAGE_RUNNING, HR_STAGE_CLOSING, HR_STAGE_ENDING, HR_STAGE_ENDED };

struct hr_drive {
    struct hr_node *node;
    pthread_mutex_t lock;

    /* Under the lock, but for atomics. */
    pthread_cond_t done; /* something that is waited for is done, or the token is free */
    int waiters;
    _Atomic uint32_t pending; /* requests that are not done: somebody drives for them */
    enum hr_token owner;
    int64_t since_ns; /* several hosts: when it last changed; CALLER: when that call began to wait */
    int is_kicked;    /* the thread, which is to look whether it must drive */
    int looks_soon;   /* the thread sleeps for a while at most */
    _Atomic int wanted;       /* several hosts: a caller that waits for the only request would drive itself */
    _Atomic int serves_hosts; /* leads a team on several hosts, until their leaders have been told of the end */
    _Atomic int stop;         /* this rank shuts down */
    pthread_t thread;
    struct hr_sleep sleep; /* the thread's */
    int kick_fd;           /* of that sleep, where it is on descriptors; -1: it never is */
    pthread_mutex_t end_lock; /* of whoever ends the thread */
    int has_ended;
    int64_t spin_ns; /* of a caller */

    /* The driver's own. */
    struct hr_part *parts; /* in their order; changed under the lock */
    struct hr_part links;
    enum hr_stage stage;
    uint64_t gone_moves; /* of parts that are no longer there */
    int expects_others; /* something is under way that a peer may hold up, as the last wait has found */
};

/* HORO_OK, or a status with *error set and nothing left behind; its thread is not there before start. */
hr_status hr_drive_init(struct hr_drive *drive, struct hr_node *node, int64_t spin_ns, struct hr_error *error);
hr_status hr_drive_start(struct hr_drive *drive, struct hr_error *error);
/* After `stop` has been set and kicked: until the thread has ended, which is at the end of the group. */
void hr_drive_end_thread(struct hr_drive *drive);
/* After an abort, or in a forked child, where the descriptor is the parent's. */
void hr_drive_close_fd(struct hr_drive *drive);
void hr_drive_fini(struct hr_drive *drive);

void hr_drive_lock(struct hr_drive *drive);
void hr_drive_unlock(struct hr_drive *drive);

/* ---- With the lock held ---- */

/* Wakes whoever must notice a change made under the lock. */
void hr_drive_kick(struct hr_drive *drive);
/* Something that is waited for is done. */
void hr_drive_wake_waiters(struct hr_drive *drive);
/* Whether a caller may take the token. */
int hr_drive_is_free(const struct hr_drive *drive);
/*
 * Lets the lock go meanwhile: takes the token, which is free, at now_ns, and drives until the word has another value,
 * the deadline has passed, or a signal came.
 */
void hr_drive_until(struct hr_drive *drive, const _Atomic int *word, int value, int64_t now_ns, int64_t deadline_ns);
/* Likewise: until the token is free, something is done, or the deadline. */
void hr_drive_wait(struct hr_drive *drive, int64_t deadline_ns);

/* ---- Parts ---- */

/* The part is turned from now on, or no longer. The driver, with the lock held; or nobody drives yet. */
void hr_drive_add(struct hr_drive *drive, struct hr_part *part, const struct hr_part_ops *ops, void *owner);
void hr_drive_remove(struct hr_drive *drive, const struct hr_part *part);
/* A number that changes whenever something has moved here, in any part. The driver. */
uint64_t hr_drive_moves(const struct hr_drive *drive);

#endif
