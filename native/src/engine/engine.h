/*
 * The engine of one rank: requests in, agreement, batches executed in the order of the log.
 *
 * Threads. Its own background thread and any number of callers. Each room of the engine says whose it is: under the
 * lock, or the driver's, that is touched by the one thread that drives, whichever it is.
 *
 * The driver is the background thread, or a caller of horo_wait that found nobody driving: a synchronous operation then
 * costs no thread switch. It goes round one loop over the parts of the engine (drive/), and waits if nothing has moved.
 * No turn of a part waits, so a rank that executes a batch serves its control links and notices losses all the time;
 * and a caller may leave the loop at any turn.
 *
 * While nothing is pending nobody drives; drive.c says whose turn it is.
 *
 * The end. It has one of two causes: an abort, which is heard at once and out of order (a word in the arena, LOST
 * messages between hosts), or a LEAVE record, which closes the log of the world at one place for all ranks. The
 * driver's part of it:
 *
 *     stage   | next stage when                                | meanwhile
 *     --------+------------------------------------------------+-----------------------------------------------------
 *     RUNNING | CLOSING: the LEAVE record of the world is    | agrees and executes; behind that record what other
 *             | executed, and nothing of other teams goes on;  | teams have begun, as long as it moves
 *             | ENDING: the abort word is set                  |
 *     CLOSING | ENDING: nobody needs it any more (below), or   | fails what is pending and what comes; a leader still
 *             | the abort word is set                          | hears and passes on LOST, which those that execute
 *             |                                                | could not hear of without it
 *     ENDING  | ENDED: the neighbours have been sent what      | a leader sends; after an abort requests stay pending:
 *             | there is to tell, or FLUSH_MS have passed      | a caller that fails may end its process
 *     ENDED   |                                                | fails what is pending and what comes, but for sends
 *             |                                                | and receives between ranks that stay (pairs.h)
 *
 * The leader of a host is needed until all ranks there, and all hosts below it in the tree, have executed what stands
 * before the LEAVE record (DONE); the life lines of its host end at it, too. A rank that shuts down sets the abort word
 * if nothing moves for LEAVE_GRACE_MS before that record, or CLOSE_GRACE_MS behind it. The other teams have no such
 * record: an operation of theirs that is under way may end well on some members and be aborted on others.
 */
#ifndef HR_ENGINE_ENGINE_H
#define HR_ENGINE_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine/drive/drive.h"
#include "engine/group/lane.h"
#include "engine/pairs/pairs.h"
#include "engine/report/deadlock.h"
#include "engine/requests/requests.h"
#include "node/end.h"

enum { HR_BLOCKED_NAME_MAX = 64, HR_BLOCKED_TEXT_MAX = 256 };

/* A report of a caller on the threads that wait; see horo_report_blocked. Reports are compared as bytes. */
struct hr_blocked_report {
    int64_t count; /* 0: not blocked */
    int64_t handles[HORO_WAITING_MAX];
    int64_t last_handle; /* submitted then, */
    uint64_t pending;    /* and not done then */
    uint64_t passed;     /* as in struct hr_requests, then */
    char others[HR_BLOCKED_NAME_MAX];
};

/* The last one. */
struct hr_blocked {
    struct hr_blocked_report report;
    _Atomic int is_new; /* the driver has not told it yet */
    char text[HR_BLOCKED_TEXT_MAX];
    uint32_t question;         /* that this answers; 0: none */
    _Atomic uint32_t answered; /* the last question that was answered */
    int is_told; /* the driver's: rank 0 knows of it */
};

/* Leaving, and the end of the group; see leave.c. The driver's, but for what a caller writes before it sets `stop`. */
struct hr_leaving {
    struct hr_part part;
    int has_ended; /* its descriptors are given back; under the lock, as what follows */
    int status;    /* for others, as the words */
    char words[HR_LAST_WORDS_MAX + 1];
    int64_t flush_ns; /* until when, at most, what is to be sent is waited for in CLOSING and ENDING */
    int64_t mail_ns;  /* likewise sends and receives, before this rank leaves; 0: not yet */
    int64_t grace_ns; /* when it stops to wait, unless something moves; 0: it does not leave */
    uint64_t moves;   /* when the grace began */
    int is_late; /* the LEAVE record is executed, and what other teams have begun has not moved for that long */
};

/* Timeouts of requests; see report/late.c. */
struct hr_late {
    struct hr_part part;
    int64_t asked; /* the handle of the request that is late, about which others have been asked, and when; 0: none */
    int64_t asked_ns;
    uint32_t roll_call; /* which the ranks of this host answer meanwhile */
};

/* The values that operations run with where they may change; see engine.c. */
struct hr_tuned {
    int is_on; /* else the lanes keep what they were made with */
    uint64_t settled[HORO_KNOB_COUNT]; /* the driver's: of teams to come, the first or the final ones */
    uint64_t values[HORO_KNOB_COUNT];  /* of the world; under the lock */
    int is_final;                      /* likewise */
};

struct hr_engine {
    struct hr_node *node;
    struct hr_lane_setup lane_setup;
    struct hr_deadlock judge; /* the root of all ranks; the driver's */
    struct hr_drive drive;
    struct hr_requests requests;
    struct hr_pairs pairs;
    struct hr_blocked blocked;
    struct hr_leaving leaving;
    struct hr_late late;
    struct hr_part submissions, gpu, stall, deadlock; /* besides those of the lanes */
    /* [lane_count] this rank's, that of all ranks first; written by the driver with the lock held */
    struct hr_lane *lanes[HR_TEAMS_MAX];
    int lane_count;
    struct hr_tuned tuned;
    pthread_mutex_t staging_lock;
    struct hr_stager *_Atomic stager; /* of tensors on GPUs; NULL: none may come */
    struct hr_on_gpu *_Atomic on_gpu; /* NULL: all of them are staged */
};

hr_status hr_engine_init(struct hr_engine *engine, struct hr_team *world, const horo_setup *setup,
                         struct hr_error *error);
/* Closes links, also of teams that are being added, and all else. Nobody drives: at the end, or in a forked child. */
void hr_engine_close_fds(struct hr_engine *engine);
/* As horo_leave: leaves the group and joins the thread, unless that has been done. */
void hr_engine_leave(struct hr_engine *engine, int status, const char *words);
/* As horo_abort. */
void hr_engine_abort(struct hr_engine *engine, const char *words);
/* Leaves without words (horo_destroy); frees. */
void hr_engine_fini(struct hr_engine *engine);

hr_status hr_engine_submit(struct hr_engine *engine, const horo_request *request, int64_t *handle,
                           struct hr_error *error);

/* As horo_propose_tuning. */
int hr_engine_propose_tuning(struct hr_engine *engine, const uint64_t *values, int is_final, struct hr_error *error);

#endif
