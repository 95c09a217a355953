/*
 * The libraries for GPUs, which are found at run time: horo is built with neither their headers nor the libraries. The
 * functions that are called of them go into tables of pointers, so that nothing else depends on where they have come
 * from.
 */
#ifndef HR_DEVICE_LIBRARIES_H
#define HR_DEVICE_LIBRARIES_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "horo_gpu.h"

struct hr_library_kind;

/*
 * Takes the first of `paths` that can be used, fills in the table and *found; the library stays loaded until the
 * process ends. An empty path is the library that the process has loaded already, by whatever path; one without a
 * slash is looked for by the loader of the system. The table is written also where this fails. Blocks for as long as
 * loading takes. HORO_OK, or HORO_ERR_RESOURCE with a sentence that says of every place why it is of no use. Any
 * thread.
 */
hr_status hr_library_load(const struct hr_library_kind *kind, const char *const *paths, size_t path_count, void *table,
                          horo_library *found, struct hr_error *error);

/*
 * ---- The driver of CUDA ----
 *
 * libcuda.so.1, by its own interface: what torch's runtime is built on, and the same in every
 * version of CUDA. Types and codes are those of the driver, in the names of this file: contexts, streams and events are
 * pointers, and memory of a device is a number.
 */

enum {
    HR_CUDA_OK = 0,
    HR_CUDA_NOT_READY = 600,
    HR_CUDA_VERSION_LEAST = 11040, /* the first that tells the parts of a divided GPU (MIG) apart */
};

enum {
    HR_CUDA_STREAM_NON_BLOCKING = 1, /* takes no part in the implicit waits of the default stream */
    HR_CUDA_EVENT_DISABLE_TIMING = 2,
    HR_CUDA_HOST_PORTABLE = 1, /* pinned for all contexts */
    HR_CUDA_CAPTURE_RELAXED = 2, /* calls of this thread end nobody's capture of a graph */
};

/* Functions of the driver, by their names there. Each returns a code, HR_CUDA_OK for success. */
struct hr_cuda {
    int (*init)(unsigned flags);
    int (*driver_get_version)(int *version);
    int (*get_error_string)(int code, const char **text);
    int (*device_get_count)(int *count);
    int (*device_get)(int *device, int number);
    int (*device_get_uuid)(char *uuid, int device); /* 16 bytes; each part of a divided GPU has its own */
    int (*primary_context_retain)(void **context, int device);
    int (*primary_context_release)(int device);
    int (*context_push)(void *context);
    int (*context_pop)(void **context);
    int (*priority_range)(int *least, int *greatest);
    int (*stream_create)(void **stream, unsigned flags, int priority);
    int (*stream_destroy)(void *stream);
    int (*stream_wait_event)(void *stream, void *event, unsigned flags);
    int (*stream_is_capturing)(void *stream, int *state);
    int (*thread_exchange_capture_mode)(int *mode);
    int (*event_create)(void **event, unsigned flags);
    int (*event_record)(void *event, void *stream);
    int (*event_query)(void *event);
    int (*event_destroy)(void *event);
    int (*host_alloc)(void **data, size_t bytes, unsigned flags);
    int (*host_free)(void *data);
    int (*copy_to_host)(void *host, uint64_t device, size_t bytes, void *stream);
    int (*copy_to_device)(uint64_t device, const void *host, size_t bytes, void *stream);
    int (*launch_host_function)(void *stream, void (*function)(void *data), void *data);
};

/* Of a struct hr_cuda. To load it does not initialize the driver. */
extern const struct hr_library_kind hr_cuda_library;

/* Initializes the driver and counts devices; afterwards no forked child can use CUDA. HORO_OK or HORO_ERR_RESOURCE. */
int hr_cuda_initialize(const struct hr_cuda *cuda, int *device_count, struct hr_error *error);

/* HORO_OK, or HORO_ERR_RESOURCE with the name of the function and the driver's text for the code. */
hr_status hr_cuda_check(const struct hr_cuda *cuda, int code, const char *function, struct hr_error *error);

/* ---- NCCL (libnccl.so.2): collectives between GPUs, with its types and codes in the names of this file ---- */

enum {
    HR_NCCL_OK = 0,
    HR_NCCL_IN_PROGRESS = 7,
    HR_NCCL_VERSION_LEAST = 21801, /* that of the oldest torch that horo supports */
};

enum hr_nccl_dtype {
    HR_NCCL_INT8 = 0, HR_NCCL_UINT8 = 1, HR_NCCL_INT32 = 2, HR_NCCL_INT64 = 4, HR_NCCL_FLOAT16 = 6,
    HR_NCCL_FLOAT32 = 7, HR_NCCL_FLOAT64 = 8, HR_NCCL_BFLOAT16 = 9,
};

enum hr_nccl_op { HR_NCCL_SUM = 0, HR_NCCL_PRODUCT = 1, HR_NCCL_MAX = 2, HR_NCCL_MIN = 3 };

enum { HR_NCCL_SCALAR_ON_HOST = 1 };

/* ncclUniqueId: the rendezvous of a communicator, which all its ranks have from one of them. */
struct hr_nccl_id {
    char bytes[128];
};

/* As of 2.18.1. Later versions have more fields behind these, and take those that `size` leaves out as not set. */
struct hr_nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking;
    int cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
};

/* Functions of NCCL, by their names there without "nccl". Each returns a code, HR_NCCL_OK for success. */
struct hr_nccl {
    int (*get_version)(int *version);
    const char *(*get_error_string)(int code);
    const char *(*get_last_error)(const void *comm);
    int (*get_unique_id)(struct hr_nccl_id *id);
    int (*comm_init_rank_config)(void **comm, int size, struct hr_nccl_id id, int rank, struct hr_nccl_config *config);
    int (*comm_get_async_error)(void *comm, int *code);
    int (*comm_finalize)(void *comm);
    int (*comm_destroy)(void *comm);
    int (*comm_abort)(void *comm);
    int (*group_start)(void);
    int (*group_end)(void);
    int (*all_reduce)(const void *input, void *output, size_t count, int dtype, int op, void *comm, void *stream);
    int (*broadcast)(const void *input, void *output, size_t count, int dtype, int root, void *comm, void *stream);
    int (*reduce)(const void *input, void *output, size_t count, int dtype, int op, int root, void *comm, void *stream);
    int (*reduce_scatter)(const void *input, void *output, size_t count_each, int dtype, int op, void *comm,
                          void *stream);
    int (*red_op_create_pre_mul_sum)(int *op, const void *scalar, int dtype, int residence, void *comm);
    int (*red_op_destroy)(int op, void *comm);
};

/* Of a struct hr_nccl. To load it touches no GPU. */
extern const struct hr_library_kind hr_nccl_library;

/*
 * HORO_OK for success and for what is in progress; else HORO_ERR_RESOURCE with the name of the function, NCCL's text
 * for the code, and what it said last of `comm`, which may be NULL.
 */
hr_status hr_nccl_check(const struct hr_nccl *nccl, int code, const char *function, const void *comm,
                        struct hr_error *error);

#endif
