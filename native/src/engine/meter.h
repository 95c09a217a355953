/*
 * The sample of the autotuner: the time that a byte takes, from the median of some steps of the program, whole steps
 * and by the wall clock. So what it says holds the computation, too, and all that overlaps with it, which is what a
 * user waits for; and a pause now and then (a checkpoint, a validation) changes nothing.
 *
 * A step is what lies between two operations of one name, the *anchor*: of all that come again the largest. Operations
 * without a name of their own are told apart by their size. Pure: no clock, no lock, no allocation.
 */
#ifndef HR_ENGINE_METER_H
#define HR_ENGINE_METER_H

#include <stddef.h>
#include <stdint.h>

enum {
    HR_METER_STEPS_MAX = 1000, /* of one sample */
    HR_METER_NAMES = 1024,     /* of which the anchor is chosen; a power of two */
    HR_METER_SKIPPED = 2,      /* steps after a change that do not count: the one that it falls into, and the next */
};

struct hr_meter_name {
    uint64_t key; /* 0: free */
    uint64_t bytes;
    uint32_t seen;
};

struct hr_meter {
    int steps;         /* of a sample */
    uint64_t anchor;   /* 0: none has been chosen */
    int64_t step_ns;   /* when the current step began */
    uint64_t bytes;    /* in it so far, or since the search for an anchor began */
    uint64_t step_bytes; /* of the last that counted; until there is one, what came before the anchor was chosen */
    int skipped;       /* steps still to skip */
    int count;
    double costs[HR_METER_STEPS_MAX]; /* [count] nanoseconds per byte */
    struct hr_meter_name names[HR_METER_NAMES];
};

/* steps: 1 to HR_METER_STEPS_MAX. */
void hr_meter_init(struct hr_meter *meter, int steps);
/* Something that changes the time of a step has changed: the sample begins anew. */
void hr_meter_restart(struct hr_meter *meter);
/*
 * One operation of `bytes` is done; name: the hash of its name, 0: it has none of its own. Returns 1 where a sample is
 * complete, with nanoseconds per byte in *cost; the next one has begun.
 */
int hr_meter_note(struct hr_meter *meter, uint64_t name, uint64_t bytes, int64_t now_ns, double *cost);

#endif
