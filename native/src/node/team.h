/*
 * A set of ranks that does collectives together, from the place of one of them: who is where, and what its members
 * share in the arena. The world, which has all ranks, is the first team. Members are numbered anew in every team:
 * `rank`, `host` and `local_rank` here are positions among the members, not those of the job.
 *
 * All functions are called by the driver of the engine only, unless they say otherwise.
 */
#ifndef HR_NODE_TEAM_H
#define HR_NODE_TEAM_H

#include "node/node.h"

/* Phases of the arena algorithms; each exists per slot parity: phase + parity. */
enum hr_phase {
    HR_PHASE_FILLED = 0,  /* my slot holds what the others need */
    HR_PHASE_REDUCED = 2, /* my share of the result is in my slot */
    HR_PHASE_DRAINED = 4, /* I have read all I need from the slots */
};

/* Sizes in bytes at which a team's collectives change their way; equal on all members. The notes have the reasons. */
struct hr_tuning {
    size_t segment;         /* one arena slot */
    size_t flat;            /* allreduce on one host: up to here everybody reduces everything; at most HR_FLAT_MAX */
    /* from here on it may pay to store into slots past the cache: below, what was stored is still in it */
    size_t stream;
    size_t moved_stream;    /* the same of what is only moved */
    size_t result_stream;   /* of all ranks of a host: from here on results of moves are stored past the cache */
    size_t direct;          /* cost of a read of a peer's memory, in bytes copied; 0: none is read */
    /* results of all ranks of the host that all get alike: up to here; past the cache they take less time above */
    size_t direct_most;
    size_t piece;           /* of what travels between hosts: sent, received and reduced at once */
    size_t doubling;        /* allreduce between hosts, per share: latency counts up to here, bandwidth above */
    /* broadcast between hosts: up to here a tree, few hops; above a chain, each link carries the data once */
    size_t tree;
    size_t gather_doubling; /* allgather between hosts, of the result: latency counts up to here, bandwidth above */
    size_t gather_spread;   /* of the result: up to here one owner carries it all */
    /* of each rank in a segment that needs no slots: each is a start from nothing for all links */
    size_t gather_lone;
    size_t carried; /* allreduce of one tensor between hosts: up to here, packed, the data travels with the agreement;
                     * at most HR_CARRIED_MAX */
    size_t carried_per_host; /* the same, of all ranks of a host together */
};

enum { HR_FLAT_MAX = 4096, HR_CARRIED_MAX = 1 << 14 };

/* But for `segment`, which is 0. */
extern const struct hr_tuning hr_tuning_defaults;

/* The measured costs of ordinary stores into slots, and of those past the cache; see hr_store_try. */
struct hr_store_costs {
    int64_t of[2];   /* smoothed picoseconds per byte with each enum hr_store; 0: not tried */
    uint64_t operations; /* that were timed; equal on all ranks of a host */
};

struct hr_team {
    struct hr_node *node;
    int32_t id; /* 0: all ranks */
    int number; /* as hr_team_number(id) */
    struct hr_tuning tuning;
    struct hr_partition partition;
    struct hr_transport *transport; /* NULL: all members are on one host */

    /* The places of all ranks. */
    int *numbers; /* of all lists below */
    int rank, size;
    int *job_rank;              /* [size] of each member, ascending */
    int host, host_count;
    int local_rank, local_size; /* local index and members on this host */
    int largest_host;           /* its members */
    /* members on the smallest host: local index i < owner_count has links to its like on linked hosts */
    int owner_count;
    int *host_of_rank;          /* [size] */
    int *rank_of_local;         /* [local_size] */
    int *index_of_local;        /* [local_size] among all ranks of this host: what the arena and wake-ups go by */
    int *rank_by_host;          /* [size] all members, those of host 0 first, each host's in order */
    int *leader_of_host;        /* [host_count] rank */
    int *host_size;             /* [host_count] */

    /* The state that its collectives keep from one to the next. */
    uint64_t segment;                  /* segments begun; its parity chooses the slot */
    uint64_t arrivals[HR_PHASE_COUNT]; /* mine, per phase and parity */
    int is_ahead;                      /* this rank works on what is not agreed on: it arrives nowhere */
    struct hr_abort suspect;           /* the rank that a task has lost; see struct hr_task */
    /* travelled, so far, between hosts: whoever wants to know whether time passes idly compares it */
    uint64_t pieces;
    int reads_peers;                   /* members can read each other's memory; 0: not tried, -1: not all can */
    const void **sources;              /* [local_size] scratch for the kernels */
    char *cross_scratch;
    size_t cross_scratch_bytes;
    struct hr_store_costs allreduce_stores;
    struct hr_store_costs scatter_stores;
};

/*
 * The team of all `size` ranks on the hosts host_of_rank[size], of which this rank is number `rank`. The node need not
 * be initialised yet, and must outlive the team. HORO_OK, or a status with *error set; destroy in either case.
 * The partition is mapped, and the transport connected, by hr_node_init; destroy unmaps the partition.
 */
hr_status hr_team_init(struct hr_team *team, struct hr_node *node, int rank, int size, const int32_t *host_of_rank,
                       size_t segment_bytes, struct hr_error *error);
/* A team of some ranks, ascending, with this one; without number, partition and transport yet. Status likewise. */
hr_status hr_team_init_some(struct hr_team *team, const struct hr_team *world, const int32_t *job_ranks, int size,
                            struct hr_error *error);
/* Closes its links, frees it, which was malloc'ed; what the backend keeps of it must be gone. NULL is allowed. */
void hr_team_destroy(struct hr_team *team);

/* The number that is in an id: an index that the next team gets when this one has been removed. */
static inline int hr_team_number(int32_t id) {
    return id % HORO_TEAM_ID_STEP;
}

enum { HR_TEAM_NAME_BYTES = 160 };

/* "process set 1 (ranks 0, 2, 3)", the first few of many. Returns text, which has HR_TEAM_NAME_BYTES. */
const char *hr_team_name(const struct hr_team *team, char *text);

/* The member that has this rank in the job; -1: none has. */
int hr_team_member(const struct hr_team *team, int job_rank);

/*
 * Whether a rank has left the job, in whose record the log of the world ends: this other team ends with it, and that a
 * member of it is gone is no loss.
 */
static inline int hr_team_is_left(const struct hr_team *team) {
    return team->number != 0 && atomic_load(&team->node->arena.header->leave_at) != 0;
}

/* Slot `which` (0 or 1) of a member on this host: segment_bytes bytes, aligned to a cache line at least. */
static inline char *hr_team_slot(const struct hr_team *team, int local_rank, unsigned which) {
    const size_t slot = (size_t)team->index_of_local[local_rank] * 2 + which;
    return team->partition.slots + slot * team->partition.segment_bytes;
}

/* Wakes the members on this host but me, or the one that leads there, if they sleep. Any thread. */
void hr_team_wake_all(const struct hr_team *team);
static inline void hr_team_wake_leader(const struct hr_team *team) {
    hr_node_wake(team->node, team->index_of_local[0]);
}

/* Phases. Arrive at one, and ask whether all members on this host have arrived at it as often as I have. */
void hr_team_arrive(struct hr_team *team, enum hr_phase phase, unsigned parity);
int hr_team_reached(const struct hr_team *team, enum hr_phase phase, unsigned parity);

/*
 * Notes in team->suspect that the link to a host has failed. The rank there need not be the cause: it may have ended
 * because it had heard of another's death. Whoever runs the collective waits for a LOST message before it ends the
 * group.
 */
void hr_team_suspect_link(struct hr_team *team, int host);

/* Gives up all that is posted and closes the descriptors, on which the node must move nothing more. Any thread. */
void hr_team_close_links(struct hr_team *team);

/*
 * The hosts that have links with one another: no more than the algorithms need, so that the links of a rank grow with
 * the logarithm of the hosts. horo/bootstrap/host/grouping.py says the same in Python; tests hold both, and every
 * algorithm, to it.
 *
 *  - Control: leaders, along the binomial tree over host numbers. A host's parent is its number without the lowest bit.
 *  - Data: hosts whose numbers are a power of two apart, counted round the ring of all hosts, in one direction or the
 *    other. Rings and chains go to the next host; the doubling ones and the tree, from any root, go 1, 2, 4 ... hosts
 *    further (cross/).
 *
 * Whether two hosts of a team have a link on a channel; a host has none with itself.
 */
int hr_hosts_are_linked(enum hr_channel channel, int host_count, int host, int other);

/* ---- Building and dissolving a node from what the bootstrap hands over: node_setup.c ---- */

/*
 * Maps the arena, makes the transport. HORO_OK, or a status with *error set. The setup's descriptors stay the caller's
 * until hr_node_own, which cannot fail: once everything else stands. fini closes what is owned.
 */
hr_status hr_node_init(struct hr_node *node, const horo_setup *setup, struct hr_team *world, struct hr_error *error);
void hr_node_own(struct hr_node *node, const horo_setup *setup);
void hr_node_fini(struct hr_node *node);
/* In a forked child: closes the child's copies of the descriptors and nothing else. */
void hr_node_close_fds(struct hr_node *node);

/*
 * Connects a team that has members on several hosts, over duplicates of descriptors as in horo_team_setup, which stay
 * the caller's until it closes them. The node takes the transport in later (hr_node_add_transport). HORO_OK, or a
 * status with *error set.
 */
hr_status hr_node_connect_team(struct hr_team *team, const int32_t *control_fds, const int32_t *data_fds,
                               struct hr_error *error);
void hr_node_close_links(const struct hr_node *node, int host_count, const int32_t *control_fds,
                         const int32_t *data_fds);

#endif
