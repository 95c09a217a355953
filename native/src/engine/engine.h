/*
 * The engine of one rank: requests in, agreement, batches executed in the order of the log.
 *
 * Threads. Its own background thread and any number of callers. Each room of the engine says whose it is: under the lock, or the
 * driver's, that is touched by the one thread that drives, whichever it is.
 *
 * The driver is the background thread, or a caller of horo_wait that found nobody driving: a synchronous operation then costs no thread
 * switch. It goes round one loop (drive.c): announce, lead, execute, and one wait if nothing moved. No turn of it waits, so a rank that
 * executes a batch serves its control links and notices losses all the time; and a caller may leave the loop at any turn.
 *
 * While nothing is pending nobody drives and the background thread is parked in poll() on its kick descriptor and the life lines.
 * In a stream of requests that are done before the next one comes, it lingers a moment before it parks, so that calling it is a store.
 * The leader of a host in a job of several hosts is the exception: its background thread always drives, for other hosts need it. To a
 * caller that makes one synchronous call after the other it cedes that, and takes it back when no call has come for HR_CEDED_MS.
 *
 * The end. It has one of two causes: an abort, which is heard at once and out of order (a word in the arena, LOST messages between hosts),
 * or a LEAVE record, which closes the log at one place for all ranks. The driver's part of it:
 *
 *     stage   | next stage when                                                 | meanwhile
 *     --------+-----------------------------------------------------------------+-------------------------------------------------
 *     RUNNING | CLOSING: a LEAVE record is executed                             | agrees and executes
 *             | ENDING: the abort word is set                                   |
 *     CLOSING | ENDING: all ranks of this host and all hosts below it in the    | fails what is pending and what comes; a leader
 *             | tree have executed what stands before the LEAVE record (DONE);  | still hears and passes on LOST, which those that
 *             | or the abort word is set, as a rank does that shuts down where  | execute could not hear of without it
 *             | nothing moves for CLOSE_GRACE_MS. Who does not lead: at once    |
 *     ENDING  | ENDED: the neighbours have been sent what there is to tell,     | a leader sends; after an abort requests stay
 *             | or FLUSH_MS have passed                                         | pending: a caller that fails may end its process
 *     ENDED   |                                                                 | fails what is pending and what comes
 */
#ifndef HR_ENGINE_ENGINE_H
#define HR_ENGINE_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>

#include "backend/backend.h"
#include "node/team.h"
#include "engine/agree.h"

#define HR_NOT_ANNOUNCED UINT32_MAX

/* A submitted request: one allocation, plus the results of an allgather and the text of an error. */
struct hr_request {
    struct hr_request *next;          /* in the submit queue */
    struct hr_request *older, *newer; /* among those not done */
    int64_t handle;
    _Atomic int status; /* HORO_IN_PROGRESS until done */
    char *error_text;
    horo_request call; /* its pointers point into this allocation */
    uint64_t name_hash;
    size_t name_bytes;
    int64_t data_bytes; /* of all its tensors here */
    int64_t submit_ns;
    uint8_t *bytes; /* canonical form on the wire; points into this allocation */
    size_t byte_count;
    uint32_t announced_id;        /* driver: announced by this id, 0: in full */
    uint32_t pending_place;       /* driver: in the arena's table, HR_NOT_ANNOUNCED while in the queue */
    struct hr_gathered *gathered; /* allgather: [tensor_count] */
};

/* What this rank knows of a tensor with an id, in one allocation. Driver only. */
struct hr_known {
    struct hr_request *pending; /* announced by this id and not done */
    const char *name;           /* within bytes, without a terminator */
    size_t name_bytes;
    uint64_t name_hash;
    uint32_t id;
    uint32_t byte_count; /* at most HR_WIRE_MESSAGE_MAX */
    uint8_t bytes[];     /* canonical form */
};

enum { HR_LINK_HEAD_BYTES = 64 };

/* A control link to a neighbour in the tree of hosts: chunks of frames, each behind its length. Leaders only. */
struct hr_link {
    int host;
    int leader_rank;
    int open;
    int is_done; /* the other leader has said DONE: the end of the link is no loss */
    uint8_t recv_head[HR_LINK_HEAD_BYTES];
    int recv_rest; /* the posted receive is for the rest of a chunk, not a head */
    int is_garbled; /* what came was no chunk: nothing more is received, but what is to be sent still goes out */
    struct hr_io recv;
    struct hr_buffer in;      /* received, whole chunks */
    uint8_t *rest;            /* being received */
    size_t rest_bytes;
    struct hr_buffer out;     /* to be sent next */
    struct hr_buffer sending; /* being sent, with its length in front, as long as a head at least */
    struct hr_io send_head, send;
};

enum { HR_CEDED_MS = 1 };

/* ---- Submission: what callers hand in and wait for. All under the lock, but for atomics. ---- */

struct hr_submission {
    pthread_mutex_t lock;
    pthread_cond_t done; /* a request has finished, or the driver has let go */
    int waiters;
    struct hr_request *queue_head, **queue_tail;
    struct hr_map in_flight;            /* name -> request submitted and not done */
    struct hr_request *oldest, *newest; /* of these, in the order in which they were submitted */
    struct hr_map handles;              /* handle -> request not released */
    int64_t last_handle;
    _Atomic uint32_t queued;  /* requests in the queue */
    _Atomic uint32_t pending; /* requests submitted and not done */
};

/* ---- Driver: who runs the loop. Under the lock of submission, but for atomics and what is the driver's. ---- */

enum hr_driver_who { HR_DRIVER_NONE, HR_DRIVER_THREAD, HR_DRIVER_CALLER };

/*
 * What the background thread does; whoever needs it sets AWAKE (hr_engine_kick).
 *
 *     state     | next state when                                               | to wake it costs
 *     ----------+---------------------------------------------------------------+------------------
 *     AWAKE     | LINGERING or PARKED: nobody needs it                          | nothing
 *     LINGERING | AWAKE: it is needed; PARKED: not within thread_spin_ns        | a store
 *     PARKED    | AWAKE: it is needed, a life line speaks, HR_CEDED_MS are over | a system call
 */
enum hr_thread_state { HR_THREAD_AWAKE, HR_THREAD_LINGERING, HR_THREAD_PARKED };

enum hr_engine_stage { HR_ENGINE_RUNNING, HR_ENGINE_CLOSING, HR_ENGINE_ENDING, HR_ENGINE_ENDED };

struct hr_driver {
    enum hr_driver_who who;
    _Atomic int thread_state; /* enum hr_thread_state; changed under the lock, but for LINGERING to AWAKE */
    pthread_t thread;
    int kick_fd;
    struct pollfd *park_fds;  /* [1 + local_size] */
    int woken_soon;           /* background thread only: lingering instead of parking would have paid the last time */
    _Atomic int stop;
    atomic_int always_drives; /* leader among several hosts, until the end of the group has been told to them: the thread drives */
    _Atomic int wanted;       /* there: a caller that calls again and again would drive itself */
    int ceded;                /* so the thread has let go; written by it alone */
    int64_t called_ns;        /* there: when a caller's wait last ended */
    int64_t caller_spin_ns, thread_spin_ns;

    /* The driver's own. */
    enum hr_engine_stage stage;
    int64_t flush_ns;     /* CLOSING, ENDING: until when callers wait for what is to be sent, at the latest */
    uint64_t moves;       /* stages of tasks and records of the log done */
    int64_t leave_ns;     /* leaving: when it stops to wait for the LEAVE record, unless something moves; 0: not leaving */
    uint64_t leave_moves; /* leaving: what had moved when leave_ns was set */
    int64_t expecting_since_ns; /* several hosts: waiting for others since */
    int64_t stall_check_ns; /* when to look for stalls again; 0: not known */
    uint64_t stall_moves;   /* `moves` when it last looked */
    int64_t stall_moved_ns; /* when it last found that they had changed */
};

/* ---- Announcer: what this rank tells its leader, and what it remembers of names that have an id. The driver's. ---- */

struct hr_announcer {
    struct hr_map known;
    struct hr_known **known_slots; /* [capacity] */
    uint32_t capacity;
    struct hr_buffer request_out; /* frames for my leader */
    int has_asked_to_leave;       /* LEAVE is among them, or has gone */
};

/* ---- Executor: the log, record by record. The driver's. ---- */

/* What it does with the record at the front of the log. */
enum hr_execution {
    HR_EXECUTION_IDLE,    /* none has been begun */
    HR_EXECUTION_RUNNING, /* a batch: its task is the backend's */
    HR_EXECUTION_LOST,    /* a batch whose task has lost a peer: other ranks may tell of the cause until confirm_ns */
};

struct hr_executor {
    enum hr_execution state;
    int outcome;            /* of a look at the executor during a wait, for the next turn; 0: none */
    int64_t confirm_ns;
    uint64_t log_position;  /* bytes of the log taken out of the ring */
    struct hr_buffer log_in; /* taken out, not begun */
    uint64_t log_executed;  /* bytes of the log executed */
    uint64_t record_bytes;  /* of the record that is being executed */
    int has_left;           /* a LEAVE record has been executed */
    struct hr_batch *batch; /* scratch of execute.c */
};

/* ---- Leader: the agreement on one host, and its links to other hosts. The driver's; unused on other ranks. ---- */

struct hr_leader {
    struct hr_agree agree;
    int *member_ranks;
    struct hr_buffer *request_in; /* [local_size] frames from local ranks */
    struct hr_buffer log_out;     /* frames for the log ring */
    uint64_t announced_seen;
    struct hr_link *links;        /* parent first if there is one, then children */
    int link_count;
    int has_parent;
    int leaver;     /* 1 + the rank that asked to leave, as far as this leader knows; 0: none has */
    int log_closed; /* the LEAVE record has been written or passed on: nothing follows it */
    int told_abort, told_done;
    int64_t cycle_ns;
};

struct hr_counts {
    _Atomic uint64_t requests, cache_hits, batches, tensors, bytes, messages_sent;
};

struct hr_engine {
    struct hr_node *node;
    struct hr_team *team; /* the world */
    struct hr_backend *backend;
    int is_leader, is_root;
    struct hr_submission submission;
    struct hr_driver driver;
    struct hr_announcer announcer;
    struct hr_executor executor;
    struct hr_leader leader;
    struct hr_counts counts;
};

int hr_engine_init(struct hr_engine *engine, struct hr_team *world, struct hr_backend *backend, const horo_setup *setup,
                   struct hr_error *error);
/* Leaves the group (horo_destroy), joins the thread, frees. */
void hr_engine_fini(struct hr_engine *engine);

int hr_engine_submit(struct hr_engine *engine, const horo_request *request, int64_t *handle, struct hr_error *error);
int hr_engine_poll(struct hr_engine *engine, int64_t handle);
int hr_engine_wait(struct hr_engine *engine, int64_t handle, int32_t timeout_ms);
void hr_engine_error(struct hr_engine *engine, int64_t handle, char *text, size_t text_bytes);
int hr_engine_take(struct hr_engine *engine, int64_t handle, int32_t index, void **data, int64_t *bytes,
                   int64_t *first_dims);
int hr_engine_release(struct hr_engine *engine, int64_t handle);
int hr_engine_health(struct hr_engine *engine, struct hr_error *error);

/* ---- Between the files of the engine ---- */

/* request.c: HORO_OK with a new request, or a status with *error set. Checks everything a caller can get wrong. */
int hr_request_create(const horo_request *call, int size, struct hr_request **request, struct hr_error *error);
void hr_request_destroy(struct hr_request *request);

/* drive.c */
void *hr_engine_main(void *engine);
/* Whether the background thread has to drive even if nothing is pending here. With the lock held, or on that thread. */
static inline int hr_engine_thread_drives(const struct hr_engine *engine) {
    return atomic_load(&engine->driver.always_drives) && !engine->driver.ceded;
}
/* Whether a caller has waited within the last HR_CEDED_MS; where the thread always drives, with the lock held. */
static inline int hr_engine_called_lately(const struct hr_engine *engine, int64_t now_ns) {
    return now_ns - engine->driver.called_ns < HR_CEDED_MS * 1000000ll;
}
/* Whether something but the requests here needs a driver: a rank of this host that wants to leave. With the lock held. */
int hr_engine_is_called(const struct hr_engine *engine);
/* Drives until `until` is done (NULL: nothing is pending), the deadline has passed, or a signal came. */
void hr_engine_drive(struct hr_engine *engine, const struct hr_request *until, int64_t deadline_ns);
/* Wakes whoever must notice a change made under the lock. Call with the lock held. */
void hr_engine_kick(struct hr_engine *engine);

/* announce.c: takes the queue and announces it, but for what the next flush takes to the leader; returns how many. */
int hr_engine_announce(struct hr_engine *engine);
int hr_engine_flush_requests(struct hr_engine *engine);
/* What a BATCH ref does to this rank's knowledge; *request is what it stands for. */
int hr_engine_resolve(struct hr_engine *engine, const struct hr_wire_ref *ref, struct hr_request **request);
/* Asks for the LEAVE record, behind all that has been announced. */
int hr_engine_ask_to_leave(struct hr_engine *engine);
struct hr_request *hr_engine_find_name(struct hr_engine *engine, struct hr_wire_text name);
void hr_engine_free_known(struct hr_engine *engine);

/* lead.c and control.c: what a leader does besides; 1 if something moved, 0 if not, or a status. */
int hr_engine_lead(struct hr_engine *engine);
int hr_engine_has_lead_work(struct hr_engine *engine);
int hr_engine_init_leader(struct hr_engine *engine, uint64_t fusion_bytes, struct hr_error *error);
void hr_engine_fini_leader(struct hr_engine *engine);
/* When a ready batch that waits out its cycle time is due; 0: none waits. */
int64_t hr_engine_batch_due_ns(struct hr_engine *engine);
/* After the end of the group: tells the neighbours of an abort and sends what there is. 1: all is sent or cannot be; 0; a status. */
int hr_engine_flush_links(struct hr_engine *engine);
int hr_engine_may_flush(const struct hr_engine *engine);
/* Whether a message of another leader waits to be read, or of this one to be sent. */
int hr_leader_has_messages(const struct hr_engine *engine);
/* Whether something for another leader has not been handed to the system yet. */
int hr_leader_sends_left(const struct hr_engine *engine);
/* CLOSING: whether everybody for whom this leader passes messages on has executed what stands before the LEAVE record. */
int hr_leader_is_done(const struct hr_engine *engine);
/* The last message on every link, for ENDING after CLOSING. */
int hr_leader_tell_done(struct hr_engine *engine);
/* control.c; progress_links as hr_engine_lead. */
int hr_leader_open_links(struct hr_engine *engine, struct hr_error *error);
int hr_leader_progress_links(struct hr_engine *engine);
/* lead.c, for control.c. Takes in what a member announces; agrees on, or reports, what all members have announced; hands records down. */
int hr_leader_announce(struct hr_engine *engine, int member, const struct hr_wire_message *message, int64_t now_ns);
int hr_leader_collect(struct hr_engine *engine);
int hr_leader_hand_down(struct hr_engine *engine, size_t mark);
/* The next record for the log is LEAVE. */
void hr_leader_close_log(struct hr_engine *engine);
/* A rank of this subtree wants to leave. */
int hr_engine_note_leaver(struct hr_engine *engine, int rank);
int hr_engine_announce_own(struct hr_engine *engine, const struct hr_request *request, uint32_t id);

/* link.c */
int hr_link_open(struct hr_engine *engine, struct hr_link *link, int host);
void hr_link_close(struct hr_link *link);
int hr_link_has_work(const struct hr_link *link);
/* Moves bytes both ways; received frames are in link->in. 1, 0, or HORO_ERR_PEER_LOST once the link is broken. */
int hr_link_progress(struct hr_engine *engine, struct hr_link *link);

/* execute.c: one stage of the current batch, or the next record of the log: 1 if something moved, 0 if not, or a status. */
int hr_engine_execute(struct hr_engine *engine);
/* After the end of the group: gives the current batch up. */
void hr_engine_cancel(struct hr_engine *engine);
/* Whether the current batch has posted all that it sends (hr_task.is_ending). */
int hr_engine_is_ending_batch(const struct hr_engine *engine);
/* Marks requests as done, all with one status and sentence. */
void hr_engine_complete(struct hr_engine *engine, struct hr_request *const *requests, size_t count, int status,
                        const char *text);

/* The same for one, with the lock held; the caller wakes waiters. */
void hr_engine_complete_locked(struct hr_engine *engine, struct hr_request *request, int status, const char *text);

void hr_engine_free_batch(struct hr_engine *engine);

/* Of what reports and errors list: so many tensors, and so much room for ranks. */
enum { HR_NAMES_IN_TEXT = 6, HR_NAME_TEXT_BYTES = 256 };

/* failure.c */
/* Why the group has ended; code 0 if it has not. Any thread. */
struct hr_abort hr_engine_end(const struct hr_engine *engine);
/* Fails everything pending, if there is anything, with the end of the node; 1 if there was. */
int hr_engine_fail_all(struct hr_engine *engine);
/* The sentence for the end of the node, without what was pending. */
void hr_engine_describe_end(const struct hr_engine *engine, struct hr_abort end, char *text, size_t text_bytes);

/* events.c: what the flight recorder gets, and when it is shown. */
/* A request that has been put into the queue; with the lock held. */
void hr_engine_note_submitted(struct hr_engine *engine, struct hr_request *request);
/* Requests that are over; before they can be released. */
void hr_engine_note_done(struct hr_engine *engine, struct hr_request *const *requests, size_t count, int status);
/* A batch whose record has been taken out of the log: what has been agreed on, and that it begins. */
void hr_engine_note_batch(struct hr_engine *engine, struct hr_request *const *requests, size_t count, uint64_t bytes);
/* The end of the group, once. Any thread. */
void hr_engine_note_end(struct hr_engine *engine);
/* Logs the last events, if there are any that have not been logged. Any thread. */
void hr_engine_show_events(struct hr_engine *engine, int level);
/* The same for the end of the group, once; nothing where it has ended in order. Any thread. */
void hr_engine_show_end(struct hr_engine *engine);

/* stall.c */
/* `moves` changes whenever something moves here. Reports what has waited too long; returns when to look again (0: no need). */
int64_t hr_engine_check_stall(struct hr_engine *engine, uint64_t moves);

#endif
