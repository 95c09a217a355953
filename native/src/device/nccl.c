#include "device/nccl.h"

#include <stdio.h>

static const struct hr_symbol symbols[] = {
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

static hr_status version_of(const void *table, int *version, struct hr_error *error) {
    const struct hr_nccl *nccl = table;
    const int code = nccl->get_version(version);
    return code == HR_NCCL_OK ? HORO_OK
                              : hr_fail(error, HORO_ERR_RESOURCE, "ncclGetVersion failed with code %d: %s", code,
                                        nccl->get_error_string(code));
}

static void write_version(int version, char *text, size_t text_bytes) {
    (void)snprintf(text, text_bytes, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
}

const struct hr_library_kind hr_nccl_library = {
    .what = "NCCL",
    .soname = "libnccl.so.2",
    .symbols = symbols,
    .symbol_count = sizeof symbols / sizeof symbols[0],
    .version_of = version_of,
    .least_version = HR_NCCL_VERSION_LEAST,
    .write_version = write_version,
};

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
