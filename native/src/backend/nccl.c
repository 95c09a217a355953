#include "backend/nccl.h"

#include <limits.h>
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

int hr_nccl_can(const horo_request *call) {
    /* NCCL multiplies the values of each rank before it sums floats, and nothing else */
    const int is_scaled = call->reduce_op == HORO_AVERAGE || call->prescale != 1.0 || call->postscale != 1.0;
    const int sums = call->reduce_op == HORO_SUM || call->reduce_op == HORO_AVERAGE;
    if (call->op == HORO_BROADCAST) {
        return 1;
    }
    int can = hr_op_is(call->op, HR_OP_REDUCTION) && call->op != HORO_REDUCE && call->reduce_op != HORO_ADASUM;
    can = can && (sums || !is_scaled) && call->reduce_op < HORO_BAND;
    for (int i = 0; i < call->tensor_count && can; i++) {
        /* it has no complex numbers: their parts will do, except for a product */
        const int dtype = hr_dtype_worked_on(call->tensors[i].dtype, call->reduce_op);
        can = dtype_of(dtype) >= 0 && call->tensors[i].wire_dtype == 0 && !(is_scaled && hr_dtype_is_integer(dtype));
    }
    return can;
}

#define CONFIG_MAGIC 0xcafebeefu

static int checked(struct hr_nccl_comm *comm, int code, const char *function) {
    return hr_nccl_check(comm->nccl, code, function, comm->handle, &comm->failure);
}

/* ---- Beginning ---- */

static void free_fence(struct hr_nccl_comm *comm) {
    if (comm->fence != NULL) {
        (void)comm->device->cuda->event_destroy(comm->fence);
        comm->fence = NULL;
    }
}

int hr_nccl_connect(struct hr_nccl_comm *comm, const struct hr_nccl *nccl, struct hr_device *device, void *stream,
                    const struct hr_nccl_id *id, int size, int rank, struct hr_error *error) {
    const struct hr_cuda *cuda = device->cuda;
    struct hr_device_visit visit;
    struct hr_nccl_config config = {
        .size = sizeof config, .magic = CONFIG_MAGIC, .version = HR_NCCL_VERSION_LEAST, .blocking = 0,
        .cga_cluster_size = INT_MIN, .min_ctas = INT_MIN, .max_ctas = INT_MIN, .split_share = INT_MIN /* not set */
    };
    *comm = (struct hr_nccl_comm){.nccl = nccl, .device = device, .stream = stream, .state = HR_NCCL_NONE};
    HR_TRY(hr_device_enter(device, &visit, error));
    int status =
        hr_cuda_check(cuda, cuda->event_create(&comm->fence, HR_CUDA_EVENT_DISABLE_TIMING), "cuEventCreate", error);
    if (status == HORO_OK) {
        const int code = nccl->comm_init_rank_config(&comm->handle, size, *id, rank, &config);
        status = hr_nccl_check(nccl, code, "ncclCommInitRankConfig", comm->handle, error);
    }
    if (status == HORO_OK) {
        comm->state = HR_NCCL_CONNECTING;
    } else {
        if (comm->handle != NULL) {
            (void)nccl->comm_abort(comm->handle);
            comm->handle = NULL;
        }
        free_fence(comm);
    }
    hr_device_leave(device, &visit);
    return status;
}

/* ---- Launching ---- */

/* The rows of each rank where they are equally many; else a reduction for each rank. */
static hr_status scatter(struct hr_nccl_comm *comm, const struct hr_team *team, const struct hr_operand *operand,
                         int dtype, int op) {
    const struct hr_nccl *nccl = comm->nccl;
    const size_t row_bytes = operand->row_bytes;
    const size_t row_values = row_bytes / hr_dtype_bytes(operand->dtype);
    const size_t size = (size_t)team->size;
    const size_t all = operand->bytes / row_bytes;
    if (all % size == 0) {
        const int code = nccl->reduce_scatter(operand->input, operand->output, all / size * row_values, dtype, op,
                                              comm->handle, comm->stream);
        return checked(comm, code, "ncclReduceScatter");
    }
    for (int r = 0; r < team->size; r++) {
        size_t first, rows;
        hr_part(all, size, (size_t)r, &first, &rows);
        if (rows > 0) {
            const char *input = (const char *)operand->input + first * row_bytes;
            const int code =
                nccl->reduce(input, operand->output, rows * row_values, dtype, op, r, comm->handle, comm->stream);
            HR_TRY(checked(comm, code, "ncclReduce"));
        }
    }
    return HORO_OK;
}

static hr_status enqueue(struct hr_nccl_comm *comm, const struct hr_team *team, const struct hr_work *work, size_t i) {
    const struct hr_nccl *nccl = comm->nccl;
    const struct hr_operand *operand = &work->operands[i];
    const int dtype = dtype_of(operand->dtype);
    if (operand->bytes == 0) {
        return HORO_OK;
    }
    if (work->op == HORO_BROADCAST) {
        const int code = nccl->broadcast(operand->input, operand->output, operand->bytes, HR_NCCL_UINT8,
                                         work->root_rank, comm->handle, comm->stream);
        return checked(comm, code, "ncclBroadcast");
    }
    static const int ops[] = {[HORO_AVERAGE] = HR_NCCL_SUM, [HORO_SUM] = HR_NCCL_SUM, [HORO_MIN] = HR_NCCL_MIN,
                              [HORO_MAX] = HR_NCCL_MAX, [HORO_PRODUCT] = HR_NCCL_PRODUCT};
    const int op = comm->has_scale[dtype] ? comm->scales[dtype] : ops[work->reduce_op];
    if (work->op == HORO_REDUCESCATTER) {
        return scatter(comm, team, operand, dtype, op);
    }
    const size_t count = operand->bytes / hr_dtype_bytes(operand->dtype);
    const int code = nccl->all_reduce(operand->input, operand->output, count, dtype, op, comm->handle, comm->stream);
    return checked(comm, code, "ncclAllReduce");
}

/* The group of calls, and before it, where sums are multiplied, an operation of NCCL for each dtype that occurs. */
static hr_status launch(struct hr_nccl_comm *comm, const struct hr_team *team, const struct hr_work *work) {
    const struct hr_kernel *kernel = team->node->kernel;
    const double post = work->reduce_op == HORO_AVERAGE ? work->postscale / team->size : work->postscale;
    const double factor = work->prescale * post;
    const float single = (float)factor;
    uint64_t factors[HR_NCCL_DTYPES] = {0}; /* by NCCL's dtype of floats, the bits of the factor */
    memcpy(&factors[HR_NCCL_FLOAT64], &factor, sizeof factor);
    memcpy(&factors[HR_NCCL_FLOAT32], &single, sizeof single);
    hr_kernel_convert(kernel, HORO_FLOAT16, &factors[HR_NCCL_FLOAT16], HORO_FLOAT32, &single, 1, 1.0,
                      HR_STORE_ORDINARY);
    hr_kernel_convert(kernel, HORO_BFLOAT16, &factors[HR_NCCL_BFLOAT16], HORO_FLOAT32, &single, 1, 1.0,
                      HR_STORE_ORDINARY);
    const size_t scaled = hr_op_is(work->op, HR_OP_REDUCTION) && factor != 1.0 ? work->count : 0;
    for (size_t i = 0; i < scaled; i++) {
        const int dtype = dtype_of(work->operands[i].dtype);
        if (work->operands[i].bytes > 0 && !comm->has_scale[dtype]) {
            const int code = comm->nccl->red_op_create_pre_mul_sum(&comm->scales[dtype], &factors[dtype], dtype,
                                                                   HR_NCCL_SCALAR_ON_HOST, comm->handle);
            HR_TRY(checked(comm, code, "ncclRedOpCreatePreMulSum"));
            comm->has_scale[dtype] = 1;
        }
    }
    int status = checked(comm, comm->nccl->group_start(), "ncclGroupStart");
    if (status == HORO_OK) {
        for (size_t i = 0; i < work->count && status == HORO_OK; i++) {
            status = enqueue(comm, team, work, i);
        }
        const int ended = checked(comm, comm->nccl->group_end(), "ncclGroupEnd"); /* also of a group that has failed */
        status = status == HORO_OK ? ended : status;
    }
    return status;
}

void hr_nccl_launch(struct hr_nccl_comm *comm, const struct hr_team *team, const struct hr_work *work) {
    struct hr_device_visit visit;
    size_t bytes = 0;
    for (size_t i = 0; i < work->count; i++) {
        bytes |= work->operands[i].bytes;
    }
    if (bytes == 0) {
        return;
    }
    comm->state = HR_NCCL_BROKEN;
    if (hr_device_enter(comm->device, &visit, &comm->failure) == HORO_OK) {
        comm->state = launch(comm, team, work) == HORO_OK ? HR_NCCL_LAUNCHING : HR_NCCL_BROKEN;
        hr_device_leave(comm->device, &visit);
    }
}

/* ---- Polling ---- */

/* As hr_nccl_poll, or a status. */
static int look(struct hr_nccl_comm *comm) {
    const struct hr_cuda *cuda = comm->device->cuda;
    int code = HR_NCCL_OK;
    HR_TRY(checked(comm, comm->nccl->comm_get_async_error(comm->handle, &code), "ncclCommGetAsyncError"));
    const char *what = comm->state == HR_NCCL_CONNECTING ? "NCCL's connecting"
                       : comm->state == HR_NCCL_ENDING   ? "the end of a communicator of NCCL"
                                                         : "a collective of NCCL";
    HR_TRY(checked(comm, code, what));
    if (comm->state == HR_NCCL_IDLE) {
        const int reached = cuda->event_query(comm->fence);
        if (reached == HR_CUDA_NOT_READY) {
            return 0;
        }
        HR_TRY(hr_cuda_check(cuda, reached, "a kernel of NCCL", &comm->failure));
        comm->is_in_flight = 0;
        return 1;
    }
    if (code == HR_NCCL_IN_PROGRESS) {
        return 0;
    }
    if (comm->state == HR_NCCL_ENDING) {
        (void)comm->nccl->comm_destroy(comm->handle);
        comm->handle = NULL;
        comm->state = HR_NCCL_NONE;
        return 1;
    }
    for (int dtype = 0; dtype < HR_NCCL_DTYPES; dtype++) { /* of a launch, which is all on the stream */
        if (comm->has_scale[dtype]) {
            comm->has_scale[dtype] = 0;
            HR_TRY(checked(comm, comm->nccl->red_op_destroy(comm->scales[dtype], comm->handle), "ncclRedOpDestroy"));
        }
    }
    if (comm->state == HR_NCCL_LAUNCHING) { /* from here on an event behind it means its end */
        HR_TRY(hr_cuda_check(cuda, cuda->event_record(comm->fence, comm->stream), "cuEventRecord", &comm->failure));
        comm->is_in_flight = 1;
    }
    comm->state = HR_NCCL_IDLE;
    return 1;
}

int hr_nccl_poll(struct hr_nccl_comm *comm) {
    struct hr_device_visit visit;
    const int is_busy = comm->state == HR_NCCL_CONNECTING || comm->state == HR_NCCL_LAUNCHING ||
                        comm->state == HR_NCCL_ENDING || (comm->state == HR_NCCL_IDLE && comm->is_in_flight);
    if (!is_busy) {
        return 0;
    }
    int moved = hr_device_enter(comm->device, &visit, &comm->failure);
    if (moved == HORO_OK) {
        moved = look(comm);
        hr_device_leave(comm->device, &visit);
    }
    if (moved < 0) {
        comm->state = HR_NCCL_BROKEN;
    }
    return moved != 0;
}

/* ---- The end ---- */

void hr_nccl_end(struct hr_nccl_comm *comm) {
    struct hr_device_visit visit;
    if (hr_device_enter(comm->device, &visit, &comm->failure) != HORO_OK) {
        comm->state = HR_NCCL_BROKEN;
        return;
    }
    const int status = checked(comm, comm->nccl->comm_finalize(comm->handle), "ncclCommFinalize");
    hr_device_leave(comm->device, &visit);
    comm->state = status == HORO_OK ? HR_NCCL_ENDING : HR_NCCL_BROKEN;
}

void hr_nccl_abort(struct hr_nccl_comm *first) {
    struct hr_device_visit visit;
    const int are_several = first != NULL && first->next_aborted != NULL;
    const int is_group = are_several && first->nccl->group_start() == HR_NCCL_OK;
    for (struct hr_nccl_comm *comm = first; comm != NULL; comm = comm->next_aborted) {
        const int has_entered = hr_device_enter(comm->device, &visit, NULL) == HORO_OK;
        (void)comm->nccl->comm_abort(comm->handle);
        if (has_entered) {
            hr_device_leave(comm->device, &visit);
        }
    }
    if (is_group) {
        (void)first->nccl->group_end();
    }
    for (struct hr_nccl_comm *comm = first; comm != NULL; comm = comm->next_aborted) {
        if (hr_device_enter(comm->device, &visit, NULL) == HORO_OK) { /* a fence behind what has been aborted */
            comm->is_in_flight = comm->device->cuda->event_record(comm->fence, comm->stream) == HR_CUDA_OK;
            hr_device_leave(comm->device, &visit);
        }
        comm->handle = NULL;
        comm->state = HR_NCCL_NONE;
    }
}

int hr_nccl_is_quiet(struct hr_nccl_comm *comm) {
    struct hr_device_visit visit;
    if (comm->is_in_flight && hr_device_enter(comm->device, &visit, &comm->failure) == HORO_OK) {
        comm->is_in_flight = comm->device->cuda->event_query(comm->fence) == HR_CUDA_NOT_READY;
        hr_device_leave(comm->device, &visit);
    }
    return !comm->is_in_flight;
}

void hr_nccl_close(struct hr_nccl_comm *comm) {
    struct hr_device_visit visit;
    if (comm->handle != NULL) {
        comm->next_aborted = NULL;
        hr_nccl_abort(comm);
    }
    if (comm->device != NULL && hr_device_enter(comm->device, &visit, NULL) == HORO_OK) {
        free_fence(comm);
        hr_device_leave(comm->device, &visit);
    }
    comm->device = NULL;
}
