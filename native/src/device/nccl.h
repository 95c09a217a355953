/* NCCL (libnccl.so.2): collectives between GPUs. Types and codes are those of NCCL, in the names of this file. */
#ifndef HR_DEVICE_NCCL_H
#define HR_DEVICE_NCCL_H

#include "device/library.h"

enum {
    HR_NCCL_OK = 0,
    HR_NCCL_VERSION_LEAST = 21801, /* what the oldest torch that horo supports comes with */
};

/* Functions of NCCL, by their names there without "nccl". Each returns a code, HR_NCCL_OK for success. */
struct hr_nccl {
    int (*get_version)(int *version);
    const char *(*get_error_string)(int code);
};

/* As hr_library_load. Touches no GPU. */
int hr_nccl_load(struct hr_nccl *nccl, const char *const *paths, size_t path_count, horo_library *found,
                 struct hr_error *error);

#endif
