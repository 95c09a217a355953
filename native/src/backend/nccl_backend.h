/*
 * Whole collectives by NCCL, on tensors in the memory of GPUs. A batch becomes one group of calls on the tensors
 * themselves: nothing is packed. Its task is done when all of them are on the communicator's stream, not when they have
 * ended there: what comes behind orders itself by events.
 */
#ifndef HR_BACKEND_NCCL_BACKEND_H
#define HR_BACKEND_NCCL_BACKEND_H

#include "backend/backend.h"
#include "device/nccl_comm.h"

/*
 * Whether NCCL can do the request as horo means it, wherever its tensors are: by operation, dtypes and factors alone,
 * so all ranks say the same.
 */
int hr_nccl_can(const horo_request *call);

/* The communicator, whose ranks are numbered as the team's, and the team must outlive it. NULL for lack of memory. */
struct hr_backend *hr_nccl_backend_create(struct hr_team *team, struct hr_nccl_comm *comm);

#endif
