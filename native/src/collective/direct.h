/*
 * Moves between the ranks of one host with a single copy: each rank shows the addresses of what it has for others in
 * its slot, and reads what others have for it from their memory (node/peer_memory.h), or the sum of that. Nobody goes
 * on before all have read.
 */
#ifndef HR_COLLECTIVE_DIRECT_H
#define HR_COLLECTIVE_DIRECT_H

#include "collective/fused.h"
#include "collective/task.h"
#include "node/peer_memory.h"

/* Whether all members can read each other's memory: each tries, tells, and hears of the others. */
struct hr_probe {
    struct hr_task task;
    struct hr_team *team;
    int has_told;
};

/* Sets team->reads_peers, to the same on all members, which begin this at one place. The team has one host. */
void hr_probe_begin(struct hr_probe *probe, struct hr_team *team);

/* Of plain values, all of one dtype; reduce_op and scale as of hr_reducescatter_begin. */
struct hr_sum {
    int reduce_op;
    struct hr_scale scale;
};

/* The vectors that move: one list of those that I show, and those that I get. */
struct hr_move {
    const struct hr_fused *shown; /* [shown_count] one for all, or one for each member; their inputs are read */
    int shown_count;              /* 1 or team->size */
    const struct hr_fused *from;  /* [team->size] what comes from each, to outputs; of a broadcast: the one vector */
    int root_rank;                /* whose vector all get; -1: everybody has something */
    size_t tensors;               /* pieces in any of these vectors, at most; equal on all members */
    /* NULL: what comes from each is kept. Else `from` is `shown`, and from[team->rank] has the outputs, of the sum. */
    const struct hr_sum *sum;
};

/*
 * Whether a move goes by this way; equal on all members if `bytes`, what the largest tensor of a member has, is.
 * team->reads_peers may be 0: it would, if it can.
 */
int hr_direct_pays(const struct hr_team *team, const struct hr_move *move, size_t bytes);

struct hr_direct {
    struct hr_task task;
    struct hr_team *team;
    struct hr_move move;
    int stage;
    unsigned parity;
    int is_shown_ahead; /* all have shown their addresses, see hr_direct_show_ahead */
    int peer;           /* how many peers' parts are read */
    size_t piece, skip; /* of this peer's part: what is read next; of a sum: of all parts */
    struct hr_sum sum;
};

/*
 * Inputs and outputs as the collective has them; the caller keeps the vectors. If afterwards team->reads_peers is
 * negative, which is the same on all members, a read has failed, and all of the move is to be done again by another
 * way.
 */
void hr_direct_begin(struct hr_direct *run, struct hr_team *team, const struct hr_move *move);
/* As hr_segments_fill_ahead and hr_segments_show_ahead, of the addresses. */
int hr_direct_fill_ahead(struct hr_direct *run);
void hr_direct_show_ahead(struct hr_direct *run);

#endif
