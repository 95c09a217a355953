#include "device/cuda.h"

#include <stdio.h>

static const struct hr_symbol symbols[] = {
    {"cuInit", offsetof(struct hr_cuda, init)},
    {"cuDriverGetVersion", offsetof(struct hr_cuda, driver_get_version)},
    {"cuGetErrorString", offsetof(struct hr_cuda, get_error_string)},
    {"cuDeviceGetCount", offsetof(struct hr_cuda, device_get_count)},
    {"cuDeviceGet", offsetof(struct hr_cuda, device_get)},
    {"cuDeviceGetUuid_v2", offsetof(struct hr_cuda, device_get_uuid)},
    {"cuDevicePrimaryCtxRetain", offsetof(struct hr_cuda, primary_context_retain)},
    {"cuDevicePrimaryCtxRelease_v2", offsetof(struct hr_cuda, primary_context_release)},
    {"cuCtxPushCurrent_v2", offsetof(struct hr_cuda, context_push)},
    {"cuCtxPopCurrent_v2", offsetof(struct hr_cuda, context_pop)},
    {"cuCtxGetStreamPriorityRange", offsetof(struct hr_cuda, priority_range)},
    {"cuStreamCreateWithPriority", offsetof(struct hr_cuda, stream_create)},
    {"cuStreamDestroy_v2", offsetof(struct hr_cuda, stream_destroy)},
    {"cuStreamWaitEvent", offsetof(struct hr_cuda, stream_wait_event)},
    {"cuStreamIsCapturing", offsetof(struct hr_cuda, stream_is_capturing)},
    {"cuThreadExchangeStreamCaptureMode", offsetof(struct hr_cuda, thread_exchange_capture_mode)},
    {"cuEventCreate", offsetof(struct hr_cuda, event_create)},
    {"cuEventRecord", offsetof(struct hr_cuda, event_record)},
    {"cuEventQuery", offsetof(struct hr_cuda, event_query)},
    {"cuEventDestroy_v2", offsetof(struct hr_cuda, event_destroy)},
    {"cuMemHostAlloc", offsetof(struct hr_cuda, host_alloc)},
    {"cuMemFreeHost", offsetof(struct hr_cuda, host_free)},
    {"cuMemcpyDtoHAsync_v2", offsetof(struct hr_cuda, copy_to_host)},
    {"cuMemcpyHtoDAsync_v2", offsetof(struct hr_cuda, copy_to_device)},
    {"cuLaunchHostFunc", offsetof(struct hr_cuda, launch_host_function)},
};

hr_status hr_cuda_check(const struct hr_cuda *cuda, int code, const char *function, struct hr_error *error) {
    if (code == HR_CUDA_OK) {
        return HORO_OK;
    }
    const char *text = NULL;
    if (cuda->get_error_string(code, &text) != HR_CUDA_OK || text == NULL) {
        text = "the driver has no text for it";
    }
    return hr_fail(error, HORO_ERR_RESOURCE, "%s failed with code %d: %s", function, code, text);
}

static int version_of(const void *table, int *version, struct hr_error *error) {
    const struct hr_cuda *cuda = table;
    return hr_cuda_check(cuda, cuda->driver_get_version(version), "cuDriverGetVersion", error);
}

static void write_version(int version, char *text, size_t text_bytes) {
    (void)snprintf(text, text_bytes, "%d.%d", version / 1000, version % 1000 / 10);
}

const struct hr_library_kind hr_cuda_library = {
    .what = "CUDA driver",
    .soname = "libcuda.so.1",
    .symbols = symbols,
    .symbol_count = sizeof symbols / sizeof symbols[0],
    .version_of = version_of,
    .least_version = HR_CUDA_VERSION_LEAST,
    .write_version = write_version,
};

int hr_cuda_initialize(const struct hr_cuda *cuda, int *device_count, struct hr_error *error) {
    HR_TRY(hr_cuda_check(cuda, cuda->init(0), "cuInit", error));
    return hr_cuda_check(cuda, cuda->device_get_count(device_count), "cuDeviceGetCount", error);
}
