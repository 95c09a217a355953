/*
 * What all ranks do, derived from one seed: who is where, with which options, which operations, and how it ends. Every
 * rank reads the same schedule; only the order in which it submits the operations of a bunch, and its delays, are its
 * own.
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
    LIVE_MAX = 8,    /* teams at a time, besides that of all ranks */
    TEAMS_MAX = 200, /* all that a schedule ever wants; one that is removed and added again is another one */
    JOINS_MAX = 400,
};

enum ending {
    ENDING_TOGETHER, /* all leave when they have done everything */
    ENDING_LEAVE,    /* one rank leaves before that */
    ENDING_DEATH,    /* one rank is gone before that */
};

enum difference { DIFFERENCE_NONE, DIFFERENCE_SHAPE, DIFFERENCE_DTYPE, DIFFERENCE_REFUSED, DIFFERENCE_TEAM };

/* Ranks that work together. */
struct team {
    int size;
    int32_t ranks[RANKS_MAX]; /* ascending */
};

struct operation {
    uint64_t salt; /* what its values are made from */
    int team;
    int32_t op, reduce_op, root_rank, dtype, flags;
    double prescale, postscale;
    int tensor_count;
    int64_t counts[TENSORS_MAX]; /* elements; allgather: most rows of a rank; alltoall: for each other */
    int64_t columns;             /* allgather, alltoall: elements of a row */
    int apart;                   /* the outputs are not the inputs; reducescatter: always */
    enum difference difference;
    int differs; /* the rank that submits something else, or refuses its call */
    int subject; /* add, remove: which team; join: which one */
    int other;   /* which team the rank that differs adds or removes */
    int join;    /* the join of its team during which it is; -1: none */
    size_t bunch;
    char name[NAME_BYTES];
};

/*
 * Operations that are submitted in any order before the first of them is waited for. A rank skips those of teams that
 * it is not in.
 */
struct bunch {
    size_t first;
    uint32_t count;
};

/*
 * All members of a team join it, each one after a bunch of its own has been submitted, and wait for one another in the
 * last bunch. Until then those that have joined take part in nothing of the team.
 */
struct join {
    int team;
    size_t last_bunch;
    size_t after[RANKS_MAX]; /* by rank; the last one: in that */
};

struct schedule {
    uint64_t seed;
    int size, host_count;
    int host_sizes[HOSTS_MAX];
    int32_t host_of_rank[RANKS_MAX];
    uint64_t segment_bytes, fusion_bytes;
    uint64_t direct_bytes;
    int32_t cache_capacity, spin_us, cycle_time_us;
    int is_tuned; /* what operations run with changes again and again */
    enum ending ending;
    int victim;          /* who leaves or dies */
    size_t victim_bunch; /* in which bunch */
    int teams_at_once; /* besides that of all ranks, at most */
    uint32_t churn;    /* a team is added in one of so many bunches, while there is room */
    uint32_t joins_once_in; /* a join begins in one of so many bunches, and all ranks end together; 0: nobody joins */
    int join_count;
    struct join joins[JOINS_MAX];
    int team_count;
    struct team teams[TEAMS_MAX]; /* the first one has all ranks */
    size_t operation_count, bunch_count;
    struct operation *operations;
    struct bunch *bunches;
};

/* What a user may limit. */
struct limits {
    size_t operations;
    int64_t elements;
    int hosts;
    int teams;    /* at a time, besides that of all ranks */
    int together; /* no rank leaves early or dies */
    int moving;   /* only operations that move data: no barriers, nothing empty, no differences */
};

/* 0, or -1 without memory. */
int schedule_make(uint64_t seed, const struct limits *limits, struct schedule *schedule);
void schedule_free(struct schedule *schedule);
/* Everything but the operations, in one line. */
void schedule_describe(const struct schedule *schedule, char *text, size_t text_bytes);
void operation_describe(const struct schedule *schedule, const struct operation *operation, char *text,
                        size_t text_bytes);

static inline int team_has(const struct team *team, int rank) {
    for (int i = 0; i < team->size; i++) {
        if (team->ranks[i] == rank) {
            return 1;
        }
    }
    return 0;
}

static inline int operation_reduces(const struct operation *operation) {
    return operation->op == HORO_ALLREDUCE || operation->op == HORO_REDUCESCATTER;
}

/* What comes out is as long as the ranks say that it is. */
static inline int operation_tells_rows(const struct operation *operation) {
    return operation->op == HORO_ALLGATHER || operation->op == HORO_ALLTOALL;
}

static inline int operation_changes_teams(const struct operation *operation) {
    return operation->op == HORO_ADD_TEAM || operation->op == HORO_REMOVE_TEAM;
}

#endif
