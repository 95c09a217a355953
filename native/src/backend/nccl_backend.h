/*
 * Whole collectives by NCCL, on tensors in the memory of GPUs: a batch becomes one group of calls on the tensors
 * themselves. Its task is done when all of them are on the communicator's stream, not when they have ended there: what
 * comes behind orders itself by events. It is no struct hr_backend: its batches wait for their turn first, and that is
 * the engine's (nccl_order.c).
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

/* The calls of a batch. Their memory is used again for the next one; `items` is for the owner to free. */
struct hr_nccl_calls {
    struct hr_nccl_call *items;
    size_t count, capacity;
};

/* The number of calls that the work needs at most. */
size_t hr_nccl_calls_of(const struct hr_team *team, const struct hr_work *work);
/*
 * Launches the work on an IDLE communicator, whose ranks are numbered as the team's. HORO_OK, also where the
 * communicator is BROKEN then, or HORO_ERR_RESOURCE for lack of memory.
 */
hr_status hr_nccl_begin(struct hr_nccl_calls *calls, const struct hr_team *team, struct hr_nccl_comm *comm,
                        const struct hr_work *work);

#endif
