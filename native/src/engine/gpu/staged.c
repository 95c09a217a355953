/*
 * Requests whose tensors are on a GPU. They are submitted as all others, with the memory of a staging in place of their
 * tensors', but get into the queue only when the values are there: until then the rank has not announced them.
 */
#include <stdlib.h>

#include "base/cut.h"
#include "base/traits.h"
#include "device/staging.h"
#include "engine/engine.h"
#include "engine/gpu/gpu.h"

enum { CLOSE_MS = 2500 }; /* for what runs on a GPU; then the stager frees what it has without this thread */

/* From a thread of the GPU's driver. The request may be over, but has not let go of its staging. */
static void on_ready(void *owner, void *launched) {
    struct hr_engine *engine = owner;
    struct hr_request *request = launched;
    hr_drive_lock(&engine->drive);
    if (atomic_load(&request->status) == HORO_IN_PROGRESS) {
        hr_requests_queue(&engine->requests, request);
        hr_drive_kick(&engine->drive);
    }
    hr_drive_unlock(&engine->drive);
}

/* A request whose values do not come; with the lock held. The other ranks wait for it, and are told. */
static void fail_locked(struct hr_engine *engine, struct hr_request *request, int status, const char *text) {
    if (atomic_load(&request->status) != HORO_IN_PROGRESS) {
        return;
    }
    hr_requests_complete_locked(&engine->requests, request, status, text);
    /* before anybody can submit the name again */
    const horo_request *call = &request->call;
    const int is_told = hr_requests_refuse(&engine->requests, call->team, call->name, status, text) == 1;
    if (!is_told && !atomic_load(&engine->drive.stop)) {
        hr_node_end(engine->node, HORO_ERR_PEER_LOST,
                    "an error on GPU %d that lost the values of %s '%.60s': %.500s; if a kernel of the program is at "
                    "fault, a run with CUDA_LAUNCH_BLOCKING=1 shows which",
                    call->device - 1, hr_op_name(call->op), call->name, text);
    }
    hr_drive_kick(&engine->drive); /* a caller that waits for it may drive meanwhile */
    hr_drive_wake_waiters(&engine->drive);
}

/* From the stager's watchdog. */
static void on_failed(void *owner, void *launched, const char *text) {
    struct hr_engine *engine = owner;
    struct hr_request *request = launched;
    hr_drive_lock(&engine->drive);
    fail_locked(engine, request, HORO_ERR_RESOURCE, text);
    hr_drive_unlock(&engine->drive);
}

int hr_engine_use_cuda(struct hr_engine *engine, const char *const *paths, size_t path_count, struct hr_error *error) {
    (void)pthread_mutex_lock(&engine->staging_lock);
    struct hr_stager *made = atomic_load(&engine->stager);
    const int status =
        made != NULL ? HORO_OK : hr_stager_create(paths, path_count, engine, on_ready, on_failed, &made, error);
    atomic_store(&engine->stager, made);
    (void)pthread_mutex_unlock(&engine->staging_lock);
    return status;
}

void hr_engine_end_cuda(struct hr_engine *engine) {
    struct hr_stager *stager = atomic_exchange(&engine->stager, NULL);
    if (stager != NULL) {
        hr_stager_close(stager, CLOSE_MS);
    }
}

/* One piece of host memory for values and result, but for a reduce-scatter, whose result lies behind the values. */
static void describe(const struct hr_engine *engine, const struct hr_request *request,
                     struct hr_staged_tensor *staged) {
    const horo_request *call = &request->call;
    const int counts_here = call->op != HORO_BROADCAST || call->root_rank == engine->node->rank;
    for (int i = 0; i < call->tensor_count; i++) {
        const horo_tensor *tensor = &call->tensors[i];
        const size_t bytes = hr_tensor_bytes(tensor);
        const size_t room = hr_round_up(bytes, HR_STAGED_ALIGNMENT);
        staged[i] = (struct hr_staged_tensor){
            .source = (uint64_t)(uintptr_t)tensor->input, .target = (uint64_t)(uintptr_t)tensor->output,
            .source_bytes = counts_here ? bytes : 0,
            .room = call->op == HORO_REDUCESCATTER ? 2 * room : room,
            .result_at = call->op == HORO_REDUCESCATTER ? room : 0,
        };
    }
}

static const struct hr_hooks staged_hooks = {.freed = hr_staging_drop, .buried = hr_staging_drop};

/* Begins to copy the values to the host, where the request has them then. HORO_OK, or a status with its reason. */
static int stage(struct hr_engine *engine, struct hr_request *request, struct hr_error *reason) {
    const horo_request *call = &request->call;
    struct hr_stager *stager = atomic_load(&engine->stager);
    if (call->op == HORO_BARRIER) {
        return hr_fail(reason, HORO_ERR_USAGE, "it has no tensor, so no device");
    }
    if ((call->flags & HORO_SUBMIT_INTO) != 0) {
        return hr_fail(reason, HORO_ERR_UNSUPPORTED,
                       "results cannot go into outputs on a GPU; take them from the host");
    }
    if (hr_op_is(call->op, HR_OP_ROOTED) && call->op != HORO_BROADCAST) {
        return hr_fail(reason, HORO_ERR_UNSUPPORTED, "not offered for tensors on a GPU; copy them to the host");
    }
    if (stager == NULL) {
        return hr_fail(reason, HORO_ERR_USAGE, "a tensor on a GPU, and horo_use_cuda has not been called");
    }
    struct hr_staged_tensor *staged = calloc((size_t)call->tensor_count, sizeof *staged);
    if (staged == NULL) {
        return hr_fail(reason, HORO_ERR_RESOURCE, "out of memory");
    }
    describe(engine, request, staged);
    struct hr_staging *staging = NULL;
    const int status = hr_staging_create(stager, call->device - 1, (void *)(uintptr_t)call->stream, staged,
                                         (size_t)call->tensor_count, &staging, reason);
    free(staged);
    HR_TRY(status);
    request->cargo = (struct hr_cargo){&staged_hooks, staging};
    request->state = HR_REQUEST_STAGING;
    horo_tensor *tensors = (horo_tensor *)(void *)(request + 1); /* those of its call, see submit.c */
    for (int i = 0; i < call->tensor_count; i++) {
        char *host = hr_staging_host(staging, (size_t)i);
        tensors[i].input = host;
        tensors[i].output = host + staging->tensors[i].result_at;
    }
    return HORO_OK;
}

hr_status hr_gpu_submit(struct hr_engine *engine, const horo_request *call, int64_t *handle, struct hr_error *error) {
    struct hr_request *request = NULL;
    struct hr_error failure = {0};
    HR_TRY(hr_requests_create(&engine->requests, call, &request, error));
    hr_drive_lock(&engine->drive); /* nothing is done on the GPU for one that is refused */
    hr_status status = hr_requests_check(&engine->requests, request, error);
    const int stays = status == HORO_OK && atomic_load(&request->port->lane->on_gpu) != NULL;
    hr_drive_unlock(&engine->drive);
    if (status == HORO_OK) {
        status = stays ? hr_gpu_place(engine, request, &failure) : HORO_OK;
        status = status == HORO_OK && request->cargo.data == NULL ? stage(engine, request, &failure) : status;
        if (status != HORO_OK) {
            (void)hr_fail(error, status, "%s '%s': %s", hr_op_name(call->op), request->call.name, failure.text);
        }
    }
    if (status != HORO_OK) {
        hr_request_destroy(request);
        return status;
    }
    const struct hr_staging *staging = request->cargo.hooks == &staged_hooks ? request->cargo.data : NULL;
    HR_TRY(hr_requests_add(&engine->requests, request, handle, error));
    /* one that is staged gets into the queue when its values are there */
    if (staging != NULL && hr_stager_launch(staging->block, staging->from_device, request, &failure) != HORO_OK) {
        hr_drive_lock(&engine->drive);
        struct hr_request *refused = hr_requests_find(&engine->requests, *handle); /* it may have been released */
        if (refused != NULL) {
            fail_locked(engine, refused, failure.code, failure.text);
        }
        hr_drive_unlock(&engine->drive);
    }
    return HORO_OK;
}

/* Begins to copy results back, or has what follows in the stream wait for the copy that has been begun. */
static int return_staged(struct hr_request *request, void *stream, struct hr_error *error) {
    struct hr_staging *staging = request->cargo.data;
    size_t *bytes = request->is_returned ? NULL : calloc(staging->count, sizeof *bytes);
    if (bytes == NULL && !request->is_returned) {
        return hr_fail(error, HORO_ERR_RESOURCE, "'%s': out of memory", request->call.name);
    }
    for (int i = 0; bytes != NULL && i < request->call.tensor_count; i++) {
        const horo_tensor *tensor = &request->call.tensors[i];
        const size_t all = hr_tensor_bytes(tensor);
        size_t first, rows;
        bytes[i] = hr_op_is(request->call.op, HR_OP_TELLING_ROWS) ? 0 : all; /* those are taken from the host */
        if (request->call.op == HORO_REDUCESCATTER && all > 0) {
            hr_part((size_t)tensor->shape[0], (size_t)request->team_size, (size_t)request->team_rank, &first, &rows);
            bytes[i] = all / (size_t)tensor->shape[0] * rows;
        }
    }
    const int status = hr_staging_copy_back(staging, bytes, stream, error);
    request->is_returned |= status == HORO_OK; /* else another call may begin that */
    free(bytes);
    return status;
}

int hr_engine_copy_back(struct hr_engine *engine, int64_t handle, uint64_t stream, struct hr_error *error) {
    void *to = (void *)(uintptr_t)stream;
    int status;
    (void)pthread_mutex_lock(&engine->staging_lock); /* nobody follows copies before they have been begun */
    struct hr_request *request = hr_requests_hold(&engine->requests, handle);
    if (request == NULL || request->call.device == 0) { /* until it is done, the driver may change the rest of it */
        status = hr_fail(error, HORO_ERR_USAGE, "handle %lld has no tensors on a GPU", (long long)handle);
    } else if (atomic_load(&request->status) != HORO_OK) {
        status = hr_fail(error, HORO_ERR_USAGE, "'%s' has no results for the GPU: it is not done, or has failed",
                         request->call.name);
    } else if ((request->call.flags & HORO_SUBMIT_ON_GPU) != 0) {
        status = hr_mark_await(request->cargo.data, to, error);
    } else {
        status = return_staged(request, to, error);
    }
    if (request != NULL) {
        hr_requests_let_go(&engine->requests, request);
    }
    (void)pthread_mutex_unlock(&engine->staging_lock);
    return status;
}
