/*
 * A communicator of NCCL, between a GPU of this rank and as many GPUs of other ranks. Those of one GPU share a stream.
 * No function blocks for another rank, but for close: what is in progress is polled. One thread at a time.
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
#ifndef HR_DEVICE_NCCL_COMM_H
#define HR_DEVICE_NCCL_COMM_H

#include <stdint.h>

#include "device/device.h"
#include "device/nccl.h"

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

enum hr_nccl_kind { HR_NCCL_ALL_REDUCE, HR_NCCL_REDUCE, HR_NCCL_REDUCE_SCATTER, HR_NCCL_BROADCAST };

struct hr_nccl_call {
    enum hr_nccl_kind kind;
    const void *input; /* on the GPU, as the output */
    void *output;
    size_t count; /* of values; of a reduce-scatter those of each rank */
    int dtype;    /* enum hr_nccl_dtype */
    int op;       /* enum hr_nccl_op, of a reduction */
    int root;     /* of a broadcast or reduction to one */
};

/* Ranks that are connected: how many, which one this is, and their rendezvous. */
struct hr_nccl_ranks {
    int size, rank;
    const struct hr_nccl_id *id;
};

/* HORO_OK, or HORO_ERR_RESOURCE with a sentence and nothing left behind. */
int hr_nccl_connect(struct hr_nccl_comm *comm, const struct hr_nccl *nccl, struct hr_device *device,
                    void *stream, const struct hr_nccl_ranks *ranks, struct hr_error *error);

/*
 * CONNECTING, LAUNCHING, ENDING: 1 if it is another state now. IDLE: 1 if nothing is in flight any more, or it is
 * BROKEN. 0.
 */
int hr_nccl_poll(struct hr_nccl_comm *comm);

/*
 * IDLE: calls that go onto the stream as one, so that their kernels share a launch.
 * `factors`: by dtype, the bits of what sums are multiplied by before they are added, or NULL. HORO_OK, or the state is
 * BROKEN.
 */
hr_status hr_nccl_launch(struct hr_nccl_comm *comm, const struct hr_nccl_call *calls, size_t count,
                         const uint64_t *factors);

/*
 * IDLE, and nothing in flight: the ranks end it, as all do. The state is ENDING or BROKEN. NCCL waits for the work of
 * all ranks, whose GPUs may be late.
 */
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
