#include "device/staging.h"

#include <stdlib.h>
#include <string.h>

#include "base/cut.h"
#include "device/blocks.h"
#include "device/watchdog.h"

static size_t place(struct hr_staged_tensor *tensors, size_t count) {
    size_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        tensors[i].offset = bytes;
        bytes += hr_round_up(tensors[i].room, HR_STAGED_ALIGNMENT);
    }
    return bytes == 0 ? HR_STAGED_ALIGNMENT : bytes;
}

/* Behind what is on `stream` now, `other` goes on. */
static int follow(const struct hr_cuda *cuda, void *event, void *stream, void *other, struct hr_error *error) {
    HR_TRY(hr_cuda_check(cuda, cuda->event_record(event, stream), "cuEventRecord", error));
    return hr_cuda_check(cuda, cuda->stream_wait_event(other, event, 0), "cuStreamWaitEvent", error);
}

static int is_in_pieces(const struct hr_staging *staging) {
    return staging->tensors[0].piece_bytes > 0;
}

static int copy_to_host(const struct hr_staging *staging, size_t i, size_t at, size_t bytes, struct hr_error *error) {
    const struct hr_cuda *cuda = staging->device->cuda;
    return hr_cuda_check(cuda,
                         cuda->copy_to_host((char *)hr_staging_host(staging, i) + at, staging->tensors[i].source + at,
                                            bytes, staging->from_device),
                         "cuMemcpyDtoHAsync", error);
}

static int copy_all_to_host(const struct hr_staging *staging, struct hr_error *error) {
    for (size_t i = 0; i < staging->count; i++) {
        const struct hr_staged_tensor *tensor = &staging->tensors[i];
        HR_TRY(tensor->source_bytes == 0 ? HORO_OK : copy_to_host(staging, i, 0, tensor->source_bytes, error));
    }
    return HORO_OK;
}

/*
 * An event of the block behind copies that use it and have begun, whether all have or not. Without one nobody knows
 * when it is free, so it is left to nobody.
 */
static int record(struct hr_staging *staging, void *event, void *stream, struct hr_error *error) {
    const struct hr_cuda *cuda = staging->device->cuda;
    const int status = hr_cuda_check(cuda, cuda->event_record(event, stream), "cuEventRecord", error);
    if (status != HORO_OK) {
        hr_staging_disown(staging);
    }
    return status;
}

/* copied_in serves for both: a stream that has been told to wait for an event waits for its record of that time. */
static int copy_in(struct hr_staging *staging, void *stream, const struct hr_mark *behind, struct hr_error *error) {
    const struct hr_cuda *cuda = staging->device->cuda;
    HR_TRY(behind == NULL ? follow(cuda, staging->block->copied_in, stream, staging->from_device, error)
                          : hr_cuda_check(cuda, cuda->stream_wait_event(staging->from_device, behind->event, 0),
                                          "cuStreamWaitEvent", error));
    if (is_in_pieces(staging)) {
        return HORO_OK;
    }
    const int copied = copy_all_to_host(staging, error);
    const int recorded = record(staging, staging->block->copied_in, staging->from_device, error);
    return copied != HORO_OK ? copied : recorded;
}

/* On the stream that they all share, nothing comes between the pieces of another one. */
static int copy_in_turn(struct hr_staging *staging, void *stream, struct hr_error *error) {
    struct hr_device *device = staging->device;
    staging->from_device = device->to_host;
    (void)pthread_mutex_lock(&device->copying);
    const int status = copy_in(staging, stream, NULL, error);
    (void)pthread_mutex_unlock(&device->copying);
    return status;
}

static int copy_in_behind(struct hr_staging *staging, const struct hr_mark *mark, struct hr_error *error) {
    struct hr_device *device = staging->device;
    HR_TRY(device->behind_marks == NULL ? hr_device_create_stream(device, &device->behind_marks, error) : HORO_OK);
    staging->from_device = device->behind_marks;
    return copy_in(staging, NULL, mark, error);
}

static int begin(struct hr_staging *staging, void *stream, const struct hr_mark *behind, struct hr_error *error) {
    struct hr_device *device = staging->device;
    const size_t bytes = place(staging->tensors, staging->count);
    HR_TRY(behind == NULL ? hr_device_refuse_capture(device, stream, error) : HORO_OK);
    HR_TRY(hr_stager_take_block(staging->stager, device, bytes, &staging->block, error));
    staging->block->is_out = 0;
    return behind == NULL ? copy_in_turn(staging, stream, error) : copy_in_behind(staging, behind, error);
}

int hr_staging_create(struct hr_stager *stager, int device, void *stream, const struct hr_mark *behind,
                      struct hr_staged_tensor *tensors, size_t count, struct hr_staging **staging,
                      struct hr_error *error) {
    struct hr_device *opened;
    HR_TRY(hr_stager_device(stager, device, &opened, error));
    struct hr_staging *made = calloc(1, sizeof *made + count * sizeof *tensors);
    if (made == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for tensors on a GPU");
    }
    made->stager = stager;
    made->device = opened;
    atomic_init(&made->references, 1);
    made->count = count;
    memcpy(made->tensors, tensors, count * sizeof *tensors);
    struct hr_device_visit visit;
    int status = hr_device_enter(opened, &visit, error);
    if (status == HORO_OK) {
        status = begin(made, stream, behind, error);
        hr_device_leave(opened, &visit);
    }
    if (status != HORO_OK) {
        hr_staging_release(made);
        return status;
    }
    *staging = made;
    return HORO_OK;
}

void hr_staging_keep(struct hr_staging *staging) {
    atomic_fetch_add(&staging->references, 1);
}

void hr_staging_disown(struct hr_staging *staging) {
    atomic_store(&staging->is_disowned, 1);
}

static void give_back(const struct hr_staging *staging) {
    if (atomic_load(&staging->is_disowned)) {
        hr_block_disown(staging->block);
    } else {
        hr_stager_give_block(staging->stager, staging->block);
    }
}

void hr_staging_drop(struct hr_staging *staging) {
    if (atomic_fetch_sub(&staging->references, 1) == 1) {
        if (staging->block != NULL) {
            give_back(staging);
        }
        free(staging);
    }
}

void hr_staging_release(struct hr_staging *staging) {
    if (staging != NULL) {
        (void)pthread_mutex_lock(&staging->stager->lock);
        staging->request = NULL;
        (void)pthread_mutex_unlock(&staging->stager->lock);
        hr_staging_drop(staging);
    }
}

/* With the stager's lock held, when no function of the host is to come any more. */
static void end_telling(struct hr_staging *staging) {
    hr_watchdog_remove(staging->stager, staging);
    staging->stager->launched--;
    (void)pthread_cond_broadcast(&staging->stager->drained);
}

/* With the stager's lock held, and where CUDA must not be called: a block whose request is gone is only put back. */
static void leave_block(const struct hr_staging *staging) {
    if (atomic_load(&staging->is_disowned)) { /* a batch may have given a part of it to MPI before all had come */
        hr_block_disown(staging->block);
        return;
    }
    hr_stager_give_block_locked(staging->stager, staging->block);
}

/* Called by the driver's thread, which must not call CUDA. */
static void on_copied(void *data) {
    struct hr_staging *staging = data;
    struct hr_stager *stager = staging->stager;
    (void)pthread_mutex_lock(&stager->lock);
    staging->told++;
    const size_t arrived = staging->told * staging->tensors[0].piece_bytes;
    const size_t all = staging->tensors[0].source_bytes;
    atomic_store(&staging->flow.arrived, arrived < all ? arrived : all); /* partner: hr_fused_has_arrived */
    if (!is_in_pieces(staging) || arrived >= all) {
        atomic_store(&staging->is_ready, 1);
    }
    if (staging->request != NULL && stager->owner != NULL) {
        stager->on_ready(stager->owner, staging);
    }
    if (staging->told == staging->to_tell) {
        end_telling(staging);
        if (atomic_fetch_sub(&staging->references, 1) == 1) {
            leave_block(staging);
            free(staging);
        }
    }
    (void)pthread_mutex_unlock(&stager->lock);
}

static int tell(struct hr_staging *staging, void *stream, struct hr_error *error) {
    const struct hr_cuda *cuda = staging->device->cuda;
    return hr_cuda_check(cuda, cuda->launch_host_function(stream, on_copied, staging), "cuLaunchHostFunc", error);
}

static int send_piece(struct hr_staging *staging, size_t at, size_t bytes, struct hr_error *error) {
    const struct hr_device *device = staging->device;
    HR_TRY(copy_to_host(staging, 0, at, bytes, error));
    HR_TRY(follow(device->cuda, staging->block->copied_in, device->to_host, device->to_tell, error));
    return tell(staging, device->to_tell, error);
}

/* The number of functions of the host that will come is in *launched, also where it fails. */
static int send_pieces(struct hr_staging *staging, size_t *launched, struct hr_error *error) {
    struct hr_device *device = staging->device;
    const struct hr_staged_tensor *tensor = &staging->tensors[0];
    int status = HORO_OK;
    (void)pthread_mutex_lock(&device->copying);
    for (size_t at = 0; at < tensor->source_bytes && status == HORO_OK; at += tensor->piece_bytes) {
        status = send_piece(staging, at, hr_smaller(tensor->piece_bytes, tensor->source_bytes - at), error);
        *launched += status == HORO_OK;
    }
    if (status != HORO_OK) { /* the memory is in use up to what has been begun */
        struct hr_error ignored = {0};
        (void)record(staging, staging->block->copied_in, device->to_host, &ignored);
    }
    (void)pthread_mutex_unlock(&device->copying);
    return status;
}

/* Not under the stager's lock: the driver may hold one of its own while it calls on_copied. */
static int launch(struct hr_staging *staging, size_t *launched, struct hr_error *error) {
    struct hr_device_visit visit;
    HR_TRY(hr_device_enter(staging->device, &visit, error));
    int status;
    if (is_in_pieces(staging)) {
        status = send_pieces(staging, launched, error);
    } else {
        status = tell(staging, staging->from_device, error);
        *launched = status == HORO_OK;
    }
    hr_device_leave(staging->device, &visit);
    return status;
}

int hr_staging_launch(struct hr_staging *staging, void *request, struct hr_error *error) {
    struct hr_stager *stager = staging->stager;
    size_t launched = 0;
    (void)pthread_mutex_lock(&stager->lock);
    staging->request = request;
    staging->to_tell = is_in_pieces(staging) ? hr_divide_up(staging->tensors[0].source_bytes,
                                                            staging->tensors[0].piece_bytes) : 1;
    const size_t to_tell = staging->to_tell;
    hr_staging_keep(staging);
    hr_watchdog_add(stager, staging);
    stager->launched++;
    (void)pthread_mutex_unlock(&stager->lock);
    const int status = launch(staging, &launched, error);
    if (launched == to_tell) {
        return status; /* on_copied lets go of it, or has done so */
    }
    (void)pthread_mutex_lock(&stager->lock);
    staging->to_tell = launched;
    const int is_over = staging->told == launched;
    if (is_over) {
        end_telling(staging);
    }
    (void)pthread_mutex_unlock(&stager->lock);
    if (is_over) {
        hr_staging_drop(staging);
    }
    return status;
}

int hr_staging_check(struct hr_staging *staging, struct hr_error *error) {
    const struct hr_cuda *cuda = staging->device->cuda;
    if (atomic_load(&staging->is_ready)) {
        return HORO_OK;
    }
    struct hr_device_visit visit;
    HR_TRY(hr_device_enter(staging->device, &visit, error));
    const int code = cuda->event_query(staging->block->copied_in);
    hr_device_leave(staging->device, &visit);
    const int status = code == HR_CUDA_NOT_READY ? HORO_OK : hr_cuda_check(cuda, code, "the copy from the GPU", error);
    if (status != HORO_OK) {
        atomic_store(&staging->stager->is_broken, 1);
    }
    return status;
}

static int copy_to_device(const struct hr_staging *staging, size_t i, size_t at, size_t bytes, struct hr_error *error) {
    const struct hr_device *device = staging->device;
    const struct hr_cuda *cuda = device->cuda;
    const struct hr_staged_tensor *tensor = &staging->tensors[i];
    return hr_cuda_check(cuda,
                         cuda->copy_to_device(tensor->target + at,
                                              (char *)hr_staging_host(staging, i) + tensor->result_at + at, bytes,
                                              device->to_device),
                         "cuMemcpyHtoDAsync", error);
}

/* Behind copies back that have begun. */
static int record_out(struct hr_staging *staging, struct hr_error *error) {
    HR_TRY(record(staging, staging->block->copied_out, staging->device->to_device, error));
    staging->block->is_out = 1;
    return HORO_OK;
}

/* The target is free: the first values have come, behind all that was before them on the caller's stream. */
static int return_piece(struct hr_staging *staging, size_t bytes, struct hr_error *error) {
    HR_TRY(copy_to_device(staging, 0, staging->returned, bytes - staging->returned, error));
    HR_TRY(record_out(staging, error));
    staging->returned = bytes;
    return HORO_OK;
}

int hr_staging_return(struct hr_staging *staging, size_t bytes, struct hr_error *error) {
    struct hr_device_visit visit;
    HR_TRY(hr_device_enter(staging->device, &visit, error));
    const int status = return_piece(staging, bytes, error);
    hr_device_leave(staging->device, &visit);
    return status;
}

int hr_staging_is_back(const struct hr_staging *staging) {
    struct hr_error ignored = {0};
    struct hr_device_visit visit;
    if (staging->returned == 0 || hr_device_enter(staging->device, &visit, &ignored) != HORO_OK) {
        return 1;
    }
    const int code = staging->device->cuda->event_query(staging->block->copied_out);
    hr_device_leave(staging->device, &visit);
    return code != HR_CUDA_NOT_READY;
}

static int copy_all_to_device(const struct hr_staging *staging, const size_t *bytes, struct hr_error *error) {
    for (size_t i = 0; i < staging->count; i++) {
        const size_t at = i == 0 ? staging->returned : 0;
        HR_TRY(bytes[i] == at ? HORO_OK : copy_to_device(staging, i, at, bytes[i] - at, error));
    }
    return HORO_OK;
}

static int copy_out(struct hr_staging *staging, const size_t *bytes, void *stream, struct hr_error *error) {
    const struct hr_device *device = staging->device;
    const struct hr_cuda *cuda = device->cuda;
    /* targets may be in use up to where the request was submitted, also where nothing was copied in */
    HR_TRY(hr_cuda_check(cuda, cuda->stream_wait_event(device->to_device, staging->block->copied_in, 0),
                         "cuStreamWaitEvent", error));
    const int copied = copy_all_to_device(staging, bytes, error);
    const int recorded = record_out(staging, error);
    HR_TRY(copied);
    HR_TRY(recorded);
    return hr_cuda_check(cuda, cuda->stream_wait_event(stream, staging->block->copied_out, 0), "cuStreamWaitEvent",
                         error);
}

int hr_staging_copy_back(struct hr_staging *staging, const size_t *bytes, void *stream, struct hr_error *error) {
    struct hr_device_visit visit;
    HR_TRY(hr_device_enter(staging->device, &visit, error));
    int status = hr_device_refuse_capture(staging->device, stream, error);
    status = status == HORO_OK ? copy_out(staging, bytes, stream, error) : status;
    hr_device_leave(staging->device, &visit);
    return status;
}

int hr_staging_follow(const struct hr_staging *staging, void *stream, struct hr_error *error) {
    const struct hr_cuda *cuda = staging->device->cuda;
    struct hr_device_visit visit;
    HR_TRY(hr_device_enter(staging->device, &visit, error));
    int status = hr_device_refuse_capture(staging->device, stream, error);
    if (status == HORO_OK) {
        status = hr_cuda_check(cuda, cuda->stream_wait_event(stream, staging->block->copied_out, 0),
                               "cuStreamWaitEvent", error);
    }
    hr_device_leave(staging->device, &visit);
    return status;
}
