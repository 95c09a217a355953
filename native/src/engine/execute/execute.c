/* Takes records out of the log and runs them: the requests of this rank that they mean, and the batches of these. */
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "arena/arena.h"
#include "backend/carried.h"
#include "base/cut.h"
#include "base/traits.h"
#include "engine/group/lane.h"
#include "engine/requests/requests.h"
#include "node/end.h"
#include "wire/frame.h"

enum {
    CONFIRM_MS = 250,          /* time for a LOST message to come by way of several leaders that are busy */
    ROWS_AHEAD_MOST = 1 << 16, /* bytes of this rank; with more, to begin twice costs more than it may save */
};

/* The growth of the place at the end of what is executed. */
static uint64_t step(const struct hr_executor *executor) {
    return executor->record_bytes == 0 ? 1 : executor->record_bytes;
}

/* For a timeline: the record that is executed, and how its data moves; and for the flight recorder its requests. */
static void note_begun(const struct hr_lane *lane, int moves_data) {
    const struct hr_batch *batch = &lane->executor.batch;
    const struct hr_transport *transport = lane->team->transport;
    if (hr_recorder_is_traced(&lane->node->recorder)) {
        const int via = !moves_data                                                  ? HR_VIA_NONE
                        : (batch->requests[0]->call.flags & HORO_SUBMIT_ON_GPU) != 0 ? HR_VIA_GPU
                        : transport == NULL                                          ? HR_VIA_SHM
                        : strcmp(transport->ops->name, "mpi") == 0                   ? HR_VIA_MPI
                                                                                     : HR_VIA_TCP;
        hr_recorder_add(&lane->node->recorder,
                        &(struct hr_event){.event = HR_EVENT_RECORD, .op = -1, .team = lane->team->number,
                                           .bytes = (int64_t)(lane->executor.place + step(&lane->executor)),
                                           .number = via});
    }
    hr_requests_note_batch(lane->port.requests, batch->requests, batch->request_count, batch->bytes);
}

/* The record that was begun last is over, and so are its requests, if this rank has any, with this outcome. */
static void end_record(struct hr_lane *lane, struct hr_request *const *requests, size_t count, int status,
                       const char *text) {
    struct hr_executor *executor = &lane->executor;
    struct hr_requests *table = lane->port.requests;
    const struct hr_arena *arena = &lane->node->arena;
    const int number = lane->team->number;
    executor->log_executed += executor->record_bytes;
    executor->place += step(executor);
    /* partner: hr_arena_has_closed */
    atomic_store(&arena->blocks[arena->local_rank].log_executed[number], executor->place);
    if (number == 0 && atomic_load(&arena->header->leave_at) != 0) {
        hr_team_wake_leader(lane->team); /* it may wait for this before it leaves */
    }
    executor->record_bytes = 0;
    if (executor->state == HR_EXECUTION_RUNNING) {
        hr_meter_move(&table->meter, 0, hr_ticks());
    }
    executor->state = HR_EXECUTION_IDLE;
    if (count > 0) {
        hr_requests_complete(table, requests, count, status, status == HORO_OK ? NULL : text);
        return;
    }
    hr_drive_lock(table->drive);
    table->passed++; /* the last report of this rank holds no more: it is further now */
    hr_drive_unlock(table->drive);
}

/* ---- The requests of a record ---- */

/*
 * The request that a ref stands for, or a stand-in; NULL for a name of which this rank, which has joined, has none. It
 * learns what the record says of it.
 */
static int resolve(struct hr_lane *lane, const struct hr_wire_ref *ref, struct hr_request **request) {
    struct hr_wire_text bytes = {NULL, 0};
    const int is_named = ref->name.bytes > 0;
    if (!is_named) {
        HR_TRY(hr_announcer_take(&lane->announcer, &lane->port, ref->id, request, &bytes));
    } else if (hr_wire_is_call(ref->name)) {
        *request = hr_port_take_call(&lane->port);
    } else {
        *request = hr_port_find_name(&lane->port, ref->name);
    }
    HR_TRY(*request != NULL ? HORO_OK : lane->executor.ops->absent(lane, bytes, request));
    const int learns = is_named && ref->id != 0 && *request != NULL;
    return learns ? hr_announcer_learn(&lane->announcer, *request, ref->id) : HORO_OK;
}

/* The operands of the requests that are in the batch. */
static int add_operands(struct hr_batch *batch) {
    size_t count = 0;
    for (size_t i = 0; i < batch->request_count; i++) {
        count += (size_t)batch->requests[i]->call.tensor_count;
    }
    HR_TRY(hr_reserve((void **)&batch->operands, &batch->operand_capacity, count, sizeof *batch->operands));
    batch->operand_count = 0;
    batch->bytes = 0;
    for (size_t i = 0; i < batch->request_count; i++) {
        const horo_request *call = &batch->requests[i]->call;
        const int reduce_op = hr_op_is(call->op, HR_OP_REDUCTION) ? call->reduce_op : HORO_SUM;
        for (int t = 0; t < call->tensor_count; t++) {
            const horo_tensor *tensor = &call->tensors[t];
            const int rows = tensor->ndim > 0;
            const size_t bytes = hr_tensor_bytes(tensor);
            int64_t row_bytes = 0; /* stays so where it does not fit: an allgather of such rows has been refused */
            (void)hr_shape_bytes(tensor->shape + rows, tensor->ndim - rows, tensor->dtype, &row_bytes);
            batch->operands[batch->operand_count++] = (struct hr_operand){
                .input = tensor->input, .output = tensor->output, .bytes = bytes, .row_bytes = (size_t)row_bytes,
                .dtype = hr_dtype_worked_on(tensor->dtype, reduce_op), .wire_dtype = tensor->wire_dtype};
            batch->bytes += bytes;
        }
    }
    return HORO_OK;
}

/* ---- Batches ---- */

static void end_batch(struct hr_lane *lane) {
    const struct hr_batch *batch = &lane->executor.batch;
    struct hr_counts *counts = &lane->node->counts;
    struct hr_error error;
    error.code = HORO_OK; /* without its long text */
    if (batch->requests[0]->misfit != 0) {
        hr_gather_refuse(batch->requests[0], &error);
    }
    atomic_fetch_add_explicit(&counts->batches, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&counts->tensors, batch->operand_count, memory_order_relaxed);
    atomic_fetch_add_explicit(&counts->bytes, batch->bytes, memory_order_relaxed);
    end_record(lane, batch->requests, batch->request_count, error.code, error.text);
}

/* HR_DONE where that all have agreed is all there is to it, else HR_MOVED or a status. */
static int begin_batch(struct hr_lane *lane) {
    const struct hr_batch *batch = &lane->executor.batch;
    /* requests that may share a batch agree in all that is looked at here */
    const horo_request *call = &batch->requests[0]->call;
    if (!hr_op_is(call->op, HR_OP_WITH_TENSORS)) {
        return HR_DONE;
    }
    const struct hr_work work = {
        .op = call->op,
        .root_rank = hr_op_is(call->op, HR_OP_ROOTED) ? hr_team_member(lane->team, call->root_rank) : 0,
        .reduce_op = call->reduce_op, .prescale = call->prescale, .postscale = call->postscale,
        .operands = batch->operands, .count = batch->operand_count,
        .results = batch->requests[0]->gathered, .splits = batch->requests[0]->splits,
    };
    const int is_on_gpu = (call->flags & HORO_SUBMIT_ON_GPU) != 0;
    struct hr_backend *backend = is_on_gpu ? atomic_load(&lane->on_gpu) : lane->backend;
    if (backend == NULL) {
        return HORO_ERR_INTERNAL;
    }
    lane->executor.backend = backend;
    HR_TRY(backend->ops->begin(backend, &work));
    return HR_MOVED;
}

/* The requests and operands are there. */
static int run_batch(struct hr_lane *lane, struct hr_wire_rows rows) {
    struct hr_executor *executor = &lane->executor;
    const struct hr_batch *batch = &executor->batch;
    if (batch->request_count == 0) {
        return HORO_ERR_INTERNAL;
    }
    note_begun(lane, batch->operand_count > 0);
    struct hr_request *first = batch->requests[0];
    if (hr_op_is(first->call.op, HR_OP_OF_TEAMS) || hr_op_is(first->call.op, HR_OP_LAST)) {
        const uint8_t *cursor = rows.data;
        /* a row beyond int becomes INT_MAX, which is no rank */
        first->answer = rows.count == 1 ? (int)hr_smaller((size_t)hr_wire_next_row(&cursor), INT_MAX) : -1;
        executor->state = HR_EXECUTION_CHANGING;
        return batch->request_count == 1 ? HORO_OK : HORO_ERR_INTERNAL;
    }
    if (hr_op_is(first->call.op, HR_OP_TELLING_ROWS)) {
        struct hr_error error = {0};
        const int status =
            batch->request_count == 1 ? hr_gather_prepare(first, lane->team, rows, 0, &error) : HORO_ERR_INTERNAL;
        if (status == HORO_ERR_USAGE) { /* too large for anybody: all ranks see the same rows, and none begins */
            end_record(lane, batch->requests, 1, status, error.text);
            return HORO_OK;
        }
        HR_TRY(status);
    } else if (rows.count > 0) {
        return HORO_ERR_INTERNAL;
    }
    const int begun = begin_batch(lane);
    HR_TRY(begun);
    if (begun == HR_DONE) {
        end_batch(lane);
    } else {
        executor->state = HR_EXECUTION_RUNNING;
        hr_meter_move(&lane->port.requests->meter, 1, hr_ticks());
    }
    return HORO_OK;
}

static int execute_batch(struct hr_lane *lane, const struct hr_wire_message *record) {
    struct hr_batch *batch = &lane->executor.batch;
    const uint8_t *cursor = record->items;
    batch->request_count = 0;
    HR_TRY(hr_reserve((void **)&batch->requests, &batch->request_capacity, record->count, sizeof *batch->requests));
    for (uint32_t i = 0; i < record->count; i++) {
        struct hr_wire_ref ref;
        hr_wire_next_ref(&cursor, &ref);
        HR_TRY(resolve(lane, &ref, &batch->requests[i]));
        HR_TRY(batch->requests[i] == NULL ? HORO_ERR_INTERNAL : HORO_OK);
        batch->request_count++;
    }
    HR_TRY(add_operands(batch));
    return run_batch(lane, record->rows);
}

/* Gives up what the backend does, which may still work on the memory of requests. */
static void cancel_task(struct hr_lane *lane) {
    const struct hr_batch *batch = &lane->executor.batch;
    lane->executor.backend->ops->cancel(lane->executor.backend);
    hr_meter_move(&lane->port.requests->meter, 0, hr_ticks());
    for (size_t i = 0; i < batch->request_count; i++) {
        struct hr_cargo *cargo = &batch->requests[i]->cargo;
        if (cargo->hooks != NULL && cargo->hooks->buried != NULL) {
            hr_node_bury(lane->node, cargo->data, cargo->hooks->buried);
            *cargo = (struct hr_cargo){0};
        }
    }
}

static int progress_task(struct hr_lane *lane) {
    struct hr_executor *executor = &lane->executor;
    const int moved = executor->backend->ops->progress(executor->backend);
    switch (moved) {
    case HR_STILL: return HR_STILL;
    case HR_DONE: end_batch(lane); break;
    case HR_MOVED: break;
    case HORO_ERR_PEER_LOST:
        /*
         * That rank need not be the cause: it may have ended because it had heard of another's death. So other ranks
         * get a moment to tell of the cause before this one names the suspect. Silence is nobody else's doing.
         */
        cancel_task(lane);
        executor->state = HR_EXECUTION_LOST;
        executor->confirm_ns =
            hr_now_ns() + (lane->team->suspect.reason == HR_REASON_LINK ? CONFIRM_MS * 1000000ll : 0);
        hr_part_expect(&lane->part, executor->confirm_ns);
        return HR_MOVED;
    default: return moved < 0 ? moved : HORO_ERR_INTERNAL;
    }
    executor->moves++;
    return HR_MOVED;
}

/* ---- Batches without a record ---- */

static int load_lone(struct hr_batch *batch, struct hr_request *request) {
    batch->request_count = 0;
    HR_TRY(hr_reserve((void **)&batch->requests, &batch->request_capacity, 1, sizeof *batch->requests));
    batch->requests[batch->request_count++] = request;
    batch->is_ahead = 0;
    return add_operands(batch);
}

int hr_batch_begin_ahead(struct hr_lane *lane, struct hr_request *request) {
    struct hr_batch *batch = &lane->executor.batch;
    if (load_lone(batch, request) != HORO_OK) {
        return 0;
    }
    if (hr_op_is(request->call.op, HR_OP_TELLING_ROWS) &&
        (batch->bytes > ROWS_AHEAD_MOST || hr_gather_prepare(request, lane->team, request->rows, 1, NULL) != HORO_OK)) {
        hr_request_drop_results(request);
        return 0;
    }
    batch->is_ahead = 1;
    batch->segment_before = lane->team->segment;
    if (begin_batch(lane) == HR_MOVED && lane->backend->ops->begin_ahead(lane->backend)) {
        return 1;
    }
    hr_batch_take_back(lane, request);
    return 0;
}

void hr_batch_take_back(struct hr_lane *lane, struct hr_request *request) {
    struct hr_batch *batch = &lane->executor.batch;
    if (batch->is_ahead) {
        lane->backend->ops->cancel(lane->backend);
        lane->team->segment = batch->segment_before;
        batch->is_ahead = 0;
        hr_request_drop_results(request);
    }
}

int hr_lane_execute_lone(struct hr_lane *lane, struct hr_request *request, struct hr_wire_rows rows) {
    struct hr_batch *batch = &lane->executor.batch;
    struct hr_wire_text unused;
    lane->executor.record_bytes = 0;
    lane->executor.moves++;
    HR_TRY(hr_announcer_take(&lane->announcer, &lane->port, request->announced_id, &request, &unused));
    if (!batch->is_ahead) {
        HR_TRY(load_lone(batch, request));
        return run_batch(lane, rows);
    }
    batch->is_ahead = 0;
    note_begun(lane, 1);
    lane->backend->ops->show_ahead(lane->backend);
    lane->executor.state = HR_EXECUTION_RUNNING;
    hr_meter_move(&lane->port.requests->meter, 1, hr_ticks());
    return HORO_OK;
}

/* ---- Records ---- */

/* A batch of one tensor whose result has come with the record. */
static int execute_result(struct hr_lane *lane, const struct hr_wire_message *record) {
    struct hr_request *request = NULL;
    HR_TRY(resolve(lane, &(struct hr_wire_ref){.id = record->id}, &request));
    HR_TRY(load_lone(&lane->executor.batch, request));
    if (hr_carried_bytes(lane->team, &request->call) != record->data_bytes) {
        return HORO_ERR_INTERNAL;
    }
    note_begun(lane, 0);
    hr_carried_unpack(lane->team, &request->call, record->data);
    end_batch(lane);
    return HORO_OK;
}

static int execute_fail(struct hr_lane *lane, const struct hr_wire_message *record) {
    struct hr_request *request = NULL;
    HR_TRY(resolve(lane, &(struct hr_wire_ref){.name = record->name}, &request));
    if (request == NULL) {
        end_record(lane, NULL, 0, HORO_OK, NULL);
        return HORO_OK;
    }
    char text[HORO_MESSAGE_MAX];
    (void)snprintf(text, sizeof text, "%.*s", (int)record->text.bytes, record->text.data);
    hr_announcer_drop(&lane->announcer, request);
    end_record(lane, &request, 1, record->status, text);
    return HORO_OK;
}

/* The last record of the world's log: nothing that is still pending there will ever be agreed on. */
static void execute_leave(struct hr_lane *lane, const struct hr_wire_message *record) {
    struct hr_arena *arena = &lane->node->arena;
    const struct hr_wire_text words = record->text;
    if (words.bytes > 0) {
        hr_arena_keep_last_words(arena, record->rank, words.data, words.bytes);
    }
    hr_arena_end_once(&arena->header->left_word,
                      (struct hr_abort){.code = record->status, .rank = record->rank, .by = record->rank,
                                        .reason = words.bytes > 0 ? HR_REASON_ENDED : HR_REASON_LEFT});
    lane->executor.has_executed_leave = 1;
    hr_end_note(lane->node);
    end_record(lane, NULL, 0, HORO_OK, NULL);
}

static int execute_next(struct hr_lane *lane) {
    struct hr_executor *executor = &lane->executor;
    const struct hr_partition *partition = &lane->team->partition;
    struct hr_buffer *in = &executor->log_in;
    struct hr_wire_message record;
    size_t bytes;
    const size_t available = (size_t)(atomic_load(&partition->header->log.written) - executor->log_position);
    if (available > 0) {
        HR_TRY(hr_buffer_reserve(in, available));
        in->end += hr_ring_read(&partition->header->log, partition->log_ring, HR_LOG_RING_BYTES,
                                &executor->log_position, in->data + in->end, available);
        /* partner: flush_log */
        atomic_store(&partition->blocks[lane->node->local_rank].log_read, executor->log_position);
        if (!lane->is_leader && atomic_load(&partition->header->log_wants_room) != 0) {
            hr_team_wake_leader(lane->team);
        }
    }
    const int whole = hr_frame_peek(in, &record, &bytes);
    if (whole != HORO_OK) {
        return whole < 0 ? whole : HR_STILL;
    }
    executor->record_bytes = bytes;
    hr_record_handler *handler = executor->ops->handlers[record.type];
    switch (record.type) {
    case HR_WIRE_BATCH: HR_TRY(execute_batch(lane, &record)); break;
    case HR_WIRE_RESULT: HR_TRY(execute_result(lane, &record)); break;
    case HR_WIRE_FAIL: HR_TRY(execute_fail(lane, &record)); break;
    case HR_WIRE_LEAVE: execute_leave(lane, &record); break;
    default:
        HR_TRY(handler == NULL ? HORO_ERR_INTERNAL : handler(lane, &record));
        end_record(lane, NULL, 0, HORO_OK, NULL);
    }
    hr_buffer_consume(in, bytes); /* the batch has its own copy */
    executor->moves++;
    return HR_MOVED;
}

int hr_lane_execute(struct hr_lane *lane) {
    struct hr_executor *executor = &lane->executor;
    const struct hr_abort *who = &lane->team->suspect;
    switch (executor->state) {
    case HR_EXECUTION_RUNNING: return progress_task(lane);
    case HR_EXECUTION_CHANGING: {
        struct hr_error error = {0};
        const int moved = executor->ops->change(lane, executor->batch.requests[0], &error);
        if (moved != HR_DONE) {
            return moved;
        }
        end_record(lane, executor->batch.requests, 1, error.code, error.text);
        executor->moves++;
        return HR_MOVED;
    }
    case HR_EXECUTION_LOST:
        /* the suspect is named, unless another rank has told of the cause */
        if (hr_team_is_left(lane->team) || hr_now_ns() < executor->confirm_ns) {
            return HR_STILL;
        }
        hr_node_abort(lane->node, who->code, who->rank, who->reason);
        return HR_MOVED;
    default: return execute_next(lane);
    }
}

void hr_executor_cancel(struct hr_lane *lane) {
    if (lane->executor.state == HR_EXECUTION_RUNNING) {
        cancel_task(lane);
    }
    lane->executor.state = HR_EXECUTION_IDLE;
}
