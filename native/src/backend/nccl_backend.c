#include "backend/nccl_backend.h"

#include <stdlib.h>
#include <string.h>

#include "base/cut.h"
#include "base/traits.h"

/* ---- What NCCL can do ---- */

/* -1: NCCL has none. */
static int dtype_of(int dtype) {
    switch (dtype) {
    case HORO_UINT8: return HR_NCCL_UINT8;
    case HORO_INT8: return HR_NCCL_INT8;
    case HORO_INT32: return HR_NCCL_INT32;
    case HORO_INT64: return HR_NCCL_INT64;
    case HORO_FLOAT16: return HR_NCCL_FLOAT16;
    case HORO_BFLOAT16: return HR_NCCL_BFLOAT16;
    case HORO_FLOAT32: return HR_NCCL_FLOAT32;
    case HORO_FLOAT64: return HR_NCCL_FLOAT64;
    default: return -1;
    }
}

static int op_of(int reduce_op) {
    switch (reduce_op) {
    case HORO_MIN: return HR_NCCL_MIN;
    case HORO_MAX: return HR_NCCL_MAX;
    case HORO_PRODUCT: return HR_NCCL_PRODUCT;
    default: return HR_NCCL_SUM;
    }
}

int hr_nccl_can(const horo_request *call) {
    /* NCCL multiplies the values of each rank before it sums floats, and nothing else */
    const int is_scaled = call->reduce_op == HORO_AVERAGE || call->prescale != 1.0 || call->postscale != 1.0;
    const int sums = call->reduce_op == HORO_SUM || call->reduce_op == HORO_AVERAGE;
    if (call->op == HORO_BROADCAST) {
        return 1;
    }
    int can = hr_op_reduces(call->op) && call->reduce_op != HORO_ADASUM && (sums || !is_scaled);
    for (int i = 0; i < call->tensor_count && can; i++) {
        /* it has no complex numbers: their parts will do, except for a product */
        const int dtype = hr_dtype_worked_on(call->tensors[i].dtype, call->reduce_op);
        can = dtype_of(dtype) >= 0 && call->tensors[i].wire_dtype == 0 && !(is_scaled && hr_dtype_is_integer(dtype));
    }
    return can;
}

/* ---- A batch as calls ---- */

static void add(struct hr_nccl_calls *self, const struct hr_nccl_call *call) {
    if (call->count > 0) {
        self->items[self->count++] = *call;
    }
}

/* The rows of each rank where they are equally many; else a reduction for each rank. */
static void add_scatter(struct hr_nccl_calls *self, const struct hr_team *team, const struct hr_operand *operand,
                        struct hr_nccl_call call) {
    const size_t row_bytes = operand->row_bytes;
    const size_t width = hr_dtype_bytes(operand->dtype);
    const size_t size = (size_t)team->size;
    const size_t all = operand->bytes == 0 ? 0 : operand->bytes / row_bytes;
    if (all % size == 0) {
        call.kind = HR_NCCL_REDUCE_SCATTER;
        call.count = all / size * row_bytes / width;
        add(self, &call);
        return;
    }
    call.kind = HR_NCCL_REDUCE;
    for (int r = 0; r < team->size; r++) {
        size_t first;
        size_t rows;
        hr_part(all, size, (size_t)r, &first, &rows);
        call.input = (const char *)operand->input + first * row_bytes;
        call.count = rows * row_bytes / width;
        call.root = r;
        add(self, &call);
    }
}

static void add_operand(struct hr_nccl_calls *self, const struct hr_team *team, const struct hr_work *work, size_t i) {
    const struct hr_operand *operand = &work->operands[i];
    struct hr_nccl_call call = {
        .kind = HR_NCCL_ALL_REDUCE,
        .input = operand->input,
        .output = operand->output,
        .count = operand->bytes / hr_dtype_bytes(operand->dtype),
        .dtype = dtype_of(operand->dtype),
        .op = op_of(work->reduce_op),
        .root = work->root_rank,
    };
    if (work->op == HORO_REDUCESCATTER) {
        add_scatter(self, team, operand, call);
        return;
    }
    if (work->op == HORO_BROADCAST) {
        call.kind = HR_NCCL_BROADCAST;
        call.count = operand->bytes;
        call.dtype = HR_NCCL_UINT8;
    }
    add(self, &call);
}

/* By NCCL's dtype of floats, the bits of what the values of each rank are multiplied by. 1 if that is other than 1. */
static int write_factors(const struct hr_team *team, const struct hr_work *work, uint64_t *factors) {
    const struct hr_kernel *kernel = team->node->kernel;
    const double post = work->reduce_op == HORO_AVERAGE ? work->postscale / team->size : work->postscale;
    const double factor = work->prescale * post;
    const float single = (float)factor;
    memset(factors, 0, HR_NCCL_DTYPES * sizeof *factors);
    memcpy(&factors[HR_NCCL_FLOAT64], &factor, sizeof factor);
    memcpy(&factors[HR_NCCL_FLOAT32], &single, sizeof single);
    kernel->convert(HORO_FLOAT16, &factors[HR_NCCL_FLOAT16], HORO_FLOAT32, &single, 1, 1.0, HR_STORE_ORDINARY);
    kernel->convert(HORO_BFLOAT16, &factors[HR_NCCL_BFLOAT16], HORO_FLOAT32, &single, 1, 1.0, HR_STORE_ORDINARY);
    return hr_op_reduces(work->op) && factor != 1.0;
}

/* ---- The work ---- */

size_t hr_nccl_calls_of(const struct hr_team *team, const struct hr_work *work) {
    return work->count * (work->op == HORO_REDUCESCATTER ? (size_t)team->size : 1);
}

hr_status hr_nccl_begin(struct hr_nccl_calls *calls, const struct hr_team *team, struct hr_nccl_comm *comm,
                        const struct hr_work *work) {
    uint64_t factors[HR_NCCL_DTYPES];
    const size_t most = hr_nccl_calls_of(team, work);
    if (most > calls->capacity) {
        struct hr_nccl_call *larger = realloc(calls->items, most * sizeof *larger);
        if (larger == NULL) {
            return HORO_ERR_RESOURCE;
        }
        calls->items = larger;
        calls->capacity = most;
    }
    calls->count = 0;
    for (size_t i = 0; i < work->count; i++) {
        add_operand(calls, team, work, i);
    }
    if (calls->count > 0) {
        const int is_scaled = write_factors(team, work, factors);
        (void)hr_nccl_launch(comm, calls->items, calls->count, is_scaled ? factors : NULL);
    }
    return HORO_OK;
}
