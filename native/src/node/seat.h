/*
 * Which core the driver of a rank sits on.
 *
 * Ranks that hand one core to and fro by yielding look well placed to the scheduler: whoever it could move ran a moment ago and is
 * taken to have a warm cache there. So they may share a core for seconds beside one that idles, and every wait then costs two switches.
 * A wait that spins therefore looks once in a while where the ranks of this host sit, and moves its thread off a crowded core.
 */
#ifndef HR_NODE_SEAT_H
#define HR_NODE_SEAT_H

#include <sched.h>
#include <stdint.h>

struct hr_node;

struct hr_seat {
    int64_t next_ns;  /* when to look again */
    int64_t pause_ns; /* after a move; longer each time, since another program may be what brings us together again */
    int crowded;      /* the last look found a better core */
};

/*
 * The core that rank `me` of `count` should move to, or -1 to stay. core_of[i]: where a rank sits, -1: it needs no core now.
 * Only the last rank on a core moves, so that no two leave for the same place, and only to where it leaves fewer ranks together.
 */
int hr_seat_choose(const int *core_of, int count, int me, const cpu_set_t *allowed);

/* Tells the others of this host where I sit. */
void hr_seat_show(struct hr_node *node);
/* Looks around if it is time to, and moves the calling thread if that helps. Its affinity is afterwards what it was. */
void hr_seat_look(struct hr_node *node, int64_t now_ns);

#endif
