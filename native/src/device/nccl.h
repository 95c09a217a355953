/* NCCL (libnccl.so.2): collectives between GPUs. Types and codes are those of NCCL, in the names of this file. */
#ifndef HR_DEVICE_NCCL_H
#define HR_DEVICE_NCCL_H

#include "device/library.h"

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
    int (*reduce)(const void *input, void *output, size_t count, int dtype, int op, int root, void *comm,
                  void *stream);
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
