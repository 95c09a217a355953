#include "device/nccl.h"

#include <stdio.h>

static const struct hr_symbol symbols[] = {
    {"ncclGetVersion", offsetof(struct hr_nccl, get_version)},
    {"ncclGetErrorString", offsetof(struct hr_nccl, get_error_string)},
};

static int version_of(const void *table, int *version, struct hr_error *error) {
    const struct hr_nccl *nccl = table;
    const int code = nccl->get_version(version);
    return code == HR_NCCL_OK ? HORO_OK
                              : hr_fail(error, HORO_ERR_RESOURCE, "ncclGetVersion failed with code %d: %s", code,
                                        nccl->get_error_string(code));
}

static void write_version(int version, char *text, size_t text_bytes) {
    (void)snprintf(text, text_bytes, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
}

static const struct hr_library_kind kind = {
    .what = "NCCL",
    .soname = "libnccl.so.2",
    .symbols = symbols,
    .symbol_count = sizeof symbols / sizeof symbols[0],
    .version_of = version_of,
    .least_version = HR_NCCL_VERSION_LEAST,
    .write_version = write_version,
};

int hr_nccl_load(struct hr_nccl *nccl, const char *const *paths, size_t path_count, horo_library *found,
                 struct hr_error *error) {
    return hr_library_load(&kind, paths, path_count, nccl, found, error);
}
