/*
 * What all ranks do, derived from one seed: who is where, with which options, which operations, and how it ends. Every rank reads the
 * same schedule; only the order in which it submits the operations of a bunch, and its delays, are its own.
 */
#ifndef STRESS_SCHEDULE_H
#define STRESS_SCHEDULE_H

#include <stddef.h>
#include <stdint.h>

#include "horo.h"

enum {
    HOSTS_MAX = 4,
    RANKS_MAX = 24,
    TENSORS_MAX = 5,
    BUNCH_MAX = 48,
    NAME_BYTES = 40,
};

enum ending {
    ENDING_TOGETHER, /* all leave when they have done everything */
    ENDING_LEAVE,    /* one rank leaves before that */
    ENDING_DEATH,    /* one rank is gone before that */
};

enum difference { DIFFERENCE_NONE, DIFFERENCE_SHAPE, DIFFERENCE_DTYPE };

/* Ranks that work together. */
struct team {
    int size;
    int ranks[RANKS_MAX];
};

struct operation {
    uint64_t salt; /* what its values are made from */
    int team;
    int32_t op, reduce_op, root_rank, dtype, flags;
    double prescale, postscale;
    int tensor_count;
    int64_t counts[TENSORS_MAX]; /* elements; allgather: most rows of a rank */
    int64_t columns;             /* allgather: elements of a row */
    int apart;                   /* the outputs are not the inputs */
    enum difference difference;
    int differs; /* the rank that submits something else */
    char name[NAME_BYTES];
};

/* Operations that are submitted in any order before the first of them is waited for. */
struct bunch {
    size_t first;
    uint32_t count;
};

struct schedule {
    uint64_t seed;
    int size, host_count;
    int host_sizes[HOSTS_MAX];
    int32_t host_of_rank[RANKS_MAX];
    uint64_t segment_bytes, fusion_bytes;
    int32_t cache_capacity, spin_us, cycle_time_us;
    enum ending ending;
    int victim;          /* who leaves or dies */
    size_t victim_bunch; /* in which bunch */
    int team_count;
    struct team teams[1]; /* one today: all ranks */
    size_t operation_count, bunch_count;
    struct operation *operations;
    struct bunch *bunches;
};

/* What a user may limit. */
struct limits {
    size_t operations;
    int64_t elements;
    int hosts;
    int together; /* no rank leaves early or dies */
    int moving;   /* only operations that move data: no barriers, nothing empty, no differences */
};

/* 0, or -1 without memory. */
int schedule_make(uint64_t seed, const struct limits *limits, struct schedule *schedule);
void schedule_free(struct schedule *schedule);
/* Everything but the operations, in one line. */
void schedule_describe(const struct schedule *schedule, char *text, size_t text_bytes);
void operation_describe(const struct operation *operation, char *text, size_t text_bytes);

#endif
