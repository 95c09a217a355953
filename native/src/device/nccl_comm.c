#include "device/nccl_comm.h"

#include <limits.h>

#define CONFIG_MAGIC 0xcafebeefu

static int checked(struct hr_nccl_comm *comm, int code, const char *function) {
    return hr_nccl_check(comm->nccl, code, function, comm->handle, &comm->failure);
}

static int broken(struct hr_nccl_comm *comm) {
    comm->state = HR_NCCL_BROKEN;
    return comm->failure.code;
}

/* ---- Beginning ---- */

static void free_fence(struct hr_nccl_comm *comm) {
    if (comm->fence != NULL) {
        (void)comm->device->cuda->event_destroy(comm->fence);
        comm->fence = NULL;
    }
}

int hr_nccl_connect(struct hr_nccl_comm *comm, const struct hr_nccl *nccl, struct hr_device *device,
                    void *stream, const struct hr_nccl_ranks *ranks, struct hr_error *error) {
    const struct hr_cuda *cuda = device->cuda;
    struct hr_device_visit visit;
    struct hr_nccl_config config = {
        .size = sizeof config,
        .magic = CONFIG_MAGIC,
        .version = HR_NCCL_VERSION_LEAST,
        .blocking = 0,
        .cga_cluster_size = INT_MIN, /* not set */
        .min_ctas = INT_MIN,
        .max_ctas = INT_MIN,
        .split_share = INT_MIN,
    };
    *comm = (struct hr_nccl_comm){.nccl = nccl, .device = device, .stream = stream, .state = HR_NCCL_NONE};
    HR_TRY(hr_device_enter(device, &visit, error));
    int status =
        hr_cuda_check(cuda, cuda->event_create(&comm->fence, HR_CUDA_EVENT_DISABLE_TIMING), "cuEventCreate", error);
    if (status == HORO_OK) {
        const int code = nccl->comm_init_rank_config(&comm->handle, ranks->size, *ranks->id, ranks->rank, &config);
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

static hr_status enqueue(struct hr_nccl_comm *comm, const struct hr_nccl_call *call) {
    const struct hr_nccl *nccl = comm->nccl;
    const int is_scaled = call->op == HR_NCCL_SUM && comm->has_scale[call->dtype];
    const int op = is_scaled ? comm->scales[call->dtype] : call->op;
    switch (call->kind) {
    case HR_NCCL_ALL_REDUCE:
        return checked(
            comm,
            nccl->all_reduce(call->input, call->output, call->count, call->dtype, op, comm->handle, comm->stream),
            "ncclAllReduce");
    case HR_NCCL_BROADCAST:
        return checked(comm,
                       nccl->broadcast(call->input, call->output, call->count, call->dtype, call->root, comm->handle,
                                       comm->stream),
                       "ncclBroadcast");
    case HR_NCCL_REDUCE:
        return checked(comm,
                       nccl->reduce(call->input, call->output, call->count, call->dtype, op, call->root, comm->handle,
                                    comm->stream),
                       "ncclReduce");
    case HR_NCCL_REDUCE_SCATTER:
        return checked(
            comm,
            nccl->reduce_scatter(call->input, call->output, call->count, call->dtype, op, comm->handle, comm->stream),
            "ncclReduceScatter");
    }
    return hr_fail(&comm->failure, HORO_ERR_INTERNAL, "no such call of NCCL: %d", (int)call->kind);
}

/* One operation for each dtype that occurs. */
static hr_status create_scales(struct hr_nccl_comm *comm, const struct hr_nccl_call *calls, size_t count,
                               const uint64_t *factors) {
    for (size_t i = 0; i < count; i++) {
        const int dtype = calls[i].dtype;
        const int is_sum = calls[i].kind <= HR_NCCL_REDUCE_SCATTER && calls[i].op == HR_NCCL_SUM;
        if (is_sum && !comm->has_scale[dtype]) {
            HR_TRY(checked(comm,
                           comm->nccl->red_op_create_pre_mul_sum(&comm->scales[dtype], &factors[dtype], dtype,
                                                                 HR_NCCL_SCALAR_ON_HOST, comm->handle),
                           "ncclRedOpCreatePreMulSum"));
            comm->has_scale[dtype] = 1;
        }
    }
    return HORO_OK;
}

hr_status hr_nccl_launch(struct hr_nccl_comm *comm, const struct hr_nccl_call *calls, size_t count,
                         const uint64_t *factors) {
    struct hr_device_visit visit;
    if (hr_device_enter(comm->device, &visit, &comm->failure) != HORO_OK) {
        return broken(comm);
    }
    int status = factors == NULL ? HORO_OK : create_scales(comm, calls, count, factors);
    if (status == HORO_OK) {
        status = checked(comm, comm->nccl->group_start(), "ncclGroupStart");
    }
    if (status == HORO_OK) {
        for (size_t i = 0; i < count && status == HORO_OK; i++) {
            status = enqueue(comm, &calls[i]);
        }
        const int ended = checked(comm, comm->nccl->group_end(), "ncclGroupEnd"); /* also of a group that has failed */
        status = status == HORO_OK ? ended : status;
    }
    hr_device_leave(comm->device, &visit);
    if (status != HORO_OK) {
        return broken(comm);
    }
    comm->state = HR_NCCL_LAUNCHING;
    return HORO_OK;
}

/* ---- Polling ---- */

/* All of the launch is on the stream: from here on an event behind it means its end. */
static hr_status finish_launch(struct hr_nccl_comm *comm) {
    const struct hr_cuda *cuda = comm->device->cuda;
    for (int dtype = 0; dtype < HR_NCCL_DTYPES; dtype++) {
        if (comm->has_scale[dtype]) {
            comm->has_scale[dtype] = 0;
            HR_TRY(checked(comm, comm->nccl->red_op_destroy(comm->scales[dtype], comm->handle), "ncclRedOpDestroy"));
        }
    }
    HR_TRY(hr_cuda_check(cuda, cuda->event_record(comm->fence, comm->stream), "cuEventRecord", &comm->failure));
    comm->is_in_flight = 1;
    return HORO_OK;
}

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
    HR_TRY(comm->state == HR_NCCL_LAUNCHING ? finish_launch(comm) : HORO_OK);
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
        (void)broken(comm);
    }
    return moved != 0;
}

/* ---- The end ---- */

void hr_nccl_end(struct hr_nccl_comm *comm) {
    struct hr_device_visit visit;
    if (hr_device_enter(comm->device, &visit, &comm->failure) != HORO_OK) {
        (void)broken(comm);
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
