/* The part of the core's interface that has to do with GPUs; see horo.h. */
#ifndef HORO_GPU_H
#define HORO_GPU_H

/* cffi: skip */
#include "horo.h"
/* cffi: end */

/* Besides enum horo_submit_flags; horo sets it by itself: the tensors stay on GPUs, since NCCL does it on all ranks. */
enum { HORO_SUBMIT_ON_GPU = 256 };

/* Libraries for GPUs, which horo finds where it runs: none is needed to build it. */
enum horo_library_kind {
    HORO_LIBRARY_CUDA = 0, /* the driver, libcuda.so.1 */
    HORO_LIBRARY_NCCL = 1, /* libnccl.so.2 */
};

typedef struct {
    int32_t version;      /* as the library numbers itself: 12040 is CUDA 12.4, 22304 is NCCL 2.23.4 */
    int32_t device_count; /* of a driver that has been initialized: devices that this process sees; else -1 */
    char name[32];        /* "NCCL 2.23.4" */
    char path[1024];      /* of the file, cut to fit */
} horo_library;

/*
 * Finds a library (enum horo_library_kind): the first of `paths` that can be used, since it has all functions that
 * horo calls, and is new enough. An empty path is the one that is loaded in this process already. It stays loaded until
 * the process ends.
 * `initializes`: the driver is initialized, too; children that this process forks cannot use CUDA then. Blocks for as
 * long as that takes. HORO_OK, or HORO_ERR_RESOURCE with a sentence that says of every place why it is of no use.
 */
HORO_API int horo_find_library(int kind, const char *const *paths, int32_t path_count, int32_t initializes,
                               horo_library *found, char *error, size_t error_bytes);

/*
 * Lets requests have tensors in the memory of GPUs: loads the CUDA driver as horo_find_library does, and initializes
 * it. Does nothing where that has been done. Such a request is announced when its values have been copied to pinned
 * host memory, or the first of them for a large allreduce, and from then on is as others. HORO_OK, or
 * HORO_ERR_RESOURCE with a sentence.
 */
HORO_API int horo_use_cuda(horo_context *context, const char *const *paths, int32_t path_count, char *error,
                           size_t error_bytes);

/* A GPU of this process that NCCL is to use. */
typedef struct {
    int32_t nccl_version;
    char uuid[16]; /* of the GPU: no two ranks of a communicator may have one */
} horo_gpu;

enum { HORO_NCCL_ID_BYTES = 128 };

/*
 * NCCL in four steps, of which the first is once in a context, behind horo_use_cuda, and the others are once for all
 * ranks and once for each team, in front of their first request. Each of them may fail on one rank alone: callers tell
 * one another between them, so that all ranks go on or none. One thread at a time.
 *
 * 1. Loads NCCL, and opens the device on which all communicators of this rank are. Connects nothing.
 * 2. Where the ranks of a communicator meet: one of them makes the id, and gives it to the others. HORO_NCCL_ID_BYTES.
 * 3. Begins to connect `size` ranks, of which this one is number `rank`. What was being connected before is given up.
 * 4. Waits until they are connected, up to timeout_ms: HORO_IN_PROGRESS until then. What is connected is that of all
 *    ranks, at once, or, if not is_world, of the team that horo_add_team adds next.
 *
 * Where all ranks of a team have come through, NCCL does what it can of their requests with tensors on GPUs: allreduce,
 * broadcast and reduce-scatter of its dtypes, as they are, also averages and scaled sums of floats. Which requests
 * these are follows from the operation, its factors and its dtypes, so it is the same on all ranks; the others are
 * staged, as after horo_use_cuda alone. A request that is NCCL's is done once it is on a stream of the GPU;
 * horo_copy_back makes the caller's stream wait for its end. It is refused (HORO_ERR_USAGE) if its tensors are on
 * another device, and fails where another rank has its tensors in host memory. No rank of a job of several may join.
 * HORO_OK, or HORO_ERR_USAGE or HORO_ERR_RESOURCE with a sentence.
 */
HORO_API int horo_use_nccl(horo_context *context, const char *const *paths, int32_t path_count, int32_t device,
                           horo_gpu *found, char *error, size_t error_bytes);
HORO_API int horo_nccl_id(horo_context *context, char *id, char *error, size_t error_bytes);
HORO_API int horo_connect_nccl(horo_context *context, const char *id, int32_t size, int32_t rank, char *error,
                               size_t error_bytes);
HORO_API int horo_await_nccl(horo_context *context, int32_t is_world, int32_t timeout_ms, char *error,
                             size_t error_bytes);
/*
 * Begins to copy the results of a request that is done well to their outputs on the GPU, and makes `stream` of that GPU
 * wait for them. Before horo_release; a second call only makes its stream wait, too. Does not wait itself. Those of an
 * allgather or alltoall are horo_take_result's. HORO_OK, or HORO_ERR_USAGE or HORO_ERR_RESOURCE with a sentence.
 */
HORO_API int horo_copy_back(horo_context *context, int64_t handle, uint64_t stream, char *error, size_t error_bytes);

#endif
