/*
 * A lane: one rank's part in one team, from the announcements to the batches. Every team has a log of its own, which
 * its members agree on and execute in order; nothing in a lane waits for another lane. The driver of the engine goes
 * round all of them (loop.c). All of a lane is the driver's, unless a line says otherwise.
 */
#ifndef HR_ENGINE_LANE_H
#define HR_ENGINE_LANE_H

#include "engine/agree/agree.h"
#include "engine/drive/part.h"
#include "engine/report/deadlock.h"
#include "engine/requests/request.h"
#include "engine/round/round.h"
#include "node/team.h"

struct hr_engine;
struct hr_gpu_team;

/* A control link to a neighbour in the tree of hosts: a stream of frames each way. Leaders only. */
struct hr_link {
    int host;
    int leader_rank;
    int open;
    int has_said_done; /* the other leader has said DONE: the end of the link is no loss */
    uint64_t joined_at; /* by its own clock: when a rank behind it joined last */
    int has_no_memory; /* for what came: nothing more is received, but what is to be sent still goes out */
    uint8_t *received; /* being received */
    struct hr_io recv;
    struct hr_buffer in;      /* received; may end within a frame */
    struct hr_buffer out;     /* to be sent next */
    struct hr_buffer sending; /* being sent */
    struct hr_io send;
};

enum { HR_IDS_MAX = 256 }; /* in one message of a local rank */

/*
 * ---- Announcer: what this rank tells its leader, and what it remembers of names that have an id. The driver's. ----
 */

/* Of this rank; see join.c. */
struct hr_joining {
    struct hr_request *held; /* the JOIN that is to be announced */
    int is_heard;            /* the record JOINED of this rank has been executed */
    int has_joined;          /* JOIN is announced */
};

struct hr_announcer {
    struct hr_map known;
    struct hr_pool pool; /* of these */
    struct hr_known **known_slots; /* [capacity] */
    uint32_t capacity;
    struct hr_buffer request_out; /* frames for my leader */
    uint32_t id_count;
    uint32_t ids[HR_IDS_MAX];     /* announced, not yet among these frames */
    int has_asked_to_leave;       /* LEAVE is among them, or has gone */
    struct hr_joining join;
};

/* ---- Executor: the log, record by record. The driver's. ---- */

/* The state of the record at the front of the log. */
enum hr_execution {
    HR_EXECUTION_IDLE,     /* none has been begun */
    HR_EXECUTION_RUNNING,  /* a batch: its task is the backend's */
    HR_EXECUTION_CHANGING, /* a batch that adds or removes a team */
    HR_EXECUTION_LOST,     /* a batch whose task has lost a peer: other ranks may tell of the cause until confirm_ns */
};

struct hr_executor {
    enum hr_execution state;
    int64_t confirm_ns;
    uint64_t log_position;  /* bytes of the log taken out of the ring */
    struct hr_buffer log_in; /* taken out, not begun */
    uint64_t log_executed;  /* bytes of the log executed */
    uint64_t place;         /* see hr_lane_place */
    uint64_t moves;         /* stages of tasks and records of the log done */
    uint64_t record_bytes;  /* of the record that is being executed; 0: of a batch that has none */
    int has_executed_leave; /* the last record of the log */
    struct hr_batch *batch; /* see batch.h */
    struct hr_backend *backend; /* whose task the batch is: the lane's, or that of the GPU */
};

/* ---- Leader: the agreement on one host, and its links to other hosts. The driver's; unused on other ranks. ---- */

/*
 * The data that members have carried with their announcements of one tensor, to be reduced when all have. It holds for
 * one round of agreement: a record of the log, whatever it says, ends it, and then the data has done its part or is not
 * needed.
 */
struct hr_carry {
    uint32_t id;   /* of the tensor; 0: there is no data */
    size_t bytes;  /* of each member */
    int count;     /* members whose data is there */
    uint8_t *has;  /* [members] */
    uint8_t *data; /* [members][HR_CARRIED_MAX] */
    const void **contributions; /* [members] of it; scratch */
};

/* Values that the root of a team is to write into the log in front of the next batch. Under the lock of submission. */
struct hr_due_tuning {
    _Atomic int is_due;
    int is_final;
    uint64_t values[HORO_KNOB_COUNT];
};

struct hr_leader {
    struct hr_agree agree;
    int *member_ranks;
    int *ranks_of_member;         /* [members] that each speaks for */
    int *member_of_rank;          /* [ranks of the job] see struct hr_agree_config */
    struct hr_buffer *request_in; /* [local_size] frames from local ranks */
    struct hr_buffer log_out;     /* frames for the log ring */
    struct hr_carry carry;
    struct hr_due_tuning tuning;
    struct hr_deadlock deadlock; /* the root of all ranks */
    struct hr_buffer joined_ranks; /* the root: ints, of which no record has been written yet */
    int64_t heard_before_ns; /* this rank joins: what the links bring now has come before, at this time; else 0 */
    uint64_t announced_seen;
    int has_news; /* since the last turn that has agreed on nothing and written nothing, see agree_and_write */
    struct hr_link *links;        /* parent first if there is one, then children */
    int link_count;
    int has_parent;
    int leaver;          /* 1 + the rank that asked to leave, as far as this leader knows; 0: none has */
    struct hr_buffer leave_record; /* the root: the frame that closes the log */
    int expects_removal; /* the team is about to be removed, by all: the end of a link is no loss */
    int log_closed;      /* the LEAVE record has been written or passed on: nothing follows it */
    int told_abort, told_done;
    int64_t cycle_ns;
    int64_t batch_due_ns; /* a batch that is ready waits out its cycle time; HR_NEVER: none does */
};

/* The memory of the check for stalls; stall.c. */
struct hr_stall {
    int64_t check_ns; /* when to look for stalls again; 0: not known */
    uint64_t moves;   /* hr_lane_moves when it last looked */
    int64_t moved_ns; /* when it last found that this had changed */
    uint64_t all_moves;   /* likewise of all lanes */
    int64_t all_moved_ns;
    int64_t answers_ns; /* when ranks here that were asked should have answered; 0: none was */
};

struct hr_lane {
    struct hr_engine *engine;
    struct hr_node *node;
    struct hr_team *team;
    struct hr_backend *backend;
    struct hr_gpu_team *_Atomic on_gpu; /* NULL: all tensors on GPUs are staged */
    int is_leader, is_root; /* of the team: on this host, of all */
    int refuses_requests;    /* nothing can be submitted any more; under the lock of submission */
    _Atomic int is_joining;  /* nor until all ranks have joined; written under that lock */
    /* name -> request submitted and not done, the first where others are behind it; under the lock of submission */
    struct hr_map in_flight;
    _Atomic uint32_t pending; /* how many, those behind others too; written under that lock */
    struct hr_map stand_ins; /* name -> request that stands in for one; the driver's */
    struct hr_part part;
    struct hr_announcer announcer;
    struct hr_executor executor;
    struct hr_leader leader;
    struct hr_stall stall;
    struct hr_lone lone;
};

/*
 * A lane takes over its team and backend, also where it fails. The team has its links, if it needs any. The world's is
 * open; another lane is opened by the driver, when all ranks have agreed on its id. HORO_OK, or a status with
 * *error set.
 */
int hr_lane_create(struct hr_engine *engine, struct hr_team *team, struct hr_backend *backend, struct hr_lane **lane,
                   struct hr_error *error);
int hr_lane_open(struct hr_lane *lane, int32_t id, struct hr_error *error);
/* The driver, when the team is removed: nothing more is moved on its links, and its partition is left. */
void hr_lane_close(struct hr_lane *lane);
/* Closes its links too. */
void hr_lane_destroy(struct hr_lane *lane);

/* A number that changes whenever something has moved here: a record, a stage of a task, a piece between hosts. */
static inline uint64_t hr_lane_moves(const struct hr_lane *lane) {
    return lane->executor.moves + lane->team->pieces;
}

/*
 * Place of this rank in the order of all that the team does: the bytes of the log executed, and the batches that have
 * no record there (round.h) and are over. It grows with each of both, on all ranks alike.
 */
static inline uint64_t hr_lane_place(const struct hr_lane *lane) {
    return lane->executor.place;
}

/*
 * Whether a rank has left the job, in whose record the log of the world ends: this other team ends with it, and that a
 * member of it is gone is no loss.
 */
static inline int hr_lane_is_left(const struct hr_lane *lane) {
    return lane->team->number != 0 && atomic_load(&lane->node->arena.header->leave_at) != 0;
}

/* Its growth at the end of what is executed. */
static inline uint64_t hr_lane_step(const struct hr_lane *lane) {
    return lane->executor.record_bytes == 0 ? 1 : lane->executor.record_bytes;
}

/* ---- announce.c ---- */

/* Announces what has been taken from the queue, but for what the next flush takes to the leader. */
int hr_lane_announce_request(struct hr_lane *lane, struct hr_request *request);
/* By an id that stands for what the request is. */
int hr_lane_announce_id(struct hr_lane *lane, const struct hr_request *request, uint32_t id);
/* Ends a row of such calls. */
int hr_lane_write_ids(struct hr_lane *lane);
/* In full; the next flush takes it to the leader. */
int hr_lane_announce_full(struct hr_lane *lane, struct hr_request *request);
int hr_lane_flush_requests(struct hr_lane *lane);
/* Applies a BATCH ref to this rank's knowledge; *request is what it stands for. */
int hr_lane_resolve(struct hr_lane *lane, const struct hr_wire_ref *ref, struct hr_request **request);
/* In the lane of the world: asks for the LEAVE record, behind all that has been announced there. */
int hr_lane_ask_to_leave(struct hr_lane *world, int leaver, int status, struct hr_wire_text words);
/* The request announced by this id and not done; NULL: there is none. */
struct hr_request *hr_lane_find_id(const struct hr_lane *lane, uint32_t id);
struct hr_request *hr_lane_find_name(struct hr_lane *lane, struct hr_wire_text name);
void hr_lane_free_known(struct hr_lane *lane);

/* ---- join.c ---- */

/* The request to join: announces it, or that it will be. */
int hr_lane_begin_join(struct hr_lane *lane, struct hr_request *request);
/* Announces the one that is held, if it may go. HR_STILL, HR_MOVED or a status. */
int hr_lane_go_on_joining(struct hr_lane *lane);
/* The record JOINED. HORO_OK or a status. */
int hr_lane_execute_joined(struct hr_lane *lane, int rank);
/* The request to join is over, well or not; with the lock of submission held. */
void hr_lane_end_join(struct hr_lane *lane);
/*
 * Leader: a rank of this subtree joins, by JOINED of a member; the root hears of it before it hears of what others then
 * do without it.
 */
int hr_leader_note_joined(struct hr_lane *lane, int member, const struct hr_wire_message *message, int64_t now_ns);
/* The root: whether there are records JOINED to write; writes them: HR_MOVED or a status. */
int hr_leader_may_tell_joined(const struct hr_lane *lane);
int hr_leader_tell_joined(struct hr_lane *lane);

/* ---- stand_in.c: requests of a rank that has joined, for those of others ---- */

/*
 * Makes one from the canonical bytes of theirs, for the record that comes next; the lane's until end. HORO_OK,
 * HORO_ERR_RESOURCE, or HORO_ERR_INTERNAL where this rank has not joined, or nobody can stand in.
 */
int hr_lane_make_stand_in(struct hr_lane *lane, const void *bytes, size_t byte_count, struct hr_request **request);
/* The record REQUEST: makes one, unless this rank has submitted it itself. As make. */
int hr_lane_describe_stand_in(struct hr_lane *lane, const struct hr_wire_request *request);
/* The one of this name; NULL: there is none. */
struct hr_request *hr_lane_find_stand_in(const struct hr_lane *lane, struct hr_wire_text name);
/* It is over; with the lock of submission held. */
void hr_lane_end_stand_in(struct hr_lane *lane, struct hr_request *request);
void hr_stand_in_destroy(struct hr_request *request);
/* Frees the stand-ins, when nothing touches their memory any more. */
void hr_lane_free_stand_ins(struct hr_lane *lane);

/* ---- lead.c and control.c: what a leader does besides; HR_STILL, HR_MOVED or a status ---- */

int hr_lane_lead(struct hr_lane *lane);
int hr_lane_init_leader(struct hr_lane *lane, uint64_t fusion_bytes, struct hr_error *error);
void hr_lane_fini_leader(struct hr_lane *lane);
/*
 * After the end of the group: tells the neighbours of an abort and sends what there is. 1: all is sent or cannot be; 0;
 * a status.
 */
int hr_leader_flush_links(struct hr_lane *lane);
/* Whether something for another leader has not been handed to the system yet. */
int hr_leader_sends_left(const struct hr_lane *lane);
/* CLOSING: whether all of this host, and all hosts below it, have executed what stands before the LEAVE record. */
int hr_leader_is_done(const struct hr_lane *world);
/* The last message on every link, for ENDING after CLOSING. */
int hr_leader_tell_done(struct hr_lane *lane);
/* control.c; progress_links as hr_lane_lead. */
int hr_leader_open_links(struct hr_lane *lane, struct hr_error *error);
int hr_leader_progress_links(struct hr_lane *lane);
/*
 * lead.c, for control.c. Takes in what a member announces; agrees on, or reports, what all members have announced;
 * hands records down.
 */
int hr_leader_announce(struct hr_lane *lane, int member, const struct hr_wire_message *message, int64_t now_ns);
int hr_leader_collect(struct hr_lane *lane);
int hr_leader_hand_down(struct hr_lane *lane, size_t mark);
/* Frames for all child hosts: HORO_OK or a status. */
int hr_leader_send_down(struct hr_lane *lane, const void *frames, size_t bytes);
/* The next record for the log is LEAVE. */
void hr_leader_close_log(struct hr_lane *lane);
/* A rank of this subtree wants to leave. */
int hr_leader_note_leaver(struct hr_lane *lane, int rank, int status, struct hr_wire_text words);
int hr_lane_announce_own(struct hr_lane *lane, const struct hr_request *request, uint32_t id);

/* ---- tuning.c ---- */

/* Runs with these values from now on, between two tasks. HORO_OK, or HORO_ERR_INTERNAL for impossible ones. */
int hr_lane_tune(struct hr_lane *lane, const uint64_t *values);
/* The root: writes what is due. HORO_OK or a status. */
int hr_leader_write_tuning(struct hr_lane *lane);

/* ---- carry.c ---- */

/* Announcer: how many bytes of data go with the announcement of a request that is known by id; 0: none do. */
size_t hr_lane_carries(const struct hr_lane *lane, const struct hr_request *request);
/* Leader: data of a member. Dropped where another tensor's is there already, or there is no memory for it. */
void hr_carry_add(struct hr_lane *lane, int member, uint32_t id, const void *data, size_t bytes);
void hr_carry_add_own(struct hr_lane *lane, const struct hr_request *request, uint32_t id, size_t bytes);
/*
 * Leader: whether all that is complete (the root: ready) is one tensor of which all members have carried data. write
 * takes it out of the agreement and appends a DATA or, at the root, a RESULT message, framed: HORO_OK or a status.
 */
int hr_carry_is_all(const struct hr_lane *lane);
int hr_carry_write(struct hr_lane *lane, struct hr_buffer *out);
/* A record has come or been made. */
void hr_carry_clear(struct hr_lane *lane);
void hr_carry_fini(struct hr_lane *lane);

/* ---- blocked.c ---- */

/* Leader: a BLOCKED message of a rank of this subtree. */
int hr_leader_note_blocked(struct hr_lane *lane, const struct hr_wire_message *message);
/* Leader: asks the ranks of this subtree whether they are still blocked. HORO_OK or a status. */
int hr_leader_ask_blocked(struct hr_lane *lane, uint32_t question);

/* ---- link.c ---- */

int hr_link_open(struct hr_lane *lane, struct hr_link *link, int host);
void hr_link_close(struct hr_link *link);
/* Moves bytes both ways; received frames are in link->in. HR_STILL, HR_MOVED, or HORO_ERR_PEER_LOST: it is broken. */
int hr_link_progress(struct hr_lane *lane, struct hr_link *link);

/* ---- execute.c ---- */

/* One stage of the current batch, or the next record of the log: HR_STILL, HR_MOVED or a status. */
int hr_lane_execute(struct hr_lane *lane);
/* The batch of one request that has no record, with the rows of all ranks where it tells rows. HORO_OK or a status. */
int hr_lane_execute_lone(struct hr_lane *lane, struct hr_request *request, struct hr_wire_rows rows);
/* After the end of the group: gives the current batch up. */
void hr_lane_cancel(struct hr_lane *lane);
/* Whether the current batch has posted all that it sends (hr_task.is_ending). */
int hr_lane_is_ending_batch(const struct hr_lane *lane);
void hr_lane_free_batch(struct hr_lane *lane);

/* ---- rows.c ---- */

/*
 * Makes the results of an allgather ready to be written, by the rows that its record has: first extents, bytes, memory.
 * HORO_ERR_USAGE with a sentence, on all ranks alike: they are too large for any memory; HORO_ERR_RESOURCE;
 * HORO_ERR_INTERNAL for rows that are not those of this request.
 */
int hr_gather_prepare(struct hr_request *request, const struct hr_team *team, struct hr_wire_rows rows, char *text,
                      size_t text_bytes);
/* The outcome of a request whose batch is done: HORO_OK, or HORO_ERR_USAGE with a sentence. */
int hr_gather_outcome(const struct hr_request *request, char *text, size_t text_bytes);

/* ---- stall_ask.c ---- */

/* Leader: a leader above asks where the ranks of this subtree stand that wait for nothing. */
int hr_leader_pass_question(struct hr_lane *lane, int asker);

#endif
