/* The libraries for GPUs that there are, for callers that have no context. */
#include <stdio.h>

#include "device/cuda.h"
#include "device/nccl.h"

static hr_status find(int kind, const char *const *paths, int32_t path_count, int initializes, horo_library *found,
                      struct hr_error *error) {
    struct hr_cuda cuda;
    struct hr_nccl nccl;
    horo_library library;
    struct hr_error refusal = {0};
    if (path_count < 0) {
        return hr_fail(error, HORO_ERR_USAGE, "a library cannot be looked for at %d places", path_count);
    }
    switch (kind) {
    case HORO_LIBRARY_CUDA:
        HR_TRY(hr_library_load(&hr_cuda_library, paths, (size_t)path_count, &cuda, &library, error));
        if (initializes && hr_cuda_initialize(&cuda, &library.device_count, &refusal) != HORO_OK) {
            return hr_fail(error, HORO_ERR_RESOURCE, "%s (%s) cannot be used: %s", library.name, library.path,
                           refusal.text);
        }
        *found = library;
        return HORO_OK;
    case HORO_LIBRARY_NCCL:
        return hr_library_load(&hr_nccl_library, paths, (size_t)path_count, &nccl, found, error);
    default: return hr_fail(error, HORO_ERR_USAGE, "%d is no library that horo knows", kind);
    }
}

HORO_API int horo_find_library(int kind, const char *const *paths, int32_t path_count, int32_t initializes,
                               horo_library *found, char *error, size_t error_bytes) {
    struct hr_error failure = {0};
    const int status = find(kind, paths, path_count, initializes, found, &failure);
    (void)snprintf(error, error_bytes, "%s", failure.text);
    return status;
}
