#include "device/mark.h"

#include <stdlib.h>

int hr_mark_move(struct hr_mark *mark, void *stream, struct hr_error *error) {
    const struct hr_cuda *cuda = mark->device->cuda;
    return hr_cuda_check(cuda, cuda->event_record(mark->event, stream), "cuEventRecord", error);
}

hr_status hr_mark_create(struct hr_device *device, void *stream, struct hr_mark **mark, struct hr_error *error) {
    const struct hr_cuda *cuda = device->cuda;
    struct hr_mark *made = malloc(sizeof *made);
    struct hr_device_visit visit;
    if (made == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for tensors on a GPU");
    }
    *made = (struct hr_mark){.device = device};
    atomic_init(&made->references, 1);
    int status = hr_device_enter(device, &visit, error);
    if (status == HORO_OK) {
        status = hr_device_refuse_capture(device, stream, error);
        if (status == HORO_OK) {
            status = hr_cuda_check(cuda, cuda->event_create(&made->event, HR_CUDA_EVENT_DISABLE_TIMING),
                                   "cuEventCreate", error);
        }
        if (status == HORO_OK && (status = hr_mark_move(made, stream, error)) != HORO_OK) {
            (void)cuda->event_destroy(made->event);
        }
        hr_device_leave(device, &visit);
    }
    if (status != HORO_OK) {
        free(made);
        return status;
    }
    *mark = made;
    return HORO_OK;
}

void hr_mark_keep(struct hr_mark *mark) {
    atomic_fetch_add(&mark->references, 1);
}

void hr_mark_drop(struct hr_mark *mark) {
    struct hr_device_visit visit;
    if (mark == NULL || atomic_fetch_sub(&mark->references, 1) > 1) {
        return;
    }
    if (hr_device_enter(mark->device, &visit, NULL) == HORO_OK) {
        (void)mark->device->cuda->event_destroy(mark->event);
        hr_device_leave(mark->device, &visit);
    }
    free(mark);
}

int hr_mark_await(const struct hr_mark *mark, void *stream, struct hr_error *error) {
    const struct hr_cuda *cuda = mark->device->cuda;
    struct hr_device_visit visit;
    HR_TRY(hr_device_enter(mark->device, &visit, error));
    int status = hr_device_refuse_capture(mark->device, stream, error);
    if (status == HORO_OK) {
        status = hr_cuda_check(cuda, cuda->stream_wait_event(stream, mark->event, 0), "cuStreamWaitEvent", error);
    }
    hr_device_leave(mark->device, &visit);
    return status;
}

int hr_mark_is_reached(const struct hr_mark *mark) {
    struct hr_device_visit visit;
    if (hr_device_enter(mark->device, &visit, NULL) != HORO_OK) {
        return 1;
    }
    const int code = mark->device->cuda->event_query(mark->event);
    hr_device_leave(mark->device, &visit);
    return code != HR_CUDA_NOT_READY;
}
