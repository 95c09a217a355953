/*
 * The ranks that work together, from the place of one of them: who sits where, the arena, the transport, and the one way to wait.
 *
 * Waiting. A wait spins while spinning may pay, then says in its arena block that it sleeps, looks once more, and sleeps in poll()
 * on its eventfd, its life lines and the transport's descriptors, at most for a moment while MPI, which has no descriptor, is at work
 * (hr_transport_poll_within_ns, poll_within_ns). Whoever changes what others may wait for calls hr_group_wake_all;
 * it writes the eventfd of those that say they sleep. The handshake is Dekker's: both sides store first and load second,
 * sequentially consistent, so at least one sees the other.
 *
 * All functions are called by the driver of the engine only, unless they say otherwise.
 */
#ifndef HR_COLLECTIVE_GROUP_H
#define HR_COLLECTIVE_GROUP_H

#include <stdatomic.h>

#include "arena/arena.h"
#include "base/clock.h"
#include "base/log.h"
#include "collective/seat.h"
#include "kernel/kernel.h"
#include "mpi/mpi.h"
#include "transport/transport.h"

/* A wait that lasts so long has the links supervised meanwhile. */
#define HR_SUPERVISE_AFTER_NS 1000000000ll

/* How often whoever spins looks before it offers its core to others. */
enum { HR_LOOKS_PER_YIELD = 4 };

/* Phases of the arena algorithms; each exists per slot parity: phase + parity. */
enum hr_phase {
    HR_PHASE_FILLED = 0,  /* my slot holds what the others need */
    HR_PHASE_REDUCED = 2, /* my share of the result is in my slot */
    HR_PHASE_DRAINED = 4, /* I have read all I need from the slots */
};

struct hr_group {
    int rank, size;
    int host, host_count;
    int local_rank, local_size; /* local index and ranks of this host */
    int owner_count;            /* ranks of the smallest host: local index i < owner_count has links to its like elsewhere */
    int *host_of_rank;          /* [size] */
    int *rank_of_local;         /* [local_size] */
    int *rank_by_host;          /* [size] all ranks, those of host 0 first, each host's in order */
    int *leader_of_host;        /* [host_count] rank */
    int *host_size;             /* [host_count] */
    int *core_of;               /* [local_size] scratch of hr_seat_look */
    struct hr_seat seat;
    char **host_name_of_rank;   /* [size] */

    struct hr_arena arena;
    struct hr_transport *transport; /* NULL with one host */
    struct hr_mpi mpi;              /* without ops: none */
    int *wake_fds;                  /* [local_size] */
    int *owned_fds;                 /* all descriptors but the transport's, for closing */
    int owned_fd_count;
    _Atomic int *life_fds;          /* [local_size]; -1: none or closed; see hr_group_watch */
    struct pollfd *poll_fds;
    size_t poll_capacity;

    const struct hr_kernel *kernel;
    const void **sources; /* [local_size] scratch for the kernels */
    char *cross_scratch;
    size_t cross_scratch_bytes;
    uint64_t segment;                    /* segments begun; its parity chooses the slot */
    uint64_t arrivals[HR_PHASE_COUNT];   /* mine, per phase and parity */
    int64_t store_cost[2];               /* smoothed picoseconds per byte with each enum hr_store; 0: not tried */
    uint64_t store_choices;              /* passes that were measured */

    int64_t peer_timeout_ns;
    int64_t stall_warning_ns;    /* 0: never */
    int64_t stall_shutdown_ns;   /* 0: never */
    int64_t poll_within_ns;      /* a condition is waited for that no event tells of: the longest sleep; 0: none is */
    int watching;                /* the transport, if there is one, supervises its links */
    struct hr_abort suspect;     /* see hr_group_suspect_link */
    struct hr_log log;
    _Atomic uint64_t sleeps, wakes, moves; /* counters */
};

/* The condition of a wait: looks, may advance state of its own, never blocks. */
typedef int (*hr_ready)(struct hr_group *group, void *arg);

/* HORO_OK when ready says so, HORO_IN_PROGRESS when deadline_ns (monotonic; 0: none) has passed or a signal came. */
int hr_group_wait(struct hr_group *group, hr_ready ready, void *arg, int64_t spin_ns, int64_t deadline_ns);

/* Wakes a local rank, or all of them but me, if they sleep. Any thread. */
void hr_group_wake(struct hr_group *group, int local_rank);
void hr_group_wake_all(struct hr_group *group);

/* Wakes the leader even if its background thread is parked, which hr_group_wake does not. Any thread. */
void hr_group_call_leader(struct hr_group *group);

/* Ends the group: the first reason counts. Wakes everybody, who all look for it (hr_ready). Any thread. */
void hr_group_abort(struct hr_group *group, int code, int rank, enum hr_abort_reason reason);

/*
 * Notes in group->suspect whom the transport has lost. That rank need not be the cause: it may have ended because it had
 * heard of another's death. Whoever runs the collective waits for news of that before it ends the group.
 */
void hr_group_suspect_link(struct hr_group *group);

/* After the end of the group: nothing posted for data may be touched any more. */
void hr_group_abandon_data(struct hr_group *group);

/* Looks at the life lines that poll() reported in fds[0..count). Any thread. */
void hr_group_watch(struct hr_group *group, const struct pollfd *fds, size_t count);
/* Fills fds with the life lines still open; returns how many. Any thread. */
size_t hr_group_life_fds(const struct hr_group *group, struct pollfd *fds);

/* 0, or 1 + the rank whose departure closed the log: nothing more will be agreed on. */
int hr_group_left(const struct hr_group *group);

/* "rank 3 (h2)". Returns out. */
char *hr_group_name_rank(const struct hr_group *group, int rank, char *out, size_t out_bytes);

/*
 * Maps the arena, makes the transport. HORO_OK, or a status with *error set. The setup's descriptors stay the caller's until
 * hr_group_own, which cannot fail: once everything else stands. fini closes what is owned.
 */
int hr_group_init(struct hr_group *group, const horo_setup *setup, struct hr_error *error);
void hr_group_own(struct hr_group *group, const horo_setup *setup);
void hr_group_fini(struct hr_group *group);
/* In a forked child: closes the child's copies of the descriptors and nothing else. */
void hr_group_close_fds(struct hr_group *group);

/* Turns the supervision of links on or off, if that is a change. */
void hr_group_supervise(struct hr_group *group, int enabled);

/* Phases. Arrive at one, and ask whether all local ranks have arrived at it as often as I have. */
void hr_group_arrive(struct hr_group *group, enum hr_phase phase, unsigned parity);
int hr_group_reached(const struct hr_group *group, enum hr_phase phase, unsigned parity);
/* The local rank that has passed the fewest phases, if fewer than I have; else -1. */
int hr_group_find_late(const struct hr_group *group);

#endif
