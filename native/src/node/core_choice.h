/*
 * The choice of a core for a thread that waits for the other ranks of its host.
 *
 * Ranks that hand one core to and fro by yielding look well placed to the scheduler: whoever it could move ran a moment
 * ago and is taken to have a warm cache there. So they may share a core for seconds beside one that idles, and every
 * wait then costs two switches. Where the setup asks for it (leaves_crowded_cores), a wait that spins looks once in a
 * while where the ranks of this host run, and moves its thread off a crowded core. Elsewhere nothing here makes a
 * system call or changes anything: threads belong to the application.
 */
#ifndef HR_NODE_CORE_CHOICE_H
#define HR_NODE_CORE_CHOICE_H

#include <sched.h>
#include <stdint.h>

#include "arena/arena.h"

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

/* Tells the others of this host where I run. */
void hr_core_publish(const struct hr_core_choice *choice, const struct hr_arena *arena);
/* Whether another rank is at work on the core of this one. */
int hr_core_is_shared(const struct hr_arena *arena);
/* Looks around if it is time to, and moves the calling thread if that helps. Its affinity is afterwards what it was. */
void hr_core_look(struct hr_core_choice *choice, const struct hr_arena *arena, int64_t now_ns);

#endif
