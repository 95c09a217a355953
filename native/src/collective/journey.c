#include "collective/journey.h"

#include <stdlib.h>

#include "base/cut.h"

static int cross_ready(struct hr_group *group, void *arg) {
    (void)group;
    struct hr_cross *cross = arg;
    return cross->ops->progress(cross) != HORO_IN_PROGRESS;
}

int hr_cross_run(struct hr_group *group, struct hr_cross *cross) {
    const int ended = hr_group_finish(group, cross_ready, cross);
    if (ended != HORO_OK) {
        hr_group_abandon_data(group);
        return ended;
    }
    const int status = cross->ops->progress(cross);
    if (status == HORO_ERR_PEER_LOST) {
        hr_group_suspect_link(group);
        hr_group_abandon_data(group); /* the transport still moves what other peers send */
    }
    return status;
}

int hr_cross_reserve(struct hr_group *group, size_t bytes) {
    const size_t whole = hr_round_up(bytes, HR_CROSS_ALIGNMENT);
    if (whole <= group->cross_scratch_bytes) {
        return HORO_OK;
    }
    free(group->cross_scratch);
    group->cross_scratch_bytes = 0;
    group->cross_scratch = aligned_alloc(HR_CROSS_ALIGNMENT, whole);
    if (group->cross_scratch == NULL) {
        return HORO_ERR_RESOURCE;
    }
    group->cross_scratch_bytes = whole;
    return HORO_OK;
}

static struct hr_cross *cross_of(struct hr_journey *journey, size_t k) {
    return &journey->cross[k % HR_TRAVELLING_MAX];
}

static int begin(struct hr_journey *journey, size_t k) {
    struct hr_cross *cross = cross_of(journey, k);
    if (!journey->carries) {
        cross->status = HORO_OK;
        return HORO_OK;
    }
    return journey->ops->begin(journey->call, k, cross);
}

/* What is between hosts. 1: a segment has finished or begun; 0: neither can yet; an error. */
static int travel(struct hr_journey *journey) {
    for (size_t k = journey->finished; k < journey->begun; k++) {
        struct hr_cross *cross = cross_of(journey, k);
        const int status = cross->status == HORO_IN_PROGRESS ? cross->ops->progress(cross) : cross->status;
        if (status < 0) {
            return status;
        }
    }
    if (journey->finished < journey->begun && cross_of(journey, journey->finished)->status == HORO_OK) {
        journey->ops->finish(journey->call, journey->finished++);
        return 1;
    }
    if (journey->begun < journey->met &&
        (journey->begun == journey->finished || hr_cross_all_posted(cross_of(journey, journey->begun - 1)))) {
        HR_TRY(begin(journey, journey->begun));
        journey->begun++;
        return 1;
    }
    return 0;
}

/* Who is alone on its host waits for nobody there. */
static int phase_reached(const struct hr_journey *journey, enum hr_phase phase, size_t k) {
    return journey->group->local_size == 1 || hr_group_reached(journey->group, phase, hr_journey_parity(journey, k));
}

/* Takes one segment one station further, without blocking. 1, 0 if none can go on now, or an error. */
static int advance(struct hr_journey *journey) {
    const struct hr_journey_ops *ops = journey->ops;
    const int travelled = travel(journey);
    if (travelled != 0) {
        return travelled;
    }
    if (journey->drained < journey->finished && phase_reached(journey, HR_PHASE_REDUCED, journey->drained)) {
        HR_TRY(ops->drain(journey->call, journey->drained));
        journey->drained++;
        return 1;
    }
    if (journey->met < journey->filled && phase_reached(journey, HR_PHASE_FILLED, journey->met)) {
        HR_TRY(ops->reduce == NULL ? HORO_OK : ops->reduce(journey->call, journey->met));
        journey->met++;
        return 1;
    }
    if (journey->filled < journey->segments && journey->filled < journey->drained + HR_TRAVELLING_MAX &&
        phase_reached(journey, HR_PHASE_DRAINED, journey->filled)) {
        HR_TRY(ops->fill(journey->call, journey->filled));
        journey->filled++;
        return 1;
    }
    return 0;
}

/* A wait may ask again after it has heard yes, so the answer stays. */
static int advances(struct hr_group *group, void *arg) {
    (void)group;
    struct hr_journey *journey = arg;
    if (journey->moved == 0) {
        journey->moved = advance(journey);
    }
    return journey->moved != 0;
}

static int run_segments(struct hr_journey *journey) {
    struct hr_group *group = journey->group;
    while (journey->drained < journey->segments) {
        journey->moved = 0;
        HR_TRY(hr_group_finish(group, advances, journey));
        if (journey->moved == HORO_ERR_PEER_LOST) {
            hr_group_suspect_link(group);
        }
        HR_TRY(journey->moved);
        (void)group->transport->ops->progress(group->transport); /* the link goes on between two stations */
    }
    return HORO_OK;
}

int hr_journey_run(struct hr_journey *journey) {
    const int status = run_segments(journey);
    if (status != HORO_OK) {
        hr_group_abandon_data(journey->group); /* what is posted lies in `journey` and in memory that goes away */
    }
    return status;
}
