/*
 * An allreduce of tensors in the memory of GPUs in two levels (docs/adr/0049-nccl-reduces-inside-a-host-first.md): by
 * NCCL among the ranks of a host, through host memory between hosts.
 *
 *     phase      | what happens
 *     -----------+------------------------------------------------------------------------------------------------
 *     REDUCING   | one launch: each owner gets its part of every tensor, reduced over its host
 *     TRAVELLING | owners: pieces of the part are copied to pinned memory, reduced with those of the owners of the
 *                | other hosts, and copied back; copies and links are at work at the same time
 *     GATHERING  | one launch: the ranks of the host get the parts of all owners
 *
 * All of it on the communicator's stream, in this order. The task is done when the second launch is on the stream.
 * Another launch of this rank between the two might come in front of the second one here, and behind it elsewhere: so
 * the batch keeps its turn (nccl_turn.c) until it is done.
 */
#ifndef HR_BACKEND_NCCL_TWO_LEVEL_H
#define HR_BACKEND_NCCL_TWO_LEVEL_H

#include "backend/backend.h"
#include "device/nccl_comm.h"
#include "device/room.h"

/* Whether there are two levels: several hosts, and on one of them several ranks. All members say the same. */
static inline int hr_team_has_two_levels(const struct hr_team *team) {
    return team->host_count > 1 && team->largest_host > 1;
}

struct hr_nccl_two_level;

/*
 * For a team that has two levels, on a GPU, by a communicator that has one of the host's ranks as well, which are
 * numbered as team->local_rank. All must outlive it. NULL for lack of memory.
 */
struct hr_nccl_two_level *hr_nccl_two_level_create(struct hr_team *team, struct hr_nccl_comm *comm,
                                                   struct hr_stager *stager, struct hr_device *device);
/* Whether such work is done so: allreduces of what NCCL reduces and multiplies by itself. All ranks say the same. */
int hr_nccl_two_level_can(const struct hr_work *work);
/* As of struct hr_backend_ops. A failure of NCCL or the GPU is the communicator's. */
int hr_nccl_two_level_begin(struct hr_nccl_two_level *self, const struct hr_work *work);
int hr_nccl_two_level_progress(struct hr_nccl_two_level *self);
void hr_nccl_two_level_cancel(struct hr_nccl_two_level *self);
/* Whether it waits for a copy, of which nothing tells. */
int hr_nccl_two_level_awaits_gpu(const struct hr_nccl_two_level *self);
/*
 * Gives back the memory of a batch that is done, or cancelled and aborted: behind what is on the stream. NULL is
 * allowed, as in destroy.
 */
void hr_nccl_two_level_leave(struct hr_nccl_two_level *self);
void hr_nccl_two_level_destroy(struct hr_nccl_two_level *self);

#endif
