#include "device/device.h"

#include <stdlib.h>

int hr_device_enter(const struct hr_device *device, struct hr_device_visit *visit, struct hr_error *error) {
    visit->capture_mode = HR_CUDA_CAPTURE_RELAXED;
    HR_TRY(hr_cuda_check(device->cuda, device->cuda->thread_exchange_capture_mode(&visit->capture_mode),
                         "cuThreadExchangeStreamCaptureMode", error));
    const int status =
        hr_cuda_check(device->cuda, device->cuda->context_push(device->context), "cuCtxPushCurrent", error);
    if (status != HORO_OK) {
        (void)device->cuda->thread_exchange_capture_mode(&visit->capture_mode); /* back to the former one */
    }
    return status;
}

void hr_device_leave(const struct hr_device *device, const struct hr_device_visit *visit) {
    void *popped;
    int mode = visit->capture_mode;
    (void)device->cuda->context_pop(&popped);
    (void)device->cuda->thread_exchange_capture_mode(&mode);
}

int hr_device_create_stream(const struct hr_device *device, void **stream, struct hr_error *error) {
    const struct hr_cuda *cuda = device->cuda;
    int least = 0, greatest = 0;
    HR_TRY(hr_cuda_check(cuda, cuda->priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange", error));
    return hr_cuda_check(cuda, cuda->stream_create(stream, HR_CUDA_STREAM_NON_BLOCKING, greatest),
                         "cuStreamCreateWithPriority", error);
}

hr_status hr_device_refuse_capture(const struct hr_device *device, void *stream, struct hr_error *error) {
    const struct hr_cuda *cuda = device->cuda;
    int state = 0;
    HR_TRY(hr_cuda_check(cuda, cuda->stream_is_capturing(stream, &state), "cuStreamIsCapturing", error));
    return state == 0 ? HORO_OK
                      : hr_fail(error, HORO_ERR_USAGE,
                                "the current stream is being captured into a CUDA graph; horo's operations cannot be "
                                "part of a graph: call them outside of it");
}

int hr_device_open(struct hr_device *device, const struct hr_cuda *cuda, int number, struct hr_error *error) {
    *device = (struct hr_device){.cuda = cuda, .number = number};
    HR_TRY(hr_cuda_check(cuda, cuda->device_get(&device->handle, number), "cuDeviceGet", error));
    HR_TRY(hr_cuda_check(cuda, cuda->primary_context_retain(&device->context, device->handle),
                         "cuDevicePrimaryCtxRetain", error));
    struct hr_device_visit visit;
    int status = hr_device_enter(device, &visit, error);
    if (status == HORO_OK) {
        status = hr_device_create_stream(device, &device->to_host, error);
        status = status == HORO_OK ? hr_device_create_stream(device, &device->to_device, error) : status;
        hr_device_leave(device, &visit);
    }
    if (status != HORO_OK) {
        hr_device_close(device);
    }
    return status;
}

void hr_device_close(struct hr_device *device) {
    struct hr_device_visit visit;
    if (hr_device_enter(device, &visit, NULL) == HORO_OK) {
        if (device->to_host != NULL) {
            (void)device->cuda->stream_destroy(device->to_host);
        }
        if (device->to_device != NULL) {
            (void)device->cuda->stream_destroy(device->to_device);
        }
        hr_device_leave(device, &visit);
    }
    if (atomic_load(&device->held) == 0) {
        (void)device->cuda->primary_context_release(device->handle);
    }
}

/* ---- Marks ---- */

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
        status = status == HORO_OK ? hr_mark_move(made, stream, error) : status;
        hr_device_leave(device, &visit);
    }
    if (status != HORO_OK) {
        hr_mark_drop(made);
        return status;
    }
    *mark = made;
    return HORO_OK;
}

void hr_mark_keep(struct hr_mark *mark) {
    atomic_fetch_add(&mark->references, 1);
}

void hr_mark_drop(void *dropped) {
    struct hr_mark *mark = dropped;
    struct hr_device_visit visit;
    if (mark == NULL || atomic_fetch_sub(&mark->references, 1) > 1) {
        return;
    }
    if (mark->event != NULL && hr_device_enter(mark->device, &visit, NULL) == HORO_OK) {
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
