/*
 * The way of a collective's segments over several hosts. Every segment passes five stations:
 *
 *     filled    my contribution is where the others of this host look for it
 *     met       so are the contributions of all others of this host (reduced, where something is)
 *     begun     it travels between hosts
 *     finished  it has travelled
 *     drained   I have taken out what I need
 *
 * There is no fixed order of these between segments: whatever can be done is done, what the link waits for first, and only when
 * nothing can, one wait covers it all. So a segment begins to travel when the one before has been posted to its end, and the link
 * never idles between two; meanwhile the next is filled. Two slots hold two segments.
 */
#ifndef HR_COLLECTIVE_JOURNEY_H
#define HR_COLLECTIVE_JOURNEY_H

#include "collective/cross.h"
#include "collective/group.h"

enum { HR_TRAVELLING_MAX = 2 };

/*
 * What a collective does with segment k at the stations; `call` is its own. HORO_OK, or a code that ends the call. None waits long:
 * the phases that a station needs have been reached.
 */
struct hr_journey_ops {
    int (*fill)(void *call, size_t k);   /* once all have drained k - 2; arrives at HR_PHASE_FILLED */
    int (*reduce)(void *call, size_t k); /* once all have filled k; NULL: nothing to do */
    /* hr_cross_ops.begin for what I carry of k. */
    int (*begin)(void *call, size_t k, struct hr_cross *cross);
    void (*finish)(void *call, size_t k); /* arrives at HR_PHASE_REDUCED */
    int (*drain)(void *call, size_t k);  /* once all have finished k; arrives at HR_PHASE_DRAINED */
};

struct hr_journey {
    struct hr_group *group;
    const struct hr_journey_ops *ops;
    void *call;
    size_t segments;
    uint64_t first; /* number of its first segment */
    int carries;    /* this rank moves data between hosts; else begin is not called */

    /* Private. Each of these counts segments and is at most the one before; filled is at most drained + 2. */
    size_t filled, met, begun, finished, drained;
    int moved; /* 0: nothing yet in this wait; else what came of the last attempt */
    struct hr_cross cross[HR_TRAVELLING_MAX]; /* segment k uses entry k % HR_TRAVELLING_MAX */
};

static inline unsigned hr_journey_parity(const struct hr_journey *journey, size_t k) {
    return (unsigned)((journey->first + k) & 1);
}

/* All segments to their end. HORO_OK, or the code with which the group or the call ended; then nothing is posted any more. */
int hr_journey_run(struct hr_journey *journey);

/* One call between hosts to its end: turns a lost transport peer into the end of the group. HORO_OK, or the code. */
int hr_cross_run(struct hr_group *group, struct hr_cross *cross);

/* Makes group->cross_scratch at least so large, while nothing travels: what was in it is lost. HORO_OK or HORO_ERR_RESOURCE. */
int hr_cross_reserve(struct hr_group *group, size_t bytes);

#endif
