/* Taking records out of the log and running them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"

enum { CONFIRM_MS = 250 }; /* time for a LOST message to come by way of several leaders that are busy */

/* The requests and operands of one batch; grows, is never shrunk. */
struct hr_batch {
    struct hr_request **requests;
    size_t request_count, request_capacity;
    struct hr_operand *operands;
    int64_t *rows;
    size_t *row_bytes;
    size_t operand_count, operand_capacity;
    uint64_t bytes;
};

void hr_engine_free_batch(struct hr_engine *engine) {
    if (engine->executor.batch != NULL) {
        free((void *)engine->executor.batch->requests);
        free(engine->executor.batch->operands);
        free(engine->executor.batch->rows);
        free(engine->executor.batch->row_bytes);
        free(engine->executor.batch);
        engine->executor.batch = NULL;
    }
}

static int grow(void **array, size_t count, size_t element_bytes) {
    void *larger = realloc(*array, count * element_bytes);
    if (larger == NULL) {
        return HORO_ERR_RESOURCE;
    }
    *array = larger;
    return HORO_OK;
}

static int reserve_requests(struct hr_batch *batch, size_t count) {
    if (count > batch->request_capacity) {
        HR_TRY(grow((void **)&batch->requests, count, sizeof *batch->requests));
        batch->request_capacity = count;
    }
    return HORO_OK;
}

static int reserve_operands(struct hr_batch *batch, size_t count) {
    if (count > batch->operand_capacity) {
        HR_TRY(grow((void **)&batch->operands, count, sizeof *batch->operands));
        HR_TRY(grow((void **)&batch->rows, count, sizeof *batch->rows));
        HR_TRY(grow((void **)&batch->row_bytes, count, sizeof *batch->row_bytes));
        batch->operand_capacity = count;
    }
    return HORO_OK;
}

static void add_operand(struct hr_batch *batch, const horo_tensor *tensor) {
    int64_t bytes = 0;
    int64_t row_bytes = 0; /* stays so where it does not fit: an allgather of such rows has been refused, others do not look at it */
    const int rows = tensor->ndim > 0;
    (void)hr_wire_shape_bytes(tensor->shape, tensor->ndim, tensor->dtype, &bytes); /* it was checked when it was submitted */
    (void)hr_wire_shape_bytes(tensor->shape + rows, tensor->ndim - rows, tensor->dtype, &row_bytes);
    const size_t i = batch->operand_count++;
    batch->operands[i] = (struct hr_operand){
        .input = tensor->input,
        .output = tensor->output,
        .bytes = (size_t)bytes,
        .dtype = tensor->dtype,
        .wire_dtype = tensor->wire_dtype,
    };
    batch->rows[i] = tensor->ndim == 0 ? 1 : tensor->shape[0];
    batch->row_bytes[i] = (size_t)row_bytes;
    batch->bytes += (uint64_t)bytes;
}

static int load_batch(struct hr_engine *engine, const struct hr_wire_message *record) {
    if (engine->executor.batch == NULL && (engine->executor.batch = calloc(1, sizeof *engine->executor.batch)) == NULL) {
        return HORO_ERR_RESOURCE;
    }
    struct hr_batch *batch = engine->executor.batch;
    batch->request_count = 0;
    batch->operand_count = 0;
    batch->bytes = 0;
    HR_TRY(reserve_requests(batch, record->count));
    const uint8_t *cursor = record->items;
    size_t operands = 0;
    for (uint32_t i = 0; i < record->count; i++) {
        struct hr_wire_ref ref;
        hr_wire_next_ref(&cursor, &ref);
        HR_TRY(hr_engine_resolve(engine, &ref, &batch->requests[i]));
        batch->request_count++;
        operands += (size_t)batch->requests[i]->call.tensor_count;
    }
    HR_TRY(reserve_operands(batch, operands));
    for (size_t i = 0; i < batch->request_count; i++) {
        const horo_request *call = &batch->requests[i]->call;
        for (int t = 0; t < call->tensor_count; t++) {
            add_operand(batch, &call->tensors[t]);
        }
    }
    return HORO_OK;
}

/* HR_TASK_DONE where that all have agreed is all there is to it, else HR_TASK_MOVED or a status. */
static int begin_batch(struct hr_engine *engine) {
    const struct hr_batch *batch = engine->executor.batch;
    if (batch->request_count == 0) {
        return HORO_ERR_INTERNAL;
    }
    const horo_request *call = &batch->requests[0]->call; /* what may share a batch agrees in all that is looked at here */
    if (call->op == HORO_BARRIER) {
        return HR_TASK_DONE;
    }
    const struct hr_work work = {
        .op = call->op,
        .reduce_op = call->reduce_op,
        .root_rank = call->root_rank,
        .prescale = call->prescale,
        .postscale = call->postscale,
        .operands = batch->operands,
        .count = batch->operand_count,
        .rows = batch->rows,
        .row_bytes = batch->row_bytes,
        .results = batch->requests[0]->gathered,
    };
    HR_TRY(engine->backend->ops->begin(engine->backend, &work));
    return HR_TASK_MOVED;
}

/* The record that was begun last is over. */
static void end_record(struct hr_engine *engine) {
    struct hr_arena *arena = &engine->node->arena;
    engine->executor.log_executed += engine->executor.record_bytes;
    atomic_store(&arena->blocks[arena->local_rank].log_executed, engine->executor.log_executed); /* partner: hr_arena_has_closed */
    if (atomic_load(&arena->header->leave_at) != 0 && !engine->is_leader) {
        hr_node_wake(engine->node, 0); /* it may wait for this before it leaves */
    }
    engine->executor.record_bytes = 0;
    engine->executor.state = HR_EXECUTION_IDLE;
}

static void end_batch(struct hr_engine *engine) {
    const struct hr_batch *batch = engine->executor.batch;
    atomic_fetch_add_explicit(&engine->counts.batches, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&engine->counts.tensors, batch->operand_count, memory_order_relaxed);
    atomic_fetch_add_explicit(&engine->counts.bytes, batch->bytes, memory_order_relaxed);
    end_record(engine);
    hr_engine_complete(engine, batch->requests, batch->request_count, HORO_OK, NULL);
}

/*
 * The task has lost a peer. That rank need not be the cause: it may have ended because it had heard of another's death. So other ranks
 * get a moment to tell of the cause before this one names the suspect. Silence is nobody else's doing.
 */
static int suspect(struct hr_engine *engine) {
    engine->backend->ops->cancel(engine->backend);
    engine->executor.state = HR_EXECUTION_LOST;
    engine->executor.confirm_ns = hr_now_ns() + (engine->node->suspect.reason == HR_REASON_LINK ? CONFIRM_MS * 1000000ll : 0);
    return 1;
}

static int confirm(struct hr_engine *engine) {
    const struct hr_abort who = engine->node->suspect;
    if (hr_now_ns() < engine->executor.confirm_ns) {
        return 0;
    }
    hr_node_abort(engine->node, who.code, who.rank, who.reason);
    return 1;
}

static int progress_batch(struct hr_engine *engine) {
    const int moved = engine->backend->ops->progress(engine->backend);
    switch (moved) {
    case HR_TASK_BLOCKED: return 0;
    case HR_TASK_DONE: end_batch(engine); break;
    case HR_TASK_MOVED: break;
    case HORO_ERR_PEER_LOST: return suspect(engine);
    default: return moved < 0 ? moved : HORO_ERR_INTERNAL;
    }
    engine->driver.moves++;
    return 1;
}

static int execute_batch(struct hr_engine *engine, const struct hr_wire_message *record) {
    HR_TRY(load_batch(engine, record));
    hr_engine_note_batch(engine, engine->executor.batch->requests, engine->executor.batch->request_count, engine->executor.batch->bytes);
    const int begun = begin_batch(engine);
    HR_TRY(begun);
    if (begun == HR_TASK_DONE) {
        end_batch(engine);
    } else {
        engine->executor.state = HR_EXECUTION_RUNNING;
    }
    return HORO_OK;
}

static int execute_fail(struct hr_engine *engine, const struct hr_wire_message *record) {
    struct hr_request *request = hr_engine_find_name(engine, record->name);
    if (request == NULL) {
        return HORO_ERR_INTERNAL;
    }
    char text[HORO_MESSAGE_MAX];
    const size_t bytes = record->text.bytes < sizeof text - 1 ? record->text.bytes : sizeof text - 1;
    memcpy(text, record->text.data, bytes);
    text[bytes] = '\0';
    end_record(engine);
    hr_engine_complete(engine, &request, 1, record->status, text);
    return HORO_OK;
}

/* The last record: nothing that is still pending will ever be agreed on. */
static int execute_leave(struct hr_engine *engine, const struct hr_wire_message *record) {
    uint64_t none = 0;
    (void)atomic_compare_exchange_strong(&engine->node->arena.header->left_rank, &none, (uint64_t)record->rank + 1);
    engine->executor.has_left = 1;
    hr_engine_note_end(engine);
    end_record(engine);
    return HORO_OK;
}

/* Moves what is in the ring to log_in and lets the leader know that there is room. */
static int take_log(struct hr_engine *engine) {
    struct hr_node *node = engine->node;
    struct hr_arena *arena = &node->arena;
    const size_t available = (size_t)(atomic_load(&arena->header->log.written) - engine->executor.log_position);
    if (available == 0) {
        return HORO_OK;
    }
    struct hr_buffer *in = &engine->executor.log_in;
    HR_TRY(hr_buffer_reserve(in, available));
    in->end += hr_ring_read(&arena->header->log, arena->log_ring, HR_LOG_RING_BYTES, &engine->executor.log_position,
                            in->data + in->end, available);
    atomic_store(&arena->blocks[node->local_rank].log_read, engine->executor.log_position); /* partner: slowest_reader */
    if (!engine->is_leader && atomic_load(&arena->header->log_wants_room) != 0) {
        hr_node_wake(node, 0);
    }
    return HORO_OK;
}

static int execute_record(struct hr_engine *engine, const struct hr_wire_message *record) {
    switch (record->type) {
    case HR_WIRE_BATCH: return execute_batch(engine, record);
    case HR_WIRE_FAIL: return execute_fail(engine, record);
    case HR_WIRE_LEAVE: return execute_leave(engine, record);
    default: return HORO_ERR_INTERNAL;
    }
}

int hr_engine_execute(struct hr_engine *engine) {
    if (engine->executor.state == HR_EXECUTION_RUNNING) {
        return progress_batch(engine);
    }
    if (engine->executor.state == HR_EXECUTION_LOST) {
        return confirm(engine);
    }
    HR_TRY(take_log(engine));
    const uint8_t *data;
    size_t bytes;
    const int whole = hr_frame_peek(&engine->executor.log_in, &data, &bytes);
    if (whole != HORO_OK) {
        return whole < 0 ? whole : 0;
    }
    struct hr_wire_message record;
    HR_TRY(hr_wire_decode(data, bytes, &record));
    engine->executor.record_bytes = 4 + bytes;
    HR_TRY(execute_record(engine, &record));
    hr_buffer_consume(&engine->executor.log_in, 4 + bytes); /* what a batch needs of it has been copied */
    engine->driver.moves++;
    return 1;
}

void hr_engine_cancel(struct hr_engine *engine) {
    if (engine->executor.state == HR_EXECUTION_RUNNING) {
        engine->backend->ops->cancel(engine->backend);
    }
    engine->executor.state = HR_EXECUTION_IDLE;
}

int hr_engine_is_ending_batch(const struct hr_engine *engine) {
    return engine->executor.state == HR_EXECUTION_RUNNING && engine->backend->ops->is_ending(engine->backend);
}

static void forget_announcement(struct hr_engine *engine, const struct hr_request *request) {
    if (request->pending_place == HR_NOT_ANNOUNCED) {
        return;
    }
    if (request->announced_id != 0) {
        struct hr_known *known = engine->announcer.known_slots[request->announced_id % engine->announcer.capacity];
        if (known != NULL && known->pending == request) {
            known->pending = NULL;
        }
    }
    hr_arena_pending_remove(&engine->node->arena, request->pending_place);
}

static void remove_in_flight(struct hr_engine *engine, const struct hr_request *request) {
    (void)hr_map_remove(&engine->submission.in_flight, request->name_hash, request->call.name, request->name_bytes);
    *(request->older == NULL ? &engine->submission.oldest : &request->older->newer) = request->newer;
    *(request->newer == NULL ? &engine->submission.newest : &request->newer->older) = request->older;
}

void hr_engine_complete_locked(struct hr_engine *engine, struct hr_request *request, int status, const char *text) {
    forget_announcement(engine, request);
    remove_in_flight(engine, request);
    request->error_text = text == NULL ? NULL : strdup(text);
    atomic_fetch_sub(&engine->submission.pending, 1);
    atomic_store(&request->status, status); /* last: from here on the caller may release it */
}

void hr_engine_complete(struct hr_engine *engine, struct hr_request *const *requests, size_t count, int status,
                        const char *text) {
    hr_engine_note_done(engine, requests, count, status);
    (void)pthread_mutex_lock(&engine->submission.lock);
    for (size_t i = 0; i < count; i++) {
        hr_engine_complete_locked(engine, requests[i], status, text);
    }
    if (engine->submission.waiters > 0) {
        (void)pthread_cond_broadcast(&engine->submission.done);
    }
    (void)pthread_mutex_unlock(&engine->submission.lock);
}
