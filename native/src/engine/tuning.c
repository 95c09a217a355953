/*
 * The change, while a job runs, of what operations run with. Rank 0 chooses (tuner.h), a TUNE record in the log of all
 * ranks says it, and every rank changes over where it executes that record: between two tasks, so that sizes,
 * algorithms and turns of sockets are the same on all ranks in each. The root writes the record in front of a batch
 * only, so that nothing is sent for it while nothing is pending.
 *
 * Other teams run with the first values, so that none is left with what was tried out while it was made; those that
 * exist when the search ends get its result by a record in their own log, each from its root.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "engine/tuner.h"

enum { SEGMENT_UNIT = 4096, PIECE_MIN = 4096, PIECE_MAX = 1 << 22, DOUBLING_MIN = 1 << 10, DOUBLING_MAX = 1 << 20 };
enum { FUSION_MIN = 1 << 18, CARRIED_MIN = 1 << 9, CYCLE_MIN_US = 128, CYCLE_MAX_US = 1000000, OVERLAP_LAST = 2 };

/* ---- All ranks ---- */

static int fits(const struct hr_lane *lane, const uint64_t *values) {
    const uint64_t segment = values[HORO_KNOB_SEGMENT];
    const uint64_t sockets = values[HORO_KNOB_SOCKETS];
    for (int k = 0; k < HORO_KNOB_COUNT; k++) {
        if (values[k] > HORO_KNOB_LIMIT) {
            return 0;
        }
    }
    return segment > 0 && segment % SEGMENT_UNIT == 0 && segment <= lane->node->arena.segment_bytes && sockets > 0 &&
           sockets <= (uint64_t)lane->node->sockets_per_peer && values[HORO_KNOB_PIECE] >= PIECE_MIN &&
           values[HORO_KNOB_CARRIED] <= HR_CARRIED_MAX && values[HORO_KNOB_CYCLE] <= CYCLE_MAX_US &&
           values[HORO_KNOB_OVERLAP] <= OVERLAP_LAST;
}

int hr_lane_tune(struct hr_lane *lane, const uint64_t *values) {
    struct hr_team *team = lane->team;
    struct hr_transport *transport = team->transport;
    if (!fits(lane, values)) {
        return HORO_ERR_INTERNAL;
    }
    team->tuning.segment = (size_t)values[HORO_KNOB_SEGMENT];
    team->tuning.piece = (size_t)values[HORO_KNOB_PIECE];
    team->tuning.doubling = (size_t)values[HORO_KNOB_DOUBLING];
    team->tuning.carried = (size_t)values[HORO_KNOB_CARRIED];
    if (transport != NULL && transport->ops->use_sockets != NULL) {
        transport->ops->use_sockets(transport, (int)values[HORO_KNOB_SOCKETS]);
    }
    if (lane->is_leader) {
        lane->leader.agree.config.fusion_bytes = values[HORO_KNOB_FUSION];
        lane->leader.cycle_ns = (int64_t)values[HORO_KNOB_CYCLE] * 1000;
    }
    return HORO_OK;
}

/* The result of the search, for the teams that are led here. */
static void pass_on(struct hr_engine *engine, const uint64_t *values) {
    for (int i = 1; i < engine->lane_count; i++) {
        struct hr_lane *lane = engine->lanes[i];
        if (lane->is_root) {
            lane->leader.tuning.is_due = lane->leader.tuning.is_final = 1;
            memcpy(lane->leader.tuning.values, values, sizeof lane->leader.tuning.values);
        }
    }
}

int hr_engine_execute_tuning(struct hr_engine *engine, struct hr_lane *lane, const struct hr_wire_message *record) {
    struct hr_tuned *tuned = &engine->tuned;
    uint64_t values[HORO_KNOB_COUNT];
    if (!tuned->is_on || record->count != HORO_KNOB_COUNT) {
        return HORO_ERR_INTERNAL;
    }
    for (uint32_t k = 0; k < HORO_KNOB_COUNT; k++) {
        values[k] = hr_wire_knob(record, k);
    }
    HR_TRY(hr_lane_tune(lane, values));
    if (lane->team->number != 0) {
        return HORO_OK;
    }
    (void)pthread_mutex_lock(&engine->submission.lock);
    memcpy(tuned->values, values, sizeof values);
    tuned->is_final = record->is_final;
    (void)pthread_mutex_unlock(&engine->submission.lock);
    if (tuned->tuner != NULL) {
        hr_tuner_begin_point(tuned->tuner);
    }
    if (record->is_final) {
        memcpy(tuned->settled, values, sizeof values);
        pass_on(engine, values);
        hr_engine_fini_tuning(engine);
    }
    return HORO_OK;
}

void hr_engine_read_tuning(struct hr_engine *engine, uint64_t *values, int32_t *is_final) {
    (void)pthread_mutex_lock(&engine->submission.lock);
    memcpy(values, engine->tuned.values, sizeof engine->tuned.values);
    *is_final = engine->tuned.is_final;
    (void)pthread_mutex_unlock(&engine->submission.lock);
}

/* ---- The roots ---- */

int hr_leader_write_tuning(struct hr_lane *lane) {
    struct hr_due_tuning *due = &lane->leader.tuning;
    struct hr_buffer *out = &lane->leader.log_out;
    const size_t begin = hr_buffer_size(out);
    size_t mark;
    HR_TRY(hr_frame_begin(out, &mark));
    HR_TRY(hr_wire_put_tune(out, due->is_final, due->values, HORO_KNOB_COUNT));
    hr_frame_end(out, mark);
    due->is_due = 0;
    return hr_leader_hand_down(lane, begin);
}

/* ---- Rank 0 ---- */

void hr_engine_measure(struct hr_engine *engine, struct hr_lane *lane, struct hr_request *const *requests,
                       size_t count) {
    struct hr_tuner *tuner = engine->tuned.tuner;
    struct hr_due_tuning *due = &lane->leader.tuning;
    if (lane->team->number != 0 || tuner->waits) {
        return;
    }
    const int64_t now_ns = hr_now_ns();
    for (size_t i = 0; i < count; i++) {
        const int is_named = (requests[i]->call.flags & HORO_SUBMIT_TRANSIENT) == 0;
        if (hr_tuner_note(tuner, is_named ? requests[i]->name_hash : 0, (uint64_t)requests[i]->data_bytes, now_ns)) {
            due->is_due = 1;
            due->is_final = hr_tuner_is_done(tuner);
            hr_tuner_values(tuner, due->values);
            break;
        }
    }
    if (hr_tuner_is_done(tuner)) {
        hr_log(&engine->node->log, HORO_LOG_INFO,
               "autotuning has ended after %d samples: %.4g bytes/us, from %.4g at its start", tuner->samples,
               1000 / tuner->search.winner_cost, 1000 / tuner->search.first_cost);
    }
}

/* ---- Beginning and end ---- */

/* Fills in the values of a job that was told none, where `given` is past the limit. */
static void fill_in(const struct hr_lane *world, const horo_setup *setup, const uint64_t *given, uint64_t *values) {
    const struct hr_tuning *tuning = &world->team->tuning;
    const uint64_t own[HORO_KNOB_COUNT] = {
        [HORO_KNOB_SEGMENT] = tuning->segment,
        [HORO_KNOB_PIECE] = tuning->piece,
        [HORO_KNOB_SOCKETS] = 1,
        [HORO_KNOB_FUSION] = setup->fusion_bytes < HORO_KNOB_LIMIT ? setup->fusion_bytes : HORO_KNOB_LIMIT,
        [HORO_KNOB_DOUBLING] = tuning->doubling,
        [HORO_KNOB_CARRIED] = tuning->carried,
        [HORO_KNOB_CYCLE] = (uint64_t)setup->cycle_time_us,
    };
    for (int k = 0; k < HORO_KNOB_COUNT; k++) {
        values[k] = given[k] <= HORO_KNOB_LIMIT ? given[k] : own[k];
    }
}

static void find_ranges(const struct hr_lane *world, const uint64_t *start, struct hr_knob_range *ranges) {
    const struct hr_team *team = world->team;
    const int has_hosts = team->host_count > 1;
    ranges[HORO_KNOB_SEGMENT] = (struct hr_knob_range){SEGMENT_UNIT, world->node->arena.segment_bytes};
    ranges[HORO_KNOB_FUSION] = (struct hr_knob_range){FUSION_MIN, HORO_KNOB_LIMIT};
    if (has_hosts) {
        ranges[HORO_KNOB_PIECE] = (struct hr_knob_range){PIECE_MIN, PIECE_MAX};
        ranges[HORO_KNOB_DOUBLING] = (struct hr_knob_range){DOUBLING_MIN, DOUBLING_MAX};
    }
    if (has_hosts && team->transport->ops->use_sockets != NULL) {
        ranges[HORO_KNOB_SOCKETS] = (struct hr_knob_range){1, (uint64_t)world->node->sockets_per_peer};
    }
    if (has_hosts) {
        ranges[HORO_KNOB_CARRIED] = (struct hr_knob_range){CARRIED_MIN, HR_CARRIED_MAX};
    }
    if (start[HORO_KNOB_CYCLE] > 0) { /* a user who has asked for no extra wait gets none */
        ranges[HORO_KNOB_CYCLE] = (struct hr_knob_range){CYCLE_MIN_US, start[HORO_KNOB_CYCLE]};
    }
    if (start[HORO_KNOB_OVERLAP] > 0) {
        ranges[HORO_KNOB_OVERLAP] = (struct hr_knob_range){1, OVERLAP_LAST};
    }
}

static int check(const horo_autotune *autotune, struct hr_error *error) {
    if (autotune->steps_per_sample < 1 || autotune->steps_per_sample > HR_METER_STEPS_MAX ||
        autotune->warmup_samples < 0 || autotune->max_samples < 1) {
        return hr_fail(error, HORO_ERR_USAGE,
                       "autotuning: steps_per_sample must be 1 to %d, not %d; warmup_samples not negative, not %d; "
                       "max_samples positive, not %d",
                       HR_METER_STEPS_MAX, autotune->steps_per_sample, autotune->warmup_samples,
                       autotune->max_samples);
    }
    return HORO_OK;
}

int hr_engine_init_tuning(struct hr_engine *engine, const horo_setup *setup, struct hr_error *error) {
    struct hr_tuned *tuned = &engine->tuned;
    struct hr_lane *world = hr_engine_world(engine);
    uint64_t defaults[HORO_KNOB_COUNT];
    struct hr_knob_range ranges[HORO_KNOB_COUNT] = {0};
    if (setup->autotune == NULL) {
        return HORO_OK;
    }
    HR_TRY(check(setup->autotune, error));
    fill_in(world, setup, setup->autotune->start, tuned->settled);
    fill_in(world, setup, setup->autotune->defaults, defaults);
    if (!fits(world, defaults) || hr_lane_tune(world, tuned->settled) != HORO_OK) {
        return hr_fail(error, HORO_ERR_USAGE, "autotuning begins with values that this job cannot have");
    }
    tuned->is_on = 1;
    memcpy(tuned->values, tuned->settled, sizeof tuned->values);
    if (!world->is_root) {
        return HORO_OK;
    }
    tuned->tuner = malloc(sizeof *tuned->tuner);
    if (tuned->tuner == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for autotuning");
    }
    find_ranges(world, tuned->settled, ranges);
    hr_tuner_init(tuned->tuner, setup->autotune, tuned->settled, defaults, ranges);
    return HORO_OK;
}

void hr_engine_own_log(struct hr_engine *engine, const horo_setup *setup) {
    if (setup->autotune != NULL && engine->tuned.tuner != NULL) {
        hr_tuner_own_log(engine->tuned.tuner, setup->autotune->log_fd);
    }
}

void hr_engine_close_log(struct hr_engine *engine) {
    if (engine->tuned.tuner != NULL) {
        hr_tuner_close_log(engine->tuned.tuner);
    }
}

void hr_engine_fini_tuning(struct hr_engine *engine) {
    hr_engine_close_log(engine);
    free(engine->tuned.tuner);
    engine->tuned.tuner = NULL;
}
