/* Rank 0's part in autotuning: what it measures, where it searches, and the log of both. All of it is the driver's. */
#ifndef HR_ENGINE_TUNER_H
#define HR_ENGINE_TUNER_H

#include "engine/meter.h"
#include "engine/search.h"
#include "horo.h"

_Static_assert((int)HR_SEARCH_KNOBS == (int)HORO_KNOB_COUNT, "a point has a value for each knob");

/* The range that the values of a knob are chosen from. */
struct hr_knob_range {
    uint64_t low, high; /* powers of two; low is 0: only those that are added */
};

struct hr_tuner {
    struct hr_search search;
    struct hr_meter meter;
    uint64_t values[HORO_KNOB_COUNT][HR_SEARCH_VALUES_MAX];
    int log_fd; /* -1: none */
    int samples;
    int waits; /* the last choice is not in force yet: nothing is measured */
    uint64_t random; /* not 0: random points */
};

/*
 * Searches from autotune->start, of which no value is past HORO_KNOB_LIMIT, among the values that `ranges` gives each
 * knob and those of start and defaults. The log is written from hr_tuner_own_log on.
 */
void hr_tuner_init(struct hr_tuner *tuner, const horo_autotune *autotune, const uint64_t *start,
                   const uint64_t *defaults, const struct hr_knob_range *ranges);
/* One operation is done; name 0: it has none of its own. 1: other values are chosen, see hr_tuner_values. */
int hr_tuner_note(struct hr_tuner *tuner, uint64_t name, uint64_t bytes, int64_t now_ns);
/* The values of the point that is to be measured or, at the end, is the best. */
void hr_tuner_values(const struct hr_tuner *tuner, uint64_t *values);
static inline int hr_tuner_is_done(const struct hr_tuner *tuner) {
    return tuner->search.stage == HR_SEARCH_DONE;
}
/* They are in force. */
void hr_tuner_begin_point(struct hr_tuner *tuner);
void hr_tuner_own_log(struct hr_tuner *tuner, int fd);
void hr_tuner_close_log(struct hr_tuner *tuner);

#endif
