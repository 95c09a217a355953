/*
 * Requests with tensors on GPUs. NCCL does those that it can where its ranks have been connected, which is before the
 * team's first request (docs/adr/0044-nccl-does-what-all-ranks-agree-on.md); the others are staged: host memory has
 * their values meanwhile. Which of the two it is follows from the call alone, so it is the same on all ranks.
 */
#ifndef HR_ENGINE_GPU_H
#define HR_ENGINE_GPU_H

#include "engine/engine.h"
#include "horo_gpu.h"

/* ---- staged.c ---- */

/* As horo_use_cuda, and horo_copy_back. */
int hr_engine_use_cuda(struct hr_engine *engine, const char *const *paths, size_t path_count, struct hr_error *error);
int hr_engine_copy_back(struct hr_engine *engine, int64_t handle, uint64_t stream, struct hr_error *error);
/* As hr_requests_submit, of a call with tensors on a GPU: they stay there, or are on their way to the host. */
hr_status hr_gpu_submit(struct hr_engine *engine, const horo_request *call, int64_t *handle, struct hr_error *error);
/* After all requests are gone. */
void hr_engine_end_cuda(struct hr_engine *engine);

/* ---- nccl.c ---- */

/*
 * Before submission of one with tensors on a GPU, whose team's ranks NCCL has connected: it is NCCL's, behind a mark.
 * Where NCCL cannot do it, nothing is done. HORO_OK, or a status with its reason. Without the lock.
 */
int hr_gpu_place(struct hr_engine *engine, struct hr_request *request, struct hr_error *reason);
/* As horo_use_nccl, horo_nccl_id, horo_connect_nccl and horo_await_nccl. */
int hr_engine_use_nccl(struct hr_engine *engine, const char *const *paths, size_t path_count, int device,
                       horo_gpu *found, struct hr_error *error);
int hr_engine_nccl_id(struct hr_engine *engine, void *id, struct hr_error *error);
int hr_engine_connect_nccl(struct hr_engine *engine, const void *id, int size, int rank, struct hr_error *error);
int hr_engine_await_nccl(struct hr_engine *engine, int is_world, int timeout_ms, struct hr_error *error);
/* A lane has been opened (by the driver, or the world's) and has what this rank has connected; or it is about to go. */
void hr_gpu_attach(struct hr_engine *engine, struct hr_lane *lane);
void hr_gpu_detach(struct hr_engine *engine, const struct hr_lane *lane);
/* Driver: the group has failed: whether the GPU has let go of all memory of requests. */
int hr_gpu_is_quiet(struct hr_engine *engine);
/* Ends NCCL, when nobody drives any more: in order, unless the group has failed. */
void hr_gpu_end(struct hr_engine *engine, int has_failed);

/* ---- nccl_order.c ---- */

/*
 * The cause for which the batch of a lane waits. GPU: that of this rank, which shows on no other. BESIDE: it is not
 * NCCL's, and kernels of NCCL run here, which another rank may wait for. Driver.
 */
enum hr_gpu_wait { HR_GPU_NOTHING, HR_GPU_OTHER_RANKS, HR_GPU_OTHER_LANES, HR_GPU_ITSELF, HR_GPU_BESIDE };
enum hr_gpu_wait hr_gpu_awaits(const struct hr_lane *lane);

#endif
