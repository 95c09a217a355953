/*
 * Whole collectives by NCCL, on tensors in the memory of GPUs: a communicator between a GPU of this rank
 * and as many GPUs of other ranks. Those of one GPU share a stream. No function blocks for another rank, but for close:
 * what is in progress is polled. One thread at a time. It is no struct hr_backend: its batches wait for their turn
 * first, and that is the engine's (nccl_order.c).
 *
 *     state      | what has happened                             | what comes next
 *     -----------+-----------------------------------------------+-------------------------------------------------
 *     NONE       | nothing, or it has been aborted               | hr_nccl_connect
 *     CONNECTING | the ranks look for one another                | hr_nccl_poll, until it is IDLE
 *     IDLE       | all that was launched is on the stream        | hr_nccl_launch
 *     LAUNCHING  | a launch is not wholly on the stream yet      | hr_nccl_poll, until it is IDLE
 *     ENDING     | the ranks end it in order                     | hr_nccl_poll, until it is NONE
 *     BROKEN     | NCCL or the GPU has failed: `failure` says how | hr_nccl_abort
 */
#ifndef HR_BACKEND_NCCL_H
#define HR_BACKEND_NCCL_H

#include <stdint.h>

#include "backend/backend.h"
#include "device/device.h"

enum hr_nccl_state { HR_NCCL_NONE, HR_NCCL_CONNECTING, HR_NCCL_IDLE, HR_NCCL_LAUNCHING,
                     HR_NCCL_ENDING, HR_NCCL_BROKEN };

enum { HR_NCCL_DTYPES = 10 };

struct hr_nccl_comm {
    const struct hr_nccl *nccl;
    struct hr_device *device;
    void *handle; /* NCCL's; NULL: there is none */
    void *stream; /* the GPU's, which outlives it */
    void *fence;  /* an event behind what was launched last */
    enum hr_nccl_state state;
    int is_in_flight; /* something that was launched has not been seen to end */
    int has_scale[HR_NCCL_DTYPES];
    int scales[HR_NCCL_DTYPES]; /* reductions of the launch under way, which multiply before they sum */
    struct hr_error failure;
    struct hr_nccl_comm *next_aborted; /* together with it */
};

/* HORO_OK, or HORO_ERR_RESOURCE with a sentence and nothing left behind. */
int hr_nccl_connect(struct hr_nccl_comm *comm, const struct hr_nccl *nccl, struct hr_device *device, void *stream,
                    const struct hr_nccl_id *id, int size, int rank, struct hr_error *error);

/* 1 if CONNECTING, LAUNCHING or ENDING is over, if IDLE has nothing in flight any more, or it is BROKEN; else 0. */
int hr_nccl_poll(struct hr_nccl_comm *comm);

/*
 * Whether NCCL can do the request as horo means it, wherever its tensors are: by operation, dtypes and factors alone,
 * so all ranks say the same. What it cannot do is staged: an allgather and an alltoall, whose results have a size that
 * is known only when all ranks have announced theirs; Adasum; values that travel in another dtype; dtypes that NCCL has
 * not; and factors of anything but sums of floats.
 */
int hr_nccl_can(const horo_request *call);
/*
 * IDLE, of a communicator whose ranks are numbered as the team's: the batch becomes one group of calls on the tensors
 * themselves, so that their kernels share a launch. It is done when all of them are on the stream, not when they have
 * ended there: what comes behind orders itself by events. The state is LAUNCHING, or BROKEN; IDLE for no values at all.
 */
void hr_nccl_launch(struct hr_nccl_comm *comm, const struct hr_team *team, const struct hr_work *work);

/* IDLE, nothing in flight: all ranks end it, once the work of all has ended, however late. Now ENDING or BROKEN. */
void hr_nccl_end(struct hr_nccl_comm *comm);
/*
 * Ends what is in flight, with whatever it has. Any state but NONE; NULL is allowed. Those of one GPU all at once,
 * linked by `next_aborted`: the kernel of one may stand behind that of another on their stream, and its abort waits.
 */
void hr_nccl_abort(struct hr_nccl_comm *first);
/* Whether no kernel of it touches memory any more. Any state. */
int hr_nccl_is_quiet(struct hr_nccl_comm *comm);
/* Frees what is left of it. Any state; in others than NONE it is aborted first. */
void hr_nccl_close(struct hr_nccl_comm *comm);

#endif
