#include "device/staging.h"

#include <stdlib.h>
#include <string.h>

#include "base/cut.h"

static int wait_for(const struct hr_cuda *cuda, void *stream, void *event, struct hr_error *error) {
    return hr_cuda_check(cuda, cuda->stream_wait_event(stream, event, 0), "cuStreamWaitEvent", error);
}

/* The event of the block behind copies that use it and have begun, whether all have or not. */
static int record(struct hr_staging *staging, void *stream, struct hr_error *error) {
    const struct hr_cuda *cuda = staging->block->device->cuda;
    const int status = hr_cuda_check(cuda, cuda->event_record(staging->block->copied, stream), "cuEventRecord", error);
    staging->is_lost |= status != HORO_OK;
    return status;
}

/* ---- To the host ---- */

static hr_status begin(struct hr_stager *stager, struct hr_device *device, struct hr_staging *staging, void *stream,
                       struct hr_error *error) {
    const struct hr_cuda *cuda = device->cuda;
    size_t bytes = 0;
    for (size_t i = 0; i < staging->count; i++) {
        staging->tensors[i].offset = hr_place(&bytes, staging->tensors[i].room, HR_STAGED_ALIGNMENT);
    }
    HR_TRY(hr_device_refuse_capture(device, stream, error));
    HR_TRY(hr_stager_take_block(stager, device, bytes == 0 ? HR_STAGED_ALIGNMENT : bytes, &staging->block, error));
    staging->from_device = device->to_host;
    /* it serves for all: a stream that has been told to wait for an event waits for its record of that time */
    void *copied = staging->block->copied;
    HR_TRY(hr_cuda_check(cuda, cuda->event_record(copied, stream), "cuEventRecord", error));
    HR_TRY(wait_for(cuda, staging->from_device, copied, error));
    int status = HORO_OK;
    for (size_t i = 0; i < staging->count && status == HORO_OK; i++) {
        const struct hr_staged_tensor *tensor = &staging->tensors[i];
        if (tensor->source_bytes > 0) {
            const int code = cuda->copy_to_host(hr_staging_host(staging, i), tensor->source, tensor->source_bytes,
                                                staging->from_device);
            status = hr_cuda_check(cuda, code, "cuMemcpyDtoHAsync", error);
        }
    }
    const int recorded = record(staging, staging->from_device, error);
    return status != HORO_OK ? status : recorded;
}

hr_status hr_staging_create(struct hr_stager *stager, int device, void *stream, struct hr_staged_tensor *tensors,
                            size_t count, struct hr_staging **staging, struct hr_error *error) {
    struct hr_device *opened;
    HR_TRY(hr_stager_device(stager, device, &opened, error));
    struct hr_staging *made = calloc(1, sizeof *made + count * sizeof *tensors);
    if (made == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for tensors on a GPU");
    }
    made->count = count;
    memcpy(made->tensors, tensors, count * sizeof *tensors);
    struct hr_device_visit visit;
    int status = hr_device_enter(opened, &visit, error);
    if (status == HORO_OK) {
        status = begin(stager, opened, made, stream, error);
        hr_device_leave(opened, &visit);
    }
    if (status != HORO_OK) {
        hr_staging_drop(made);
        return status;
    }
    *staging = made;
    return HORO_OK;
}

void hr_staging_drop(void *dropped) {
    const struct hr_staging *staging = dropped;
    if (staging != NULL && staging->block != NULL && !staging->is_lost) {
        hr_stager_give_block(staging->block);
    }
    free(dropped);
}

/* ---- Back to the device ---- */

static hr_status copy_out(struct hr_staging *staging, const size_t *bytes, struct hr_error *error) {
    const struct hr_device *device = staging->block->device;
    /* targets may be in use up to where the request was submitted, also where nothing was copied in */
    HR_TRY(wait_for(device->cuda, device->to_device, staging->block->copied, error));
    int status = HORO_OK;
    for (size_t i = 0; i < staging->count && status == HORO_OK; i++) {
        const struct hr_staged_tensor *tensor = &staging->tensors[i];
        if (bytes[i] > 0) {
            const char *result = (char *)hr_staging_host(staging, i) + tensor->result_at;
            const int code = device->cuda->copy_to_device(tensor->target, result, bytes[i], device->to_device);
            status = hr_cuda_check(device->cuda, code, "cuMemcpyHtoDAsync", error);
        }
    }
    const int recorded = record(staging, device->to_device, error);
    return status != HORO_OK ? status : recorded;
}

int hr_staging_copy_back(struct hr_staging *staging, const size_t *bytes, void *stream, struct hr_error *error) {
    const struct hr_device *device = staging->block->device;
    struct hr_device_visit visit;
    HR_TRY(hr_device_enter(device, &visit, error));
    int status = hr_device_refuse_capture(device, stream, error);
    status = status != HORO_OK || bytes == NULL ? status : copy_out(staging, bytes, error);
    status = status != HORO_OK ? status : wait_for(device->cuda, stream, staging->block->copied, error);
    hr_device_leave(device, &visit);
    return status;
}
