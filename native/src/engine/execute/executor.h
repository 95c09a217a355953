/*
 * The executor of a team: takes records out of its log, one after another, and runs their batches on a backend. What a
 * record means to rooms above, those do: whoever composes them sets struct hr_executor_ops. All is the driver's.
 */
#ifndef HR_ENGINE_EXECUTE_EXECUTOR_H
#define HR_ENGINE_EXECUTE_EXECUTOR_H

#include "backend/backend.h"
#include "base/buffer.h"
#include "base/traits.h"
#include "wire/wire.h"

struct hr_lane;
struct hr_request;

/* A record of the log that ends no request of this rank. HORO_OK or a status. */
typedef int hr_record_handler(struct hr_lane *lane, const struct hr_wire_message *record);

/* The work of others for an executor, whose lane they are called with. */
struct hr_executor_ops {
    hr_record_handler *handlers[HR_WIRE_TYPES]; /* NULL: no correct log has such a record, unless it is done here */
    /*
     * Does what a request is about that changes who takes part, as hr_task.progress; the request has the row of its
     * record as its answer, -1: none. HR_DONE: its status is error->code, with its sentence.
     */
    int (*change)(struct hr_lane *lane, struct hr_request *request, struct hr_error *error);
    /*
     * A record is about what this rank has not submitted: *request stands in, made from its canonical bytes; it stays
     * NULL where there are none. HORO_ERR_INTERNAL: all must submit, and so must this rank.
     */
    int (*absent)(struct hr_lane *lane, struct hr_wire_text bytes, struct hr_request **request);
};

/* The state of the record at the front of the log. */
enum hr_execution {
    HR_EXECUTION_IDLE,     /* none has been begun */
    HR_EXECUTION_RUNNING,  /* a batch: its task is the backend's */
    HR_EXECUTION_CHANGING, /* a batch that changes who takes part */
    HR_EXECUTION_LOST,     /* a batch whose task has lost a peer: other ranks may tell of the cause until confirm_ns */
};

/* The requests of a record, and their operands as the backend takes them. The arrays grow and never shrink. */
struct hr_batch {
    struct hr_request **requests;
    size_t request_count, request_capacity;
    struct hr_operand *operands;
    size_t operand_count, operand_capacity;
    uint64_t bytes;
    int is_ahead;            /* it was begun before it is agreed on */
    uint64_t segment_before; /* team->segment, then */
};

struct hr_executor {
    const struct hr_executor_ops *ops;
    enum hr_execution state;
    int64_t confirm_ns;
    uint64_t log_position;   /* bytes of the log taken out of the ring */
    struct hr_buffer log_in; /* taken out, not begun */
    uint64_t log_executed;   /* bytes of the log executed */
    /*
     * The place of this rank in the order of all that the team does: the bytes of the log executed, and the batches
     * that have no record there (round.h) and are over. It grows with each of both, on all ranks alike.
     */
    uint64_t place;
    uint64_t moves;          /* stages of tasks and records of the log done */
    uint64_t record_bytes;   /* of the record that is being executed; 0: of a batch that has none */
    int has_executed_leave;  /* the last record of the log */
    struct hr_batch batch;
    struct hr_backend *backend; /* whose task the batch is: the lane's, or that of the GPU */
};

/* ---- execute.c ---- */

/* One stage of the current batch, or the next record of the log: HR_STILL, HR_MOVED or a status. */
int hr_lane_execute(struct hr_lane *lane);
/*
 * Begins the batch of an operation of HR_OP_BEGUN_AHEAD, of one request, which the other ranks may not do, or with
 * other rows: 1, or 0 where it cannot be prepared. take_back, of any operation: they do not; all is as before.
 */
int hr_batch_begin_ahead(struct hr_lane *lane, struct hr_request *request);
void hr_batch_take_back(struct hr_lane *lane, struct hr_request *request);
/*
 * The batch of one request that has no record and is announced by id, with the rows of all ranks where it tells rows.
 * HORO_OK or a status.
 */
int hr_lane_execute_lone(struct hr_lane *lane, struct hr_request *request, struct hr_wire_rows rows);
/* After the end of the group: gives the current batch up. */
void hr_executor_cancel(struct hr_lane *lane);

/* ---- rows.c ---- */

/*
 * Makes the results of an allgather ready to be written, by the rows that its record has: first extents, bytes, memory.
 * is_of_each: the rows are those of this rank, and taken to be those of each. HORO_ERR_USAGE with *error set, on all
 * ranks alike: they are too large for any memory; HORO_ERR_RESOURCE; HORO_ERR_INTERNAL for rows that are not those of
 * this request.
 */
int hr_gather_prepare(struct hr_request *request, const struct hr_team *team, struct hr_wire_rows rows, int is_of_each,
                      struct hr_error *error);
/* Of a request with a misfit: *error is HORO_ERR_USAGE. */
void hr_gather_refuse(const struct hr_request *request, struct hr_error *error);

#endif
