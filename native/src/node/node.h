/*
 * One rank's place in the job, one per context: who it is, the arena of its host, the transport, and the one way to
 * wait. Nothing here knows of collectives or of sets of ranks; those are teams (team.h).
 *
 * All functions are called by the driver of the engine only, unless they say otherwise.
 */
#ifndef HR_NODE_NODE_H
#define HR_NODE_NODE_H

#include <stdatomic.h>

#include "arena/arena.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/recorder.h"
#include "kernel/kernel.h"
#include "mpi/mpi.h"
#include "node/wait.h"
#include "transport/transport.h"

/* A wait that lasts so long has the links supervised meanwhile. */
#define HR_SUPERVISE_AFTER_NS 1000000000ll

/* Counters of horo_read_counters. */
struct hr_counts {
    _Atomic uint64_t requests, cache_hits, batches, counted, tensors, bytes, messages_sent, link_bytes;
};

struct hr_node {
    int rank, size, host_count; /* of the job */
    const int64_t *_Atomic step; /* as horo_show_step; NULL: none is shown */
    int local_rank, local_size; /* local index and ranks of this host */
    int *rank_of_local;         /* [local_size], its memory that of all other lists of this length */
    char **host_name_of_rank;   /* [size] */
    struct hr_core_choice core_choice;

    struct hr_arena arena;
    struct hr_transport **transports; /* [transport_count] of the teams that have members on several hosts */
    int transport_count;
    unsigned looks; /* of hr_node_progress */
    int looks_at_all; /* before a sleep */
    int is_core_wanted; /* the last yield of a wait has let somebody else run */
    int sleeps_under_contention; /* see wait.h */
    struct hr_losses losses;
    uint64_t proof[HR_PROOF_WORDS]; /* see collective/direct.c */
    struct hr_mpi mpi;              /* without ops: none */
    const struct hr_kernel *kernel;
    int *wake_fds;         /* [local_size]; NULL: all ranks are on this host, and woken through the arena */
    int *life_fds;         /* [local_size]; -1: none */
    int arena_fd;
    int owns_fds;          /* the three above: they are closed at the end */
    struct horo_watch *watch;     /* see watch.h; NULL: there are no life lines */
    struct hr_node *next_watched;
    int sockets_per_peer; /* of data links */
    struct hr_sleep sleep; /* the driver's */

    int64_t peer_timeout_ns;
    int64_t stall_warning_ns;  /* 0: never */
    int64_t stall_shutdown_ns; /* 0: never */
    int64_t poll_within_ns;    /* a GPU is waited for, of which no event tells: the longest sleep; 0: it is not */
    _Atomic uint32_t asked;    /* questions passed to the log */
    int watching;              /* the transport, if there is one, supervises its links */
    struct hr_log log;
    struct hr_recorder recorder;
    struct hr_counts counts;
    _Atomic uint64_t sleeps, wakes; /* counters, too */
};

/* Wakes a local rank, or all of them but me, if they sleep. Any thread. */
void hr_node_wake(struct hr_node *node, int local_rank);
void hr_node_wake_all(struct hr_node *node);

/*
 * The number of looks between two at what is quiet: a transport, which costs a system call per link, or what a team has
 * in the arena, lines of memory that are all in the way of one another.
 */
enum { HR_LOOKS_PER_QUIET_LOOK = 16 };

/* Whether this look is one at the quiet thing of this number, too. All are looked at before a sleep. */
static inline int hr_node_looks_at_quiet(const struct hr_node *node, int number) {
    return node->looks_at_all || (node->looks + (unsigned)number) % HR_LOOKS_PER_QUIET_LOOK == 0;
}

/* Moves what can be moved on all transports, the quiet ones in turn; 1 if something was. */
int hr_node_progress(struct hr_node *node);

/* Takes a team's transport in, or out. HORO_OK or HORO_ERR_RESOURCE, which changes nothing. */
hr_status hr_node_add_transport(struct hr_node *node, struct hr_transport *transport);
void hr_node_drop_transport(struct hr_node *node, const struct hr_transport *transport);

/*
 * Wakes the background thread of a rank of the host where it is parked: it looks whether it must drive. It sleeps while
 * the count of calls is what it was before its last look. Any thread.
 */
void hr_node_call(struct hr_node *node, int local_rank);

/*
 * Asks a rank of the host, which waits for nothing, where its program stands. Whichever thread is woken there passes
 * that to the log, whoever computes. Any thread.
 */
void hr_node_ask(struct hr_node *node, int local_rank);
/* To the log, what this rank has been asked since. Before each sleep, by any thread. */
void hr_node_pass_questions(struct hr_node *node);

/* Ends the group: the first reason counts. Wakes everybody, who all look for it (hr_ready). Any thread. */
void hr_node_abort(struct hr_node *node, int code, int rank, enum hr_abort_reason reason);
/* The same for a reason that another rank has found. */
void hr_node_pass_abort(struct hr_node *node, struct hr_abort end);
/* The same by this rank, with the sentence that everybody is told: its program ended with an error, and the like. */
void hr_node_end(struct hr_node *node, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* The life line to a rank of the host has ended. Any thread. */
void hr_node_lose(struct hr_node *node, int local_rank);

/*
 * Gives memory back that a transport may have had: `release` is called with it now, or never where MPI still holds some
 * and may touch it. It is better lost than written to when it is somebody else's.
 */
void hr_node_bury(const struct hr_node *node, void *memory, void (*release)(void *memory));

/* "rank 3 (h2)". Returns out. */
char *hr_node_name_rank(const struct hr_node *node, int rank, char *out, size_t out_bytes);

/* Turns the supervision of links on or off, if that is a change. */
void hr_node_supervise(struct hr_node *node, int enabled);

#endif
