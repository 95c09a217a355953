/*
 * Whole collectives by NCCL, on tensors in the memory of GPUs. A batch becomes one group of calls, on the tensors
 * themselves or, where NCCL cannot reduce them as they are, on a buffer (nccl_pack.h); Adasum becomes several
 * (nccl_adasum.h). Its task is done when all of
 * them are on the communicator's stream, not when they have ended there: what comes behind orders itself by events. It
 * is no struct hr_backend: its batches wait for their turn first, and that is the engine's (nccl_turn.c).
 */
#ifndef HR_BACKEND_NCCL_BACKEND_H
#define HR_BACKEND_NCCL_BACKEND_H

#include "backend/nccl_pack.h"
#include "device/nccl_comm.h"

/*
 * Whether NCCL can do the request as horo means it, wherever its tensors are: by operation, dtypes and factors alone,
 * so all ranks say the same.
 */
int hr_nccl_can(const horo_request *call);

/* For nccl_two_level.c. The dtype of NCCL's; -1: it has none. */
int hr_nccl_dtype_of(int dtype);
int hr_nccl_op_of(int reduce_op);
/* By NCCL's dtype of floats, the bits of what the values of each rank are multiplied by. 1 if that is other than 1. */
int hr_nccl_write_factors(const struct hr_team *team, const struct hr_work *work, uint64_t *factors);

struct hr_nccl_backend;

/*
 * The communicator, whose ranks are numbered as the team's, the team and the others must outlive it. NULL for lack of
 * memory.
 */
struct hr_nccl_backend *hr_nccl_backend_create(struct hr_team *team, struct hr_nccl_comm *comm,
                                               struct hr_stager *stager, const struct hr_packer *packer);
/* As of struct hr_backend_ops. A failure is the communicator's, whose abort ends what is on the stream. */
int hr_nccl_backend_begin(struct hr_nccl_backend *backend, const struct hr_work *work);
int hr_nccl_backend_progress(struct hr_nccl_backend *backend);
/* The group ends: memory of a batch under way goes back, in the order of the stream. NULL is allowed. */
void hr_nccl_backend_leave(struct hr_nccl_backend *backend);
/* NULL is allowed. */
void hr_nccl_backend_destroy(struct hr_nccl_backend *backend);

#endif
