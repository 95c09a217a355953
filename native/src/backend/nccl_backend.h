/*
 * Whole collectives by NCCL, on tensors in the memory of GPUs: a batch becomes one group of calls on the tensors
 * themselves. Its task is done when all of them are on the communicator's stream, not when they have ended there: what
 * comes behind orders itself by events. It is no struct hr_backend: its batches wait for their turn first, and that is
 * the engine's (nccl_turn.c).
 */
#ifndef HR_BACKEND_NCCL_BACKEND_H
#define HR_BACKEND_NCCL_BACKEND_H

#include "backend/backend.h"
#include "device/nccl_comm.h"

/*
 * Whether NCCL can do the request as horo means it, wherever its tensors are: by operation, dtypes and factors alone,
 * so all ranks say the same. What it cannot do is staged: an allgather and an alltoall, whose results have a size that
 * is known only when all ranks have announced theirs; Adasum; values that travel in another dtype; dtypes that NCCL has
 * not; and factors of anything but sums of floats.
 */
int hr_nccl_can(const horo_request *call);

struct hr_nccl_backend;

/* The communicator, whose ranks are numbered as the team's, and the team must outlive it. NULL for lack of memory. */
struct hr_nccl_backend *hr_nccl_backend_create(struct hr_team *team, struct hr_nccl_comm *comm);
/* As of struct hr_backend_ops. A failure is the communicator's, whose abort ends what is on the stream. */
int hr_nccl_backend_begin(struct hr_nccl_backend *backend, const struct hr_work *work);
int hr_nccl_backend_progress(struct hr_nccl_backend *backend);
/* NULL is allowed. */
void hr_nccl_backend_destroy(struct hr_nccl_backend *backend);

#endif
