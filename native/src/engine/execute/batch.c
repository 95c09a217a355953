#include "engine/execute/batch.h"

#include <stdlib.h>
#include <string.h>

#include "base/traits.h"
#include "engine/engine.h"

void hr_lane_free_batch(struct hr_lane *lane) {
    if (lane->executor.batch != NULL) {
        free((void *)lane->executor.batch->requests);
        free(lane->executor.batch->operands);
        free(lane->executor.batch->row_bytes);
        free(lane->executor.batch);
        lane->executor.batch = NULL;
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

static void add_operand(struct hr_batch *batch, const horo_request *call, int t) {
    const horo_tensor *tensor = &call->tensors[t];
    const int reduce_op = hr_op_reduces(call->op) ? call->reduce_op : HORO_SUM;
    int64_t bytes = 0;
    /* stays so where it does not fit: an allgather of such rows has been refused, others do not look at it */
    int64_t row_bytes = 0;
    const int rows = tensor->ndim > 0;
    /* it was checked when it was submitted */
    (void)hr_shape_bytes(tensor->shape, tensor->ndim, tensor->dtype, &bytes);
    (void)hr_shape_bytes(tensor->shape + rows, tensor->ndim - rows, tensor->dtype, &row_bytes);
    const size_t i = batch->operand_count++;
    batch->operands[i] = (struct hr_operand){
        .input = tensor->input,
        .output = tensor->output,
        .bytes = (size_t)bytes,
        .dtype = hr_dtype_worked_on(tensor->dtype, reduce_op),
        .wire_dtype = tensor->wire_dtype,
    };
    batch->row_bytes[i] = (size_t)row_bytes;
    batch->bytes += (uint64_t)bytes;
}

/* Makes room for so many requests, of which none is there. */
static int begin_load(struct hr_lane *lane, size_t count) {
    if (lane->executor.batch == NULL && (lane->executor.batch = calloc(1, sizeof *lane->executor.batch)) == NULL) {
        return HORO_ERR_RESOURCE;
    }
    struct hr_batch *batch = lane->executor.batch;
    batch->request_count = 0;
    batch->operand_count = 0;
    batch->bytes = 0;
    if (count > batch->request_capacity) {
        HR_TRY(grow((void **)&batch->requests, count, sizeof *batch->requests));
        batch->request_capacity = count;
    }
    return HORO_OK;
}

/* Its requests are there. */
static int load_operands(struct hr_batch *batch) {
    size_t operands = 0;
    for (size_t i = 0; i < batch->request_count; i++) {
        operands += (size_t)batch->requests[i]->call.tensor_count;
    }
    if (operands > batch->operand_capacity) {
        HR_TRY(grow((void **)&batch->operands, operands, sizeof *batch->operands));
        HR_TRY(grow((void **)&batch->row_bytes, operands, sizeof *batch->row_bytes));
        batch->operand_capacity = operands;
    }
    for (size_t i = 0; i < batch->request_count; i++) {
        const horo_request *call = &batch->requests[i]->call;
        for (int t = 0; t < call->tensor_count; t++) {
            add_operand(batch, call, t);
        }
    }
    return HORO_OK;
}

int hr_lane_resolve(struct hr_lane *lane, const struct hr_wire_ref *ref, struct hr_request **request) {
    struct hr_wire_text bytes = {NULL, 0};
    if (ref->name.bytes == 0) {
        HR_TRY(hr_announcer_take(&lane->announcer, ref->id, request, &bytes));
        return *request != NULL ? HORO_OK : lane->executor.ops->absent(lane, ref->name, bytes, request);
    }
    *request = hr_port_find_name(&lane->port, ref->name);
    HR_TRY(*request != NULL ? HORO_OK : lane->executor.ops->absent(lane, ref->name, bytes, request));
    if (*request == NULL) {
        return HORO_ERR_INTERNAL;
    }
    return ref->id == 0 ? HORO_OK : hr_announcer_learn(&lane->announcer, *request, ref->id);
}

int hr_batch_load(struct hr_lane *lane, const struct hr_wire_message *record) {
    HR_TRY(begin_load(lane, record->count));
    struct hr_batch *batch = lane->executor.batch;
    const uint8_t *cursor = record->items;
    for (uint32_t i = 0; i < record->count; i++) {
        struct hr_wire_ref ref;
        hr_wire_next_ref(&cursor, &ref);
        HR_TRY(hr_lane_resolve(lane, &ref, &batch->requests[i]));
        batch->request_count++;
    }
    return load_operands(batch);
}

int hr_batch_begin(struct hr_lane *lane) {
    const struct hr_batch *batch = lane->executor.batch;
    if (batch->request_count == 0) {
        return HORO_ERR_INTERNAL;
    }
    /* requests that may share a batch agree in all that is looked at here */
    const horo_request *call = &batch->requests[0]->call;
    if (!hr_op_has_tensors(call->op)) {
        return HR_DONE;
    }
    const struct hr_work work = {
        .op = call->op,
        .reduce_op = call->reduce_op,
        .root_rank = call->op == HORO_BROADCAST ? hr_team_member(lane->team, call->root_rank) : 0,
        .prescale = call->prescale,
        .postscale = call->postscale,
        .operands = batch->operands,
        .count = batch->operand_count,
        .row_bytes = batch->row_bytes,
        .results = batch->requests[0]->gathered,
        .splits = batch->requests[0]->splits,
    };
    struct hr_backend *backend = lane->backend;
    if ((call->flags & HORO_SUBMIT_ON_GPU) != 0) {
        backend = lane->executor.ops->backend_on_gpu(batch->requests, batch->request_count);
    }
    if (backend == NULL) {
        return HORO_ERR_INTERNAL;
    }
    lane->executor.backend = backend;
    HR_TRY(backend->ops->begin(backend, &work));
    return HR_MOVED;
}

/* ---- Ahead of the agreement ---- */

int hr_batch_begin_ahead(struct hr_lane *lane, struct hr_request *request) {
    struct hr_wire_text unused;
    if (begin_load(lane, 1) != HORO_OK) {
        return 0;
    }
    struct hr_batch *batch = lane->executor.batch;
    batch->request_count = 1;
    if (hr_announcer_take(&lane->announcer, request->announced_id, batch->requests, &unused) != HORO_OK ||
        load_operands(batch) != HORO_OK) {
        hr_announcer_put_back(&lane->announcer, request);
        return 0;
    }
    lane->executor.batch->segment_before = lane->team->segment;
    if (hr_batch_begin(lane) == HR_MOVED && lane->backend->ops->begin_ahead(lane->backend)) {
        return 1;
    }
    hr_batch_take_back(lane, request);
    return 0;
}

void hr_batch_take_back(struct hr_lane *lane, struct hr_request *request) {
    lane->backend->ops->cancel(lane->backend);
    lane->team->segment = lane->executor.batch->segment_before;
    hr_announcer_put_back(&lane->announcer, request);
}
