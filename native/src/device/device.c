#include "device/device.h"

static int relax(const struct hr_cuda *cuda, struct hr_device_visit *visit, struct hr_error *error) {
    visit->capture_mode = HR_CUDA_CAPTURE_RELAXED;
    return hr_cuda_check(cuda, cuda->thread_exchange_capture_mode(&visit->capture_mode),
                         "cuThreadExchangeStreamCaptureMode", error);
}

static void restore(const struct hr_cuda *cuda, const struct hr_device_visit *visit) {
    int mode = visit->capture_mode;
    (void)cuda->thread_exchange_capture_mode(&mode);
}

int hr_device_enter(const struct hr_device *device, struct hr_device_visit *visit, struct hr_error *error) {
    HR_TRY(relax(device->cuda, visit, error));
    const int status =
        hr_cuda_check(device->cuda, device->cuda->context_push(device->context), "cuCtxPushCurrent", error);
    if (status != HORO_OK) {
        restore(device->cuda, visit);
    }
    return status;
}

void hr_device_leave(const struct hr_device *device, const struct hr_device_visit *visit) {
    void *popped;
    (void)device->cuda->context_pop(&popped);
    restore(device->cuda, visit);
}

int hr_device_create_stream(const struct hr_device *device, void **stream, struct hr_error *error) {
    const struct hr_cuda *cuda = device->cuda;
    int least = 0;
    int greatest = 0;
    HR_TRY(hr_cuda_check(cuda, cuda->priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange", error));
    return hr_cuda_check(cuda, cuda->stream_create(stream, HR_CUDA_STREAM_NON_BLOCKING, greatest),
                         "cuStreamCreateWithPriority", error);
}

int hr_device_refuse_capture(const struct hr_device *device, void *stream, struct hr_error *error) {
    const struct hr_cuda *cuda = device->cuda;
    int state = 0;
    HR_TRY(hr_cuda_check(cuda, cuda->stream_is_capturing(stream, &state), "cuStreamIsCapturing", error));
    return state == 0 ? HORO_OK
                      : hr_fail(error, HORO_ERR_USAGE,
                                "the current stream is being captured into a CUDA graph; horo's operations cannot be "
                                "part of a graph: call them outside of it");
}

int hr_device_open(struct hr_device *device, const struct hr_cuda *cuda, int number, struct hr_error *error) {
    *device = (struct hr_device){.cuda = cuda, .number = number, .copying = PTHREAD_MUTEX_INITIALIZER};
    HR_TRY(hr_cuda_check(cuda, cuda->device_get(&device->handle, number), "cuDeviceGet", error));
    HR_TRY(hr_cuda_check(cuda, cuda->primary_context_retain(&device->context, device->handle),
                         "cuDevicePrimaryCtxRetain", error));
    struct hr_device_visit visit;
    int status = hr_device_enter(device, &visit, error);
    if (status == HORO_OK) {
        status = hr_device_create_stream(device, &device->to_host, error);
        status = status == HORO_OK ? hr_device_create_stream(device, &device->to_device, error) : status;
        status = status == HORO_OK ? hr_device_create_stream(device, &device->to_tell, error) : status;
        hr_device_leave(device, &visit);
    }
    if (status != HORO_OK) {
        hr_device_close(device);
    }
    return status;
}

void hr_device_close(struct hr_device *device) {
    struct hr_error ignored = {0};
    struct hr_device_visit visit;
    if (hr_device_enter(device, &visit, &ignored) == HORO_OK) {
        if (device->to_host != NULL) {
            (void)device->cuda->stream_destroy(device->to_host);
        }
        if (device->to_device != NULL) {
            (void)device->cuda->stream_destroy(device->to_device);
        }
        if (device->to_tell != NULL) {
            (void)device->cuda->stream_destroy(device->to_tell);
        }
        if (device->behind_marks != NULL) {
            (void)device->cuda->stream_destroy(device->behind_marks);
        }
        hr_device_leave(device, &visit);
    }
    (void)pthread_mutex_destroy(&device->copying);
    if (!atomic_load(&device->is_kept)) {
        (void)device->cuda->primary_context_release(device->handle);
    }
}
