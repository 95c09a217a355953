/*
 * Algorithms between hosts: h members, one per host, joined by a transport. Each is a small state machine, so that the
 * engine can work on the next segment while this one travels:
 *
 *     begin -> progress (HORO_IN_PROGRESS ...) -> HORO_OK or an error
 *
 * progress never blocks: it looks at posted ios, does all the arithmetic that has become possible, posts what follows.
 * The caller alternates it with transport->ops->progress and sleeps (transport->ops->sleep_fds) when that, called last,
 * has moved nothing.
 *
 * The ios of the members match in the order of posting. So the next call on the same transport may make progress only
 * once this one is hr_cross_all_posted here; it need not be done, here or on other members.
 *
 * After an error of progress nothing of the call is posted any more: it has abandoned the data channel. A caller that
 * gives up a call in progress must do the same (transport->ops->abandon) before state, data or scratch go away.
 *
 * Peers are the linked hosts of node/team.h and no others, whatever the call.
 *
 * All members run the same algorithm on the same count, codec, reduce_op, root and sizes of parts; afterwards all hold
 * bit-identical data.
 */
#ifndef HR_CROSS_CROSS_H
#define HR_CROSS_CROSS_H

#include "kernel/kernel.h"
#include "transport/transport.h"

enum {
    HR_CROSS_WINDOW = 8,     /* ios in flight per direction, at most */
    HR_CROSS_ALIGNMENT = 64, /* of scratch */
    HR_CROSS_HOPS_MAX = 32,  /* between any two hosts */
};

/*
 * The place of one member's part. Of an all-to-all see below. Of an allgather: its own, which travels, and those of the
 * others, which come. Of a reduce-scatter: what I have of each; of the others' it is undefined afterwards.
 */
struct hr_cross_part {
    char *data;
    size_t bytes; /* whole values; equal on all members; may be 0, and then data NULL */
};

struct hr_cross_call {
    struct hr_transport *transport;
    int host;       /* my member index = my host index */
    int host_count; /* >= 2 */
    void *data;     /* in place */
    const struct hr_codec *codec; /* of the values; nothing is cut within one */
    size_t count;   /* values; may be 0 */
    int reduce_op;    /* SUM, MIN, MAX, PRODUCT; allreduce and reduce-scatter only */
    const struct hr_kernel *kernel; /* allreduce and reduce-scatter only */
    _Atomic uint64_t *sent_bytes;   /* a counter of what is posted */
    int root_host;    /* broadcast only */
    /* allgather, reduce-scatter and all-to-all only, instead of data and count: [host_count]; the caller keeps them */
    const struct hr_cross_part *parts;
    size_t piece_bytes; /* pipeline piece; equal on all members */
    void *scratch;      /* at least hr_cross_scratch_bytes, aligned to HR_CROSS_ALIGNMENT; may be NULL if that is 0 */
};

struct hr_cross; /* state of one running call; the caller provides the memory */

enum hr_arrival {
    HR_ARRIVAL_REPLACES = 0,      /* received straight into the data */
    HR_ARRIVAL_IS_LEFT = 1,       /* data = received op data */
    HR_ARRIVAL_IS_RIGHT = 2,      /* data = data op received */
};

/* The work of this member in one step; a peer of -1 means that it does not send or receive. */
struct hr_step {
    int send_peer;
    int recv_peer;
    size_t send_part;
    size_t recv_part;
    enum hr_arrival arrival;
    /* the step that brings what this one sends; -1: it is here from the beginning. Preset to the step before. */
    int after;
};

/* The moves of an algorithm, see pipeline.c. */
struct hr_plan {
    int step_count;
    size_t part_count; /* the data is cut into so many parts of nearly equal size */
    /* A part may come into memory that was sent this many steps before: that send must be over. 0: never. */
    int reuse_distance;
    int reduces_what_it_sends; /* some step reduces into the part that the same step sends */
};

struct hr_cross_ops {
    int reduces; /* it takes scratch, for what comes */
    /* Fills in the plan, zeroed before. */
    void (*plan)(const struct hr_cross *state, struct hr_plan *plan);
    /* Fills in the work of this member in step `index`. */
    void (*step)(const struct hr_cross *state, int index, struct hr_step *step);
};

/* For data of `bytes` in all, of a reduce-scatter in one part, of values of `value_bytes`. */
size_t hr_cross_scratch_bytes(const struct hr_cross_ops *ops, int host_count, size_t value_bytes, size_t bytes,
                              size_t piece_bytes);
/* Posts nothing. The state is overwritten. */
void hr_cross_begin(const struct hr_cross_ops *ops, struct hr_cross *state, const struct hr_cross_call *call);
/*
 * HORO_IN_PROGRESS, HORO_OK, HORO_ERR_PEER_LOST when an io failed (state->lost_host says with whom) or
 * HORO_ERR_INTERNAL when a link is missing. Once it is not HORO_IN_PROGRESS, it stays the same.
 */
int hr_cross_progress(struct hr_cross *state);

/* All private. */
struct hr_cross {
    const struct hr_cross_ops *ops;
    struct hr_cross_call call;
    struct hr_plan plan;
    int status;
    int lost_host; /* with whom an io failed; -1: none has */
    size_t piece_count; /* per step */
    size_t slot_bytes;  /* of scratch, per piece in flight */
    size_t total;       /* pieces of all steps; the four below count up to it */
    size_t send_posted, sent, recv_posted, finished;
    struct hr_io send[HR_CROSS_WINDOW]; /* piece q uses entry q % HR_CROSS_WINDOW */
    struct hr_io recv[HR_CROSS_WINDOW];
};

/* Whether the call will post nothing more: only what is posted has to come. Also after an error. */
static inline int hr_cross_all_posted(const struct hr_cross *state) {
    return state->status != HORO_IN_PROGRESS ||
           (state->send_posted == state->total && state->recv_posted == state->total);
}

/* Ring; 2(h-1) steps, 2(h-1)/h of the bytes each way (Patarasuk & Yuan 2009). For large data. */
extern const struct hr_cross_ops hr_cross_ring;
/* Recursive doubling; ceil(log2 h) steps (+2 where h != 2^k) of all bytes (Thakur et al. 2005). For small data. */
extern const struct hr_cross_ops hr_cross_doubling;
/* Broadcast down a binomial tree from root_host: ceil(log2 h) steps, pieces forwarded as they come. For small data. */
extern const struct hr_cross_ops hr_cross_tree;
/* Broadcast down a chain from root_host: h-1 hops, bytes cross each link once, pieces pipelined. For large data. */
extern const struct hr_cross_ops hr_cross_chain;
/* Allgather round a ring: h-1 steps, each link carries all parts but one, pieces pipelined. For large data. */
extern const struct hr_cross_ops hr_cross_gather_ring;
/* Allgather by doubling; ceil(log2 h) hops, each member sends h-1 parts (Bruck et al. 1997). For small data. */
extern const struct hr_cross_ops hr_cross_gather_doubling;
/*
 * Reduce-scatter round a ring: h-1 steps, each link carries every part but one once (Patarasuk & Yuan 2009). For large
 * data; small data travels by hr_cross_doubling, of which each member takes its part.
 */
extern const struct hr_cross_ops hr_cross_scatter_ring;
/*
 * All-to-all of parts[origin * host_count + destination], [host_count * host_count]: mine are here, those for me come,
 * and those whose way leads over this host come and go on; data is NULL for all others. Each takes as few hops as there
 * are powers of two in its way.
 */
extern const struct hr_cross_ops hr_cross_exchange;
/* Its scratch, for the steps; everything is received where it belongs. */
size_t hr_cross_exchange_scratch_bytes(int host_count);
/*
 * Between which hosts such a part goes on its way: writes their numbers, at most HR_CROSS_HOPS_MAX, and says how many.
 */
int hr_cross_way(int host_count, int origin, int destination, int *hosts);

#endif
