/*
 * Whole collectives on host memory for all ranks of a team, as tasks. Every rank begins the same ones with the
 * same sizes in the same order, one after the other. The memory of a task is the caller's and must stay where it is
 * until the task is done or cancelled, as must the pieces of its vectors.
 *
 * Words: a *segment* is the pipeline piece that fits one arena slot; a *share* is the part of a segment that one
 * *owner* reduces; the owners are the local ranks below team->owner_count, the same on every host.
 */
#ifndef HR_COLLECTIVE_COLLECTIVE_H
#define HR_COLLECTIVE_COLLECTIVE_H

#include "collective/segments.h"

struct hr_allreduce {
    struct hr_segments segments;
    struct hr_fused fused;
    int reduce_op;
    double prescale;
    double partial_scale; /* several hosts: what each host's partial result is multiplied by before it travels on */
    struct hr_scale postscale;
    int owners;
    size_t scratch_bytes; /* between hosts: for one segment that travels */
};

struct hr_broadcast {
    struct hr_segments segments;
    struct hr_fused fused;
    int root_rank;
    int root_host;
    int root_local; /* local index of the root on its host; only used there */
    int owners;
};

struct hr_allgather {
    struct hr_segments segments;
    struct hr_shares shares;    /* between hosts; on one by_rank alone */
    enum hr_store result_store; /* on one host */
    const struct hr_cross_ops *cross; /* between hosts, as what follows */
    struct hr_cross_part *parts; /* [HR_SEGMENTS_TRAVELLING_MAX][host_count] */
};

/* The traffic through the slots of one host: bytes, and the number of streams. */
struct hr_traffic {
    size_t bytes;
    size_t streams;
};

struct hr_alltoall {
    struct hr_segments segments;
    const struct hr_fused *to;
    const struct hr_fused *from;
    const size_t *bytes;
    enum hr_store result_store; /* on one host */
    struct hr_shares shares; /* on one host of what each has for each; else of streams */
    /* One host: [size] where what I have for each rank begins in my slot. Else: [host_count] in the stream to each. */
    size_t *starts;
    size_t *places; /* [size] where what each rank has for me begins in its slot; else in the stream from its host */
    /* Between hosts: */
    size_t *streams;             /* [host_count * host_count] bytes from each host to each */
    struct hr_traffic *traffic;  /* [host_count] */
    struct hr_cross_part *parts; /* [HR_SEGMENTS_TRAVELLING_MAX][host_count * host_count] */
    char *scratch;               /* [HR_SEGMENTS_TRAVELLING_MAX] of scratch_bytes */
    size_t scratch_bytes;
};

struct hr_reducescatter {
    struct hr_segments segments;
    struct hr_shares shares;
    const struct hr_codec *codec;
    int reduce_op;
    double prescale;
    double partial_scale; /* several hosts: as in struct hr_allreduce */
    struct hr_scale postscale;
    size_t piece_scratch_bytes; /* several hosts: for the pieces of one segment that travels, */
    size_t scratch_bytes;       /* and for its parts as well */
    size_t done;                /* one host: bytes of this rank's part that are in the outputs already */
};

/* See adasum.c. */
struct hr_adasum {
    struct hr_task task;
    struct hr_team *team;
    struct hr_fused fused;
    double prescale;
    struct hr_scale postscale;
    enum hr_adasum_phase stage;
    /* Counts are of values as they travel. */
    size_t width; /* bytes of a value */
    size_t count;
    size_t first, own_count; /* my share */
    int is_packed;           /* the values to send and the result lie in `packed`; else in the only tensor itself */
    size_t at;               /* in this stage: bytes that are done; of the current pair, values */
    int low;                 /* the lower rank of the current pair, whose share becomes what comes of both */
    int distance;            /* to the upper one */
    void *memory;            /* of what follows */
    char *packed;            /* [count] */
    char *shares;            /* [size][own_count] mine, of the vector of each rank */
    double *sums;            /* [pairs of a level][tensors][products] */
    size_t *bytes;           /* [size][size] */
    struct hr_fused *vectors; /* [2 * size], as the pieces */
    struct hr_piece *pieces;
    struct hr_task *inner; /* the collective that runs; NULL: none */
    union {
        struct hr_alltoall alltoall;
        struct hr_allreduce allreduce;
        struct hr_allgather allgather;
    } run;
};

/*
 * outputs = postscale * reduce over ranks of (prescale * inputs). reduce_op is SUM, MIN, MAX or PRODUCT. An input may
 * be its output. fused->codec packs (prescale * inputs) and reduces the blocks, and outputs are what it unpacks; where
 * it is plain, inputs are read and outputs written in place where that saves a copy. Per rank and byte of data on one
 * host of p ranks: copies (p-1)/p in, reads p/p and writes 2/p for the share, copies (p-1)/p out. HORO_OK or
 * HORO_ERR_RESOURCE.
 */
hr_status hr_allreduce_begin(struct hr_allreduce *run, struct hr_team *team, const struct hr_fused *fused,
                             int reduce_op, double prescale, struct hr_scale postscale);

/*
 * The factor for partial results before they travel, so that the factor of postscale is divided by it. A sum of float16
 * may leave their range though the average of all does not. So the power of two in a factor below 1 is taken in before;
 * that is exact, but for values so small that float16 holds fewer bits of them. 1 for all else that travels.
 */
double hr_partial_scale(const struct hr_codec *codec, int reduce_op, double postscale);

/* Scratch for shares of at most `most` bytes, of values of `value_bytes`, where `large` moves the large ones. */
size_t hr_two_level_scratch_bytes(const struct hr_tuning *tuning, int host_count, size_t value_bytes, size_t most,
                                  const struct hr_cross_ops *large);

/* On several hosts: outputs = inputs of root_rank; on the root an output may be its input. fused is of bytes. */
void hr_broadcast_begin(struct hr_broadcast *run, struct hr_team *team, const struct hr_fused *fused, int root_rank);

/*
 * by_rank[r] describes rank r's contribution (its bytes may differ by rank): by_rank[team->rank] holds my inputs, and
 * the outputs of all of them are where rank r's data goes here. The caller keeps by_rank. On one host a broadcast is
 * one of these, in which the others have nothing. Between hosts each link carries all that is not its receiver's own,
 * once. HORO_OK or HORO_ERR_RESOURCE.
 */
hr_status hr_allgather_begin(struct hr_allgather *run, struct hr_team *team, const struct hr_fused *by_rank);

/*
 * to[r] has my inputs for rank r, and from[r] the outputs of what comes from it, and of my own also the inputs;
 * bytes[s * size + d] of rank s for rank d, the same on all ranks. The caller keeps all three. Inputs and outputs
 * overlap nowhere, but for my own, which may be where they belong. Per byte for another rank
 * of the host: one copy in and one out; between hosts each link carries the bytes of each pair of hosts whose way it is
 * on. HORO_OK or HORO_ERR_RESOURCE.
 */
hr_status hr_alltoall_begin(struct hr_alltoall *run, struct hr_team *team, const struct hr_fused *to,
                            const struct hr_fused *from, const size_t *bytes);

/*
 * by_rank[r] describes the values that rank r gets the sum of, the same on all ranks: my inputs, and in
 * by_rank[team->rank] the outputs, which overlap no input. Factors and codec as of hr_allreduce_begin; on one host each
 * value is that of an allreduce, to the bit. The caller keeps by_rank. Not for a team of one rank: there it is an
 * allreduce. Per rank and byte of its inputs on one host of p ranks: copies (p-1)/p in, reads and writes 1/p. HORO_OK
 * or HORO_ERR_RESOURCE.
 */
hr_status hr_reducescatter_begin(struct hr_reducescatter *run, struct hr_team *team, const struct hr_fused *by_rank,
                                 int reduce_op, double prescale, struct hr_scale postscale);

/* outputs = postscale * Adasum of (prescale * inputs), of several ranks. HORO_OK or HORO_ERR_RESOURCE. */
hr_status hr_adasum_begin(struct hr_adasum *run, struct hr_team *team, const struct hr_fused *fused, double prescale,
                          double postscale);
/* Gives its memory back, of one that has neither ended nor been cancelled. */
void hr_adasum_free(struct hr_adasum *run);

/*
 * ---- Moves with a single copy ----
 *
 * Between the ranks of one host: each rank shows the addresses of what it has for others in its slot, and reads what
 * others have for it from their memory, or the sum of that. Nobody goes on before all have read.
 */

/* `bytes` at address `from` there go to `to` here. */
struct hr_peer_range {
    void *to;
    uint64_t from;
    size_t bytes;
};

/*
 * Reads up to HR_RANGES_MAX ranges of a rank of this host (local index). 0, or an error number: ESRCH where the process
 * is gone, EFAULT where an address is none or its memory a device's, EPERM where the system refuses, and so on; then
 * what has been written to `to` is not to be used. Does not wait for the other rank.
 */
enum { HR_RANGES_MAX = 32 };
int hr_read_peer(const struct hr_node *node, int local_rank, const struct hr_peer_range *ranges, int count);

/* The vectors that move: one list of those that I show, and those that I get. */
struct hr_move {
    const struct hr_fused *shown; /* [shown_count] one for all, or one for each member; their inputs are read */
    int shown_count;              /* 1 or team->size */
    const struct hr_fused *from;  /* [team->size] what comes from each, to outputs; of my own also the inputs */
    size_t tensors;               /* pieces in any of these vectors, at most; equal on all members */
    int is_gather;                /* everybody has something, which all get */
    int adds_up; /* `from` is `shown`, and from[team->rank] has the outputs, of the sum; else what comes is kept */
    int reduce_op; /* of a sum of plain values, all of one dtype, as `scale`; both as of hr_reducescatter_begin */
    struct hr_scale scale;
};

/*
 * Whether a move goes by this way; equal on all members if `bytes`, what the largest tensor of a member has, is.
 * team->reads_peers may be 0: the first move is the try.
 */
int hr_direct_pays(const struct hr_team *team, const struct hr_move *move, size_t bytes);

struct hr_direct {
    struct hr_task task;
    struct hr_team *team;
    struct hr_move move;
    int stage;
    unsigned parity;
    int is_shown_ahead; /* all have shown their addresses, see struct hr_task */
    int peer;           /* how many peers' parts are read */
    size_t done; /* bytes of this peer's part; of a sum: of mine: they are in the outputs, which may lie in my input */
};

/*
 * Inputs and outputs as the collective has them; the caller keeps the vectors. If afterwards team->reads_peers is
 * negative, as on all members, a read has failed: the move is to be done again another way, but for what is summed.
 */
void hr_direct_begin(struct hr_direct *run, struct hr_team *team, const struct hr_move *move);

#endif
