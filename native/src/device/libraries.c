#include "device/libraries.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

/* A function, and the offset of its pointer in the table. */
struct hr_symbol {
    const char *name;
    size_t offset;
};

struct hr_library_kind {
    const char *what;   /* "NCCL", for messages */
    const char *soname; /* under this name it may be in the process already */
    const struct hr_symbol *symbols; /* all that a table needs */
    size_t symbol_count;
    /* Its version by its own numbering, asked through a table that is full; else a status with a sentence. */
    int (*version_of)(const void *table, int *version, struct hr_error *error);
    int least_version;
    int version_units[3]; /* of its numbers as people write them: {10000, 100, 1} makes "2.23.4" of 22304; 0: none */
};

static void write_version(const struct hr_library_kind *kind, int version, char *text, size_t text_bytes) {
    const int *units = kind->version_units;
    char last[16] = "";
    if (units[2] != 0) {
        (void)snprintf(last, sizeof last, ".%d", version % units[1] / units[2]);
    }
    (void)snprintf(text, text_bytes, "%d.%d%s", version / units[0], version % units[0] / units[1], last);
}

static hr_status check(const struct hr_library_kind *kind, void *library, const char *name, void *table,
                       horo_library *found, struct hr_error *error) {
    struct link_map *map = NULL;
    const char *path = dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map->l_name[0] != '\0' ? map->l_name : name;
    char version_text[24], least_text[24];
    int version = 0;
    for (size_t i = 0; i < kind->symbol_count; i++) {
        void *address = dlsym(library, kind->symbols[i].name);
        if (address == NULL) {
            return hr_fail(error, HORO_ERR_RESOURCE, "%s lacks %s", path, kind->symbols[i].name);
        }
        /* a pointer to data and one to a function have the same form where there is dlsym */
        memcpy((char *)table + kind->symbols[i].offset, &address, sizeof address);
    }
    struct hr_error refusal = {0};
    if (kind->version_of(table, &version, &refusal) != HORO_OK) {
        return hr_fail(error, HORO_ERR_RESOURCE, "%s %s", path, refusal.text);
    }
    write_version(kind, version, version_text, sizeof version_text);
    if (version < kind->least_version) {
        write_version(kind, kind->least_version, least_text, sizeof least_text);
        return hr_fail(error, HORO_ERR_RESOURCE, "%s is %s %s; horo needs %s", path, kind->what, version_text,
                       least_text);
    }
    *found = (horo_library){.version = version, .device_count = -1};
    (void)snprintf(found->name, sizeof found->name, "%s %s", kind->what, version_text);
    (void)snprintf(found->path, sizeof found->path, "%s", path);
    return HORO_OK;
}

hr_status hr_library_load(const struct hr_library_kind *kind, const char *const *paths, size_t path_count, void *table,
                          horo_library *found, struct hr_error *error) {
    char reasons[HORO_MESSAGE_MAX]; /* why each place is of no use; cut where it is full */
    size_t used = 0;
    for (size_t i = 0; i < path_count; i++) {
        const int is_loaded = paths[i][0] == '\0';
        const char *name = is_loaded ? kind->soname : paths[i];
        /* a driver that has been asked anything may have threads, and must not go away under them: NODELETE */
        void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE | (is_loaded ? RTLD_NOLOAD : 0));
        const char *reason = library == NULL ? dlerror() : NULL;
        struct hr_error refusal = {0};
        if (library != NULL) {
            const int status = check(kind, library, name, table, found, &refusal);
            (void)dlclose(library); /* it stays */
            if (status == HORO_OK) {
                return HORO_OK;
            }
            reason = refusal.text;
        }
        if ((library != NULL || !is_loaded) && used < sizeof reasons) {
            used += (size_t)snprintf(reasons + used, sizeof reasons - used, "%s%s", used == 0 ? "" : "; ",
                                     reason != NULL ? reason : name);
        }
    }
    return hr_fail(error, HORO_ERR_RESOURCE, "no usable %s: %s", kind->what,
                   used == 0 ? "there is no place to look for it" : reasons);
}

/* ---- CUDA ---- */

static const struct hr_symbol cuda_symbols[] = {
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

static int cuda_version_of(const void *table, int *version, struct hr_error *error) {
    const struct hr_cuda *cuda = table;
    return hr_cuda_check(cuda, cuda->driver_get_version(version), "cuDriverGetVersion", error);
}

const struct hr_library_kind hr_cuda_library = {
    .what = "CUDA driver", .soname = "libcuda.so.1",
    .symbols = cuda_symbols, .symbol_count = sizeof cuda_symbols / sizeof cuda_symbols[0],
    .version_of = cuda_version_of, .least_version = HR_CUDA_VERSION_LEAST, .version_units = {1000, 10}};

int hr_cuda_initialize(const struct hr_cuda *cuda, int *device_count, struct hr_error *error) {
    HR_TRY(hr_cuda_check(cuda, cuda->init(0), "cuInit", error));
    return hr_cuda_check(cuda, cuda->device_get_count(device_count), "cuDeviceGetCount", error);
}

/* ---- NCCL ---- */

static const struct hr_symbol nccl_symbols[] = {
    {"ncclGetVersion", offsetof(struct hr_nccl, get_version)},
    {"ncclGetErrorString", offsetof(struct hr_nccl, get_error_string)},
    {"ncclGetLastError", offsetof(struct hr_nccl, get_last_error)},
    {"ncclGetUniqueId", offsetof(struct hr_nccl, get_unique_id)},
    {"ncclCommInitRankConfig", offsetof(struct hr_nccl, comm_init_rank_config)},
    {"ncclCommGetAsyncError", offsetof(struct hr_nccl, comm_get_async_error)},
    {"ncclCommFinalize", offsetof(struct hr_nccl, comm_finalize)},
    {"ncclCommDestroy", offsetof(struct hr_nccl, comm_destroy)},
    {"ncclCommAbort", offsetof(struct hr_nccl, comm_abort)},
    {"ncclGroupStart", offsetof(struct hr_nccl, group_start)},
    {"ncclGroupEnd", offsetof(struct hr_nccl, group_end)},
    {"ncclAllReduce", offsetof(struct hr_nccl, all_reduce)},
    {"ncclBroadcast", offsetof(struct hr_nccl, broadcast)},
    {"ncclReduce", offsetof(struct hr_nccl, reduce)},
    {"ncclReduceScatter", offsetof(struct hr_nccl, reduce_scatter)},
    {"ncclRedOpCreatePreMulSum", offsetof(struct hr_nccl, red_op_create_pre_mul_sum)},
    {"ncclRedOpDestroy", offsetof(struct hr_nccl, red_op_destroy)},
};

static hr_status nccl_version_of(const void *table, int *version, struct hr_error *error) {
    const struct hr_nccl *nccl = table;
    return hr_nccl_check(nccl, nccl->get_version(version), "ncclGetVersion", NULL, error);
}

const struct hr_library_kind hr_nccl_library = {
    .what = "NCCL", .soname = "libnccl.so.2",
    .symbols = nccl_symbols, .symbol_count = sizeof nccl_symbols / sizeof nccl_symbols[0],
    .version_of = nccl_version_of, .least_version = HR_NCCL_VERSION_LEAST, .version_units = {10000, 100, 1}};

hr_status hr_nccl_check(const struct hr_nccl *nccl, int code, const char *function, const void *comm,
                        struct hr_error *error) {
    if (code == HR_NCCL_OK || code == HR_NCCL_IN_PROGRESS) {
        return HORO_OK;
    }
    const char *last = nccl->get_last_error(comm);
    const int has_more = last != NULL && last[0] != '\0';
    return hr_fail(error, HORO_ERR_RESOURCE, "%s failed with code %d: %s%s%.300s%s", function, code,
                   nccl->get_error_string(code), has_more ? " (" : "", has_more ? last : "", has_more ? ")" : "");
}

/* ---- For callers that have no context ---- */

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
