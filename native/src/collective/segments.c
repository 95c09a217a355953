#include "collective/segments.h"

#include <stdlib.h>

#include "base/clock.h"
#include "base/cut.h"

hr_status hr_segments_reserve_scratch(struct hr_team *team, size_t bytes) {
    const size_t whole = hr_round_up(bytes, HR_CROSS_ALIGNMENT);
    if (whole <= team->cross_scratch_bytes) {
        return HORO_OK;
    }
    free(team->cross_scratch);
    team->cross_scratch_bytes = 0;
    team->cross_scratch = aligned_alloc(HR_CROSS_ALIGNMENT, whole);
    if (team->cross_scratch == NULL) {
        return HORO_ERR_RESOURCE;
    }
    team->cross_scratch_bytes = whole;
    return HORO_OK;
}

hr_status hr_segments_choose_unit(const struct hr_team *team, size_t shares, size_t *unit, size_t *rounding) {
    const size_t segment = team->tuning.segment;
    *unit = 2 * shares * HR_LINE <= segment / 2 ? HR_LINE : 1;
    *rounding = 2 * shares * *unit;
    return *rounding < segment ? HORO_OK : HORO_ERR_RESOURCE;
}

static struct hr_cross *cross_of(struct hr_segments *segments, size_t k) {
    return &segments->cross[k % HR_SEGMENTS_TRAVELLING_MAX];
}

static int phase_reached(const struct hr_segments *segments, enum hr_phase phase, size_t k) {
    return hr_team_reached(segments->team, phase, hr_segments_parity(segments, k));
}

static void arrive(struct hr_segments *segments, enum hr_phase phase, size_t k) {
    hr_team_arrive(segments->team, phase, hr_segments_parity(segments, k));
}

/* ---- The stages; each returns HR_MOVED, HR_STILL or a status ---- */

static int fill(struct hr_segments *segments) {
    if (!phase_reached(segments, HR_PHASE_DRAINED, segments->filled)) {
        return HR_STILL;
    }
    const size_t k = segments->filled++;
    const int is_timed = segments->trial.costs != NULL && k == 0;
    const int64_t begun_ns = is_timed ? hr_now_ns() : 0;
    segments->ops->fill(segments, k);
    arrive(segments, HR_PHASE_FILLED, k);
    if (is_timed) {
        segments->trial.ns = hr_now_ns() - begun_ns;
    }
    return HR_MOVED;
}

static int make_ready(struct hr_segments *segments) {
    const int is_filled = segments->begins_alone || (segments->is_filled_ahead && segments->ready == 0);
    if (!is_filled && !phase_reached(segments, HR_PHASE_FILLED, segments->ready)) {
        return HR_STILL;
    }
    if (segments->trial.costs != NULL && segments->ready == 0) {
        segments->trial.ns = hr_now_ns() - segments->trial.ns;
    }
    if (segments->ops->reduce != NULL) {
        segments->ops->reduce(segments, segments->ready);
    }
    segments->ready++;
    return HR_MOVED;
}

static void finish(struct hr_segments *segments) {
    if (segments->ops->finish != NULL) {
        segments->ops->finish(segments, segments->finished);
    }
    if (segments->drain_phase == HR_PHASE_REDUCED) {
        arrive(segments, HR_PHASE_REDUCED, segments->finished);
    }
    segments->finished++;
}

static int drain(struct hr_segments *segments) {
    const size_t k = segments->drained;
    const int exchanges = segments->ops->exchange != NULL && k + 2 < segments->count;
    if (segments->drain_phase == HR_PHASE_REDUCED && !phase_reached(segments, HR_PHASE_REDUCED, k)) {
        return HR_STILL;
    }
    if (exchanges) {
        segments->ops->exchange(segments, k);
        segments->filled++;
        arrive(segments, HR_PHASE_FILLED, k);
    } else {
        segments->ops->drain(segments, k);
        arrive(segments, HR_PHASE_DRAINED, k);
    }
    segments->drained++;
    return HR_MOVED;
}

/* ---- One host ---- */

/* fill k + 1, reduce k, drain k; where draining fills too, reduce k + 1, exchange k. */
static int advance_on_one_host(struct hr_segments *segments) {
    const size_t fills_ahead = segments->drained == 0 || segments->ops->exchange == NULL ? 1 : 0;
    const size_t reduces_ahead = segments->ops->exchange == NULL ? 0 : 1;
    if (segments->filled < segments->count && segments->filled <= segments->drained + fills_ahead) {
        return fill(segments);
    }
    if (segments->ready < segments->count && segments->ready <= segments->drained + reduces_ahead) {
        const int moved = make_ready(segments);
        if (moved == HR_MOVED) {
            segments->begun++;
            finish(segments);
        }
        return moved;
    }
    return drain(segments);
}

/* ---- Between hosts ---- */

static int advance_between_hosts(struct hr_segments *segments) {
    for (size_t k = segments->finished; k < segments->begun; k++) {
        struct hr_cross *cross = cross_of(segments, k);
        const size_t before = cross->sent + cross->finished;
        const int status = hr_cross_progress(cross);
        segments->team->pieces += cross->sent + cross->finished - before;
        if (status == HORO_ERR_PEER_LOST) {
            hr_team_suspect_link(segments->team, cross->lost_host);
        }
        HR_TRY(status);
    }
    if (segments->finished < segments->begun && cross_of(segments, segments->finished)->status == HORO_OK) {
        finish(segments);
        return HR_MOVED;
    }
    if (segments->begun < segments->ready &&
        (segments->begun == segments->finished || hr_cross_all_posted(cross_of(segments, segments->begun - 1)))) {
        struct hr_cross *cross = cross_of(segments, segments->begun);
        cross->status = HORO_OK; /* of a rank that carries nothing */
        if (segments->carries) {
            segments->ops->begin(segments, segments->begun, cross);
        }
        segments->begun++;
        return HR_MOVED;
    }
    int moved = segments->drained < segments->finished ? drain(segments) : HR_STILL;
    if (moved == HR_STILL && segments->ready < segments->filled) {
        moved = make_ready(segments);
    }
    if (moved == HR_STILL && segments->filled < segments->count &&
        segments->filled < segments->drained + HR_SEGMENTS_TRAVELLING_MAX) {
        moved = fill(segments);
    }
    return moved;
}

/* ---- The task ---- */

static int progress(struct hr_task *task) {
    struct hr_segments *segments = (struct hr_segments *)task;
    if (segments->drained == segments->count) {
        return HR_DONE;
    }
    const int moved = segments->ops->begin == NULL ? advance_on_one_host(segments) : advance_between_hosts(segments);
    if (moved != HR_MOVED || segments->drained < segments->count) {
        return moved;
    }
    if (segments->trial.costs != NULL) {
        hr_store_learn(&segments->trial, hr_now_ns() - segments->trial.ns);
    }
    return HR_DONE;
}

static void cancel(struct hr_task *task) {
    const struct hr_segments *segments = (const struct hr_segments *)task;
    struct hr_transport *transport = segments->team->transport;
    if (transport != NULL && segments->ops != NULL && segments->ops->begin != NULL) {
        transport->ops->abandon(transport, HR_CHANNEL_DATA); /* it lies in the task and in memory that goes away */
    }
}

static int fill_ahead(struct hr_task *task) {
    struct hr_segments *segments = (struct hr_segments *)task;
    if (segments->count == 0 || segments->ops->begin != NULL) {
        return 0;
    }
    segments->team->is_ahead = 1;
    const int moved = fill(segments);
    segments->team->is_ahead = 0;
    return moved == HR_MOVED;
}

static void show_ahead(struct hr_task *task) {
    struct hr_segments *segments = (struct hr_segments *)task;
    segments->is_filled_ahead = 1;
    arrive(segments, HR_PHASE_FILLED, 0);
}

void hr_segments_begin(struct hr_segments *segments, const struct hr_segments_ops *ops, enum hr_phase drain_phase,
                       size_t count) {
    segments->task = (struct hr_task){progress, cancel, fill_ahead, show_ahead};
    segments->ops = ops;
    segments->drain_phase = drain_phase;
    segments->count = count;
    segments->first = segments->team->segment;
    segments->team->segment += count;
}
