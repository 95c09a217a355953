/* The part of the core's interface that has to do with GPUs; see horo.h. */
#ifndef HORO_GPU_H
#define HORO_GPU_H

/* cffi: skip */
#include "horo.h"
/* cffi: end */

/* Besides enum horo_submit_flags; horo sets it by itself: the tensors are on GPUs, and NCCL does it on all ranks. */
enum { HORO_SUBMIT_BY_NCCL = 256 };

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

/*
 * Lets NCCL do what it can of requests of all ranks with tensors on GPUs: allreduce, broadcast and reduce-scatter of
 * its dtypes, as they are, also averages and scaled sums of floats. Behind horo_use_cuda, on all ranks or on none; does
 * nothing where that has been done. No rank may join then. The first such request of each rank chooses its GPU. The
 * first one that all ranks have submitted makes them tell one another what they have: where one of them cannot use
 * NCCL, these requests are as after horo_use_cuda alone, and rank 0 logs why. Else a request is done once it is on a
 * stream of the GPU; horo_copy_back makes the caller's stream wait for its end. Either way it fails where another rank
 * has its tensors elsewhere. HORO_OK, or HORO_ERR_USAGE or HORO_ERR_RESOURCE with a sentence; a lack of NCCL is none.
 */
HORO_API int horo_use_nccl(horo_context *context, const char *const *paths, int32_t path_count, char *error,
                           size_t error_bytes);
/*
 * Begins to copy the results of a request that is done well to their outputs on the GPU, and makes `stream` of that GPU
 * wait for them. Before horo_release; a second call only makes its stream wait, too. Does not wait itself. Those of an
 * allgather or alltoall are horo_take_result's. HORO_OK, or HORO_ERR_USAGE or HORO_ERR_RESOURCE with a sentence.
 */
HORO_API int horo_copy_back(horo_context *context, int64_t handle, uint64_t stream, char *error, size_t error_bytes);

#endif
