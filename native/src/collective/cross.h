/*
 * Algorithms between hosts: h members, one per host, joined by a transport. Each is a small state machine, so that the engine
 * can work on the next segment while this one travels:
 *
 *     begin -> progress (HORO_IN_PROGRESS ...) -> HORO_OK or an error
 *
 * progress never blocks: it looks at posted ios, does the arithmetic that has become possible, posts what follows. The caller
 * alternates it with transport->ops->progress and sleeps (transport->ops->sleep_fds) when neither moves.
 * All members run the same algorithm on the same count, dtype, reduce_op and root; afterwards all hold bit-identical data.
 */
#ifndef HR_COLLECTIVE_CROSS_H
#define HR_COLLECTIVE_CROSS_H

#include "kernel/kernel.h"
#include "transport/transport.h"

enum { HR_CROSS_WINDOW = 8 }; /* ios in flight per direction, at most */

struct hr_cross_call {
    struct hr_transport *transport;
    int host;       /* my member index = my host index */
    int host_count; /* >= 2 */
    void *data;     /* in place */
    size_t count;   /* elements; may be 0 */
    int dtype;
    int reduce_op;    /* SUM, MIN, MAX, PRODUCT; unused by broadcast */
    int root_host;    /* broadcast only */
    size_t piece_bytes; /* pipeline piece; equal on all members */
    void *scratch;    /* at least ops->scratch_bytes(...), aligned to 64 */
};

struct hr_cross; /* state of one running call; the caller provides the memory */

struct hr_cross_ops {
    const char *name;
    size_t (*scratch_bytes)(int host_count, size_t bytes, size_t piece_bytes);
    /* HORO_OK or an error. The state is overwritten. */
    int (*begin)(struct hr_cross *state, const struct hr_cross_call *call);
    /* HORO_IN_PROGRESS, HORO_OK, or HORO_ERR_PEER_LOST when an io failed. */
    int (*progress)(struct hr_cross *state);
};

struct hr_cross {
    const struct hr_cross_ops *ops;
    struct hr_cross_call call;
    /* Owned by the algorithm in use. */
    struct hr_io send[HR_CROSS_WINDOW];
    struct hr_io recv[HR_CROSS_WINDOW];
    size_t sent, received, reduced; /* pieces, counted as the algorithm likes */
    int step, phase, mask, partner;
};

/* Ring: reduce-scatter then allgather; 2(h-1) steps, 2(h-1)/h of the bytes each way (Patarasuk & Yuan 2009). For large data. */
extern const struct hr_cross_ops hr_cross_ring;
/* Recursive doubling; ceil(log2 h) steps of all bytes (+2 if h is no power of two) (Thakur et al. 2005). For small data. */
extern const struct hr_cross_ops hr_cross_doubling;
/* Broadcast down a binomial tree from root_host: ceil(log2 h) steps, pieces forwarded as they come. For small data. */
extern const struct hr_cross_ops hr_cross_tree;
/* Broadcast down a chain from root_host: h-1 hops, bytes cross each link once, pieces pipelined. For large data. */
extern const struct hr_cross_ops hr_cross_chain;

#endif
