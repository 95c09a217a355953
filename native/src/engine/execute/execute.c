/* Taking records out of the log and running them. */
#include <stdio.h>
#include <string.h>

#include "arena/arena.h"
#include "backend/carried.h"
#include "base/traits.h"
#include "engine/execute/batch.h"
#include "engine/engine.h"
#include "wire/frame.h"

/* The growth of its place at the end of what is executed. */
static uint64_t step_of(const struct hr_lane *lane) {
    return lane->executor.record_bytes == 0 ? 1 : lane->executor.record_bytes;
}

enum { CONFIRM_MS = 250 }; /* time for a LOST message to come by way of several leaders that are busy */

/* The record that was begun last is over. */
static void end_record(struct hr_lane *lane) {
    const struct hr_arena *arena = &lane->node->arena;
    const int number = lane->team->number;
    lane->executor.log_executed += lane->executor.record_bytes;
    lane->executor.place += step_of(lane);
    /* partner: hr_arena_has_closed */
    atomic_store(&arena->blocks[arena->local_rank].log_executed[number], lane->executor.place);
    if (number == 0 && atomic_load(&arena->header->leave_at) != 0) {
        hr_team_wake_leader(lane->team); /* it may wait for this before it leaves */
    }
    lane->executor.record_bytes = 0;
    lane->executor.state = HR_EXECUTION_IDLE;
}

static void count_batch(struct hr_lane *lane, uint64_t tensors, uint64_t bytes) {
    struct hr_counts *counts = &lane->node->counts;
    atomic_fetch_add_explicit(&counts->batches, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&counts->tensors, tensors, memory_order_relaxed);
    atomic_fetch_add_explicit(&counts->bytes, bytes, memory_order_relaxed);
}

static void end_batch(struct hr_lane *lane) {
    const struct hr_batch *batch = lane->executor.batch;
    char text[HORO_MESSAGE_MAX];
    const int status = hr_gather_outcome(batch->requests[0], text, sizeof text);
    count_batch(lane, batch->operand_count, batch->bytes);
    end_record(lane);
    hr_requests_complete(&lane->engine->requests, batch->requests, batch->request_count, status,
                         status == HORO_OK ? NULL : text);
}

static void cancel_task(struct hr_lane *lane) {
    const struct hr_batch *batch = lane->executor.batch;
    lane->executor.backend->ops->cancel(lane->executor.backend);
    lane->executor.ops->bury(lane, batch->requests, batch->request_count);
}

/*
 * The task has lost a peer. That rank need not be the cause: it may have ended because it had heard of another's death.
 * So other ranks get a moment to tell of the cause before this one names the suspect. Silence is nobody else's doing.
 */
static int suspect(struct hr_lane *lane) {
    cancel_task(lane);
    lane->executor.state = HR_EXECUTION_LOST;
    lane->executor.confirm_ns =
        hr_now_ns() + (lane->team->suspect.reason == HR_REASON_LINK ? CONFIRM_MS * 1000000ll : 0);
    hr_part_expect(&lane->part, lane->executor.confirm_ns);
    return HR_MOVED;
}

static int confirm(struct hr_lane *lane) {
    const struct hr_abort who = lane->team->suspect;
    if (hr_team_is_left(lane->team)) {
        return HR_STILL;
    }
    if (hr_now_ns() < lane->executor.confirm_ns) {
        return HR_STILL;
    }
    hr_node_abort(lane->node, who.code, who.rank, who.reason);
    return HR_MOVED;
}

/* One on the GPU goes on there. 0: that has failed, and the group is about to end. */
static int may_end_batch(const struct hr_lane *lane) {
    const struct hr_batch *batch = lane->executor.batch;
    return (batch->requests[0]->call.flags & HORO_SUBMIT_ON_GPU) == 0 || lane->executor.ops->end_on_gpu(batch->requests);
}

static int progress_task(struct hr_lane *lane) {
    const int moved = lane->executor.backend->ops->progress(lane->executor.backend);
    switch (moved) {
    case HR_STILL: return HR_STILL;
    case HR_DONE:
        if (!may_end_batch(lane)) {
            return HR_STILL;
        }
        end_batch(lane);
        break;
    case HR_MOVED: break;
    case HORO_ERR_PEER_LOST: return suspect(lane);
    default: return moved < 0 ? moved : HORO_ERR_INTERNAL;
    }
    lane->executor.moves++;
    return HR_MOVED;
}

static int change(struct hr_lane *lane) {
    struct hr_request *request = lane->executor.batch->requests[0]; /* such an operation shares its batch with none */
    char text[HORO_MESSAGE_MAX];
    int outcome;
    const int moved = lane->executor.ops->change(lane, request, lane->executor.row, &outcome, text, sizeof text);
    if (moved != HR_DONE) {
        return moved;
    }
    end_record(lane);
    lane->executor.moves++;
    hr_requests_complete(&lane->engine->requests, &request, 1, outcome, outcome == HORO_OK ? NULL : text);
    return HR_MOVED;
}

/* One request, whose results are too large for anybody: all ranks see the same rows, and none begins. */
static int refuse_batch(struct hr_lane *lane, const char *text) {
    struct hr_request *request = lane->executor.batch->requests[0];
    end_record(lane);
    hr_requests_complete(&lane->engine->requests, &request, 1, HORO_ERR_USAGE, text);
    return HORO_OK;
}

static int via(const struct hr_lane *lane, int moves_data) {
    const struct hr_transport *transport = lane->team->transport;
    if (!moves_data || transport == NULL) {
        return moves_data ? HR_VIA_SHM : HR_VIA_NONE;
    }
    return strcmp(transport->ops->name, "mpi") == 0 ? HR_VIA_MPI : HR_VIA_TCP;
}

/* For a timeline: the record of the log that is executed; before its batch is noted. */
static void note_record(const struct hr_lane *lane, int moves_data, int on_gpu) {
    struct hr_recorder *recorder = &lane->node->recorder;
    if (hr_recorder_is_traced(recorder)) {
        hr_recorder_add(recorder, &(struct hr_event){
                                      .event = HR_EVENT_RECORD,
                                      .op = -1,
                                      .team = lane->team->number,
                                      .number = on_gpu ? HR_VIA_GPU : via(lane, moves_data),
                                      .bytes = (int64_t)(lane->executor.place + step_of(lane)),
                                  });
    }
}

static int execute_batch(struct hr_lane *lane, const struct hr_wire_message *record) {
    HR_TRY(hr_batch_load(lane, record));
    const struct hr_batch *batch = lane->executor.batch;
    note_record(lane, batch->operand_count > 0,
                        batch->request_count > 0 && (batch->requests[0]->call.flags & HORO_SUBMIT_ON_GPU) != 0);
    hr_requests_note_batch(&lane->engine->requests, batch->requests, batch->request_count, batch->bytes);
    const int op = batch->request_count == 0 ? HORO_BARRIER : batch->requests[0]->call.op;
    if (hr_op_is_of_members(op)) {
        const uint8_t *cursor = record->rows.data;
        lane->executor.row = record->rows.count == 1 ? hr_wire_next_row(&cursor) : -1;
        lane->executor.state = HR_EXECUTION_CHANGING;
        return batch->request_count == 1 ? HORO_OK : HORO_ERR_INTERNAL;
    }
    if (!hr_op_tells_rows(op) && record->rows.count > 0) {
        return HORO_ERR_INTERNAL;
    }
    if (hr_op_tells_rows(op)) {
        char text[HORO_MESSAGE_MAX];
        const int status = batch->request_count == 1 ? hr_gather_prepare(batch->requests[0], lane->team, record->rows,
                                                                         text, sizeof text)
                                                     : HORO_ERR_INTERNAL;
        if (status == HORO_ERR_USAGE) {
            return refuse_batch(lane, text);
        }
        HR_TRY(status);
    }
    const int begun = hr_batch_begin(lane);
    HR_TRY(begun);
    if (begun == HR_DONE) {
        end_batch(lane);
    } else {
        lane->executor.state = HR_EXECUTION_RUNNING;
    }
    return HORO_OK;
}

int hr_lane_execute_lone(struct hr_lane *lane, struct hr_request *request, struct hr_wire_rows rows) {
    lane->executor.record_bytes = 0;
    lane->executor.moves++;
    if (!hr_batch_is_begun_ahead(request->call.op)) {
        uint8_t ref[4 + 2] = {0}; /* its id, and no name */
        (void)hr_store_u32(ref, request->announced_id);
        return execute_batch(
            lane, &(struct hr_wire_message){.type = HR_WIRE_BATCH, .count = 1, .items = ref, .rows = rows});
    }
    const struct hr_batch *batch = lane->executor.batch;
    note_record(lane, 1, 0);
    hr_requests_note_batch(&lane->engine->requests, batch->requests, batch->request_count, batch->bytes);
    lane->backend->ops->show_ahead(lane->backend);
    lane->executor.state = HR_EXECUTION_RUNNING;
    return HORO_OK;
}

/* A batch of one tensor whose result has come with the record. */
static int execute_result(struct hr_lane *lane, const struct hr_wire_message *record) {
    struct hr_request *request = NULL;
    const struct hr_wire_ref ref = {.id = record->id};
    HR_TRY(hr_lane_resolve(lane, &ref, &request));
    if (hr_carried_bytes(lane->team, &request->call) != record->data_bytes) {
        return HORO_ERR_INTERNAL;
    }
    note_record(lane, 0, 0);
    hr_requests_note_batch(&lane->engine->requests, &request, 1, (uint64_t)request->data_bytes);
    hr_carried_unpack(lane->team, &request->call, record->data);
    count_batch(lane, 1, (uint64_t)request->data_bytes);
    end_record(lane);
    hr_requests_complete(&lane->engine->requests, &request, 1, HORO_OK, NULL);
    return HORO_OK;
}

/* One that ends no request of this rank: what it has said of itself before, and of how far it is, holds no more. */
static void pass_record(struct hr_lane *lane) {
    end_record(lane);
    hr_drive_lock(&lane->engine->drive);
    lane->engine->requests.passed++;
    hr_drive_unlock(&lane->engine->drive);
}

static int execute_fail(struct hr_lane *lane, const struct hr_wire_message *record) {
    struct hr_request *request = hr_port_find_name(&lane->port, record->name);
    if (request == NULL) {
        const struct hr_wire_text none = {NULL, 0};
        HR_TRY(lane->executor.ops->absent(lane, record->name, none, &request));
        pass_record(lane);
        return HORO_OK;
    }
    char text[HORO_MESSAGE_MAX];
    const size_t bytes = record->text.bytes < sizeof text - 1 ? record->text.bytes : sizeof text - 1;
    memcpy(text, record->text.data, bytes);
    text[bytes] = '\0';
    hr_announcer_drop(&lane->announcer, request);
    end_record(lane);
    hr_requests_complete(&lane->engine->requests, &request, 1, record->status, text);
    return HORO_OK;
}

/* The last record of the world's log: nothing that is still pending there will ever be agreed on. */
static int execute_leave(struct hr_lane *lane, const struct hr_wire_message *record) {
    struct hr_arena *arena = &lane->node->arena;
    const struct hr_wire_text words = record->text;
    if (words.bytes > 0) {
        hr_arena_keep_last_words(arena, record->rank, words.data, words.bytes);
    }
    hr_arena_end_once(&arena->header->left_word,
                      (struct hr_abort){.code = record->status,
                                        .rank = record->rank,
                                        .by = record->rank,
                                        .reason = words.bytes > 0 ? HR_REASON_ENDED : HR_REASON_LEFT});
    lane->executor.has_executed_leave = 1;
    hr_end_note(lane->node);
    end_record(lane);
    return HORO_OK;
}

/* Moves what is in the ring to log_in and lets the leader know that there is room. */
static int take_log(struct hr_lane *lane) {
    const struct hr_partition *partition = &lane->team->partition;
    const size_t available = (size_t)(atomic_load(&partition->header->log.written) - lane->executor.log_position);
    if (available == 0) {
        return HORO_OK;
    }
    struct hr_buffer *in = &lane->executor.log_in;
    HR_TRY(hr_buffer_reserve(in, available));
    in->end += hr_ring_read(&partition->header->log, partition->log_ring, HR_LOG_RING_BYTES,
                            &lane->executor.log_position, in->data + in->end, available);
    /* partner: slowest_reader */
    atomic_store(&partition->blocks[lane->node->local_rank].log_read, lane->executor.log_position);
    if (!lane->is_leader && atomic_load(&partition->header->log_wants_room) != 0) {
        hr_team_wake_leader(lane->team);
    }
    return HORO_OK;
}

static int execute_record(struct hr_lane *lane, const struct hr_wire_message *record) {
    switch (record->type) {
    case HR_WIRE_BATCH: return execute_batch(lane, record);
    case HR_WIRE_RESULT: return execute_result(lane, record);
    case HR_WIRE_FAIL: return execute_fail(lane, record);
    case HR_WIRE_LEAVE: return execute_leave(lane, record);
    default: break;
    }
    hr_record_handler *handler = lane->executor.ops->handlers[record->type];
    if (handler == NULL) {
        return HORO_ERR_INTERNAL;
    }
    HR_TRY(handler(lane, record));
    pass_record(lane);
    return HORO_OK;
}

int hr_lane_execute(struct hr_lane *lane) {
    if (lane->executor.state == HR_EXECUTION_RUNNING) {
        return progress_task(lane);
    }
    if (lane->executor.state == HR_EXECUTION_LOST) {
        return confirm(lane);
    }
    if (lane->executor.state == HR_EXECUTION_CHANGING) {
        return change(lane);
    }
    HR_TRY(take_log(lane));
    struct hr_wire_message record;
    size_t bytes;
    const int whole = hr_frame_peek(&lane->executor.log_in, &record, &bytes);
    if (whole != HORO_OK) {
        return whole < 0 ? whole : HR_STILL;
    }
    lane->executor.record_bytes = bytes;
    HR_TRY(execute_record(lane, &record));
    hr_buffer_consume(&lane->executor.log_in, bytes); /* the batch has its own copy */
    lane->executor.moves++;
    return HR_MOVED;
}

void hr_executor_cancel(struct hr_lane *lane) {
    if (lane->executor.state == HR_EXECUTION_RUNNING) {
        cancel_task(lane);
    }
    lane->executor.state = HR_EXECUTION_IDLE;
}

int hr_lane_is_ending_batch(const struct hr_lane *lane) {
    const struct hr_backend *backend = lane->executor.backend;
    return lane->executor.state == HR_EXECUTION_RUNNING && backend->ops->is_ending(backend);
}
