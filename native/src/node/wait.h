/*
 * The one way to wait. A wait spins while spinning may pay, then says in its arena block that it sleeps, looks once
 * more, and sleeps on that word. In a job on several hosts it sleeps in poll(), on its eventfd and the transport's
 * descriptors, at most for a moment while MPI, which has no descriptor, is at work (hr_transport_poll_within_ns).
 * Whoever changes what others may wait for calls hr_node_wake_all, which wakes those that say they sleep. The handshake
 * is Dekker's: both sides store first and load second, sequentially consistent, so at least one sees the other. Deaths
 * wake all, see watch.h.
 */
#ifndef HR_NODE_WAIT_H
#define HR_NODE_WAIT_H

#include <poll.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>

#include "arena/arena.h"

struct hr_node;

/* The word or the descriptors of a sleep. They are its thread's own: the driver may go on meanwhile. */
struct hr_sleep {
    _Atomic uint32_t *word; /* of the arena, while it has the value; NULL: on descriptors */
    uint32_t value;
    struct pollfd *fds; /* [capacity]: my eventfd, the links */
    size_t capacity, count;
    int64_t deadline_ns; /* 0: none */
    int64_t look_ns;     /* at most so long, for what no descriptor tells of; -1: any time */
};

/* Makes room for so many descriptors. HORO_OK or HORO_ERR_RESOURCE, which changes nothing. */
hr_status hr_sleep_reserve(struct hr_sleep *sleep, size_t count);

/* The condition of a wait: looks, and does what can be done at once; 1 ends the wait. Never blocks. */
typedef int (*hr_ready)(struct hr_node *node, void *arg);

/* HORO_OK when ready says so, HORO_IN_PROGRESS behind deadline_ns (0: none) or a signal. The time is now_ns. */
int hr_node_wait(struct hr_node *node, hr_ready ready, void *arg, int64_t now_ns, int64_t spin_ns, int64_t deadline_ns);

/*
 * The parts of a sleep, for a thread that lets others drive meanwhile. The first is the driver's: 1 if something is
 * ready; else the sleep, which has room for two descriptors from the beginning, is left with room for one behind its
 * count. The second is the thread's, whoever drives: what poll() returns. The third is the next driver's: this rank
 * sleeps no longer; without a sleep it leaves what has come to the next one.
 */
int hr_node_prepare_sleep(struct hr_node *node, hr_ready ready, void *arg, struct hr_sleep *sleep, int64_t deadline_ns);
int hr_node_sleep(const struct hr_sleep *sleep);
void hr_node_end_sleep(struct hr_node *node, const struct hr_sleep *sleep);

/*
 * ---- Contention ----
 *
 * Programs beside the ranks of this host want their cores.
 *
 * Among ranks that wait, a yield takes microseconds. One that lets in a program that computes takes a slice of time,
 * milliseconds, and since Linux 6.18 whoever yields is set back by a slice of its own each time. A rank that sleeps
 * instead is let in again as soon as it is woken. So once yields have taken a large part of a rank's time, the waits of
 * all ranks of this host do without for a while: they look for a few microseconds and sleep. Then they try again, which
 * costs a few slices where nothing has changed; so the next while is longer.
 */

/* Time that long yields have taken of this rank since the first of them. */
struct hr_losses {
    int64_t since_ns, lost_ns;
};

/* Learns from a yield that took so long. */
void hr_contention_note(struct hr_contention *contention, struct hr_losses *losses, int64_t yield_ns, int64_t now_ns);

/* Whether nobody here yields now, since other programs want the cores. Any thread. */
int hr_node_is_contended(const struct hr_node *node, int64_t now_ns);

/*
 * ---- The choice of a core ----
 *
 * Ranks that hand one core to and fro by yielding look well placed to the scheduler: whoever it could move ran a moment
 * ago and is taken to have a warm cache there. So they may share a core for seconds beside one that idles, and every
 * wait then costs two switches. Where the setup asks for it (leaves_crowded_cores), a wait that spins looks once in a
 * while where the ranks of this host run, and moves its thread off a crowded core. Elsewhere nothing here makes a
 * system call or changes anything: threads belong to the application.
 */

struct hr_core_choice {
    int enabled;
    int64_t next_ns;  /* when to look again */
    int64_t pause_ns; /* after a move; longer each time, since another program may be what brings us together again */
    int crowded;      /* the last look found a better core */
    int *core_of;     /* [ranks of this host] scratch */
    _Atomic uint64_t moves; /* a counter */
};

/*
 * The core that rank `me` of `count` should move to, or -1 to stay. core_of[i]: where a rank runs, -1: it needs no core
 * now. Only the last rank on a core moves, so that no two leave for the same place, and only to where it leaves fewer
 * ranks together.
 */
int hr_core_choose(const int *core_of, int count, int me, const cpu_set_t *allowed);

/* Tells the others of this host where I run: for a rank whose choice is enabled. */
void hr_core_publish(const struct hr_arena *arena);
/* Whether another rank is at work on the core of this one. */
int hr_core_is_shared(const struct hr_arena *arena);

#endif
