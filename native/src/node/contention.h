/*
 * Contention: programs beside the ranks of this host want their cores.
 *
 * Among ranks that wait, a yield takes microseconds. One that lets in a program that computes takes a slice of time,
 * milliseconds, and since Linux 6.18 whoever yields is set back by a slice of its own each time. A rank that sleeps
 * instead is let in again as soon as it is woken. So once yields have taken a large part of a rank's time, the waits of
 * all ranks of this host do without for a while: they look for a few microseconds and sleep. Then they try again, which
 * costs a few slices where nothing has changed; so the next while is longer.
 */
#ifndef HR_NODE_CONTENTION_H
#define HR_NODE_CONTENTION_H

#include "arena/arena.h"

/* Time that long yields have taken of this rank since the first of them. */
struct hr_losses {
    int64_t since_ns, lost_ns;
};

/* Learns from a yield that took so long. */
void hr_contention_note(struct hr_contention *contention, struct hr_losses *losses, int64_t yield_ns, int64_t now_ns);

/* Whether waits do without yields now. */
int hr_contention_is_on(const struct hr_contention *contention, int64_t now_ns);

#endif
