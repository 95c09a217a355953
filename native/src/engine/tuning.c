/*
 * The change, while a job runs, of what operations run with. Rank 0 proposes values (horo_propose_tuning), a TUNE
 * record in the log of all ranks says them, and every rank changes over where it executes that record: between two
 * tasks, so that sizes, algorithms and turns of sockets are the same on all ranks in each. The root writes the record
 * in front of a batch only, so that nothing is sent for it while nothing is pending.
 *
 * Other teams run with the first values, so that none is left with what was tried out while it was made; those that
 * exist when the values are final get them by a record in their own log, each from its root.
 */
#include <string.h>

#include "engine/engine.h"

int hr_engine_propose_tuning(struct hr_engine *engine, const uint64_t *values, int is_final, struct hr_error *error) {
    struct hr_lane *world = hr_engine_world(engine);
    if (!engine->tuned.is_on || !world->is_root) {
        return hr_fail(error, HORO_ERR_USAGE, "values are proposed by rank 0, in a job that has begun with some");
    }
    if (!hr_lane_fits(world, values)) {
        return hr_fail(error, HORO_ERR_USAGE, "these values of autotuning are none that this job can have");
    }
    hr_drive_lock(&engine->drive);
    const int status = hr_leader_make_due(&world->leader, values, is_final);
    hr_drive_unlock(&engine->drive);
    return status == HORO_OK ? HORO_OK : hr_fail(error, status, "out of memory for values of autotuning");
}

int hr_tuning_execute(void *owner, const struct hr_wire_message *record) {
    struct hr_lane *lane = owner;
    struct hr_engine *engine = lane->engine;
    struct hr_tuned *tuned = &engine->tuned;
    uint64_t values[HORO_KNOB_COUNT];
    if (!tuned->is_on || record->count != HORO_KNOB_COUNT) {
        return HORO_ERR_INTERNAL;
    }
    for (uint32_t k = 0; k < HORO_KNOB_COUNT; k++) {
        values[k] = hr_wire_u64(record->items, k);
    }
    HR_TRY(hr_lane_tune(lane, values));
    if (lane->team->number != 0) {
        return HORO_OK;
    }
    hr_drive_lock(&engine->drive);
    memcpy(tuned->values, values, sizeof values);
    tuned->is_final = record->is_final;
    int status = HORO_OK;
    for (int i = 1; record->is_final && i < engine->lane_count && status == HORO_OK; i++) {
        const int is_led_here = engine->lanes[i]->is_root;
        status = is_led_here ? hr_leader_make_due(&engine->lanes[i]->leader, values, 1) : HORO_OK;
    }
    hr_drive_unlock(&engine->drive);
    HR_TRY(status);
    if (record->is_final) {
        memcpy(tuned->settled, values, sizeof values);
    }
    return HORO_OK;
}

void hr_engine_read_tuning(struct hr_engine *engine, uint64_t *values, int32_t *is_final) {
    hr_drive_lock(&engine->drive);
    memcpy(values, engine->tuned.values, sizeof engine->tuned.values);
    *is_final = engine->tuned.is_final;
    hr_drive_unlock(&engine->drive);
}

int hr_engine_init_tuning(struct hr_engine *engine, const horo_setup *setup, struct hr_error *error) {
    struct hr_tuned *tuned = &engine->tuned;
    struct hr_lane *world = hr_engine_world(engine);
    const struct hr_tuning *own = &world->team->tuning;
    if (setup->tuned == NULL) {
        return HORO_OK;
    }
    const uint64_t first[HORO_KNOB_COUNT] = {
        [HORO_KNOB_SEGMENT] = own->segment,
        [HORO_KNOB_PIECE] = own->piece,
        [HORO_KNOB_SOCKETS] = 1,
        [HORO_KNOB_FUSION] = setup->fusion_bytes < HORO_KNOB_LIMIT ? setup->fusion_bytes : HORO_KNOB_LIMIT,
        [HORO_KNOB_DOUBLING] = own->doubling,
        [HORO_KNOB_CARRIED] = own->carried,
        [HORO_KNOB_CYCLE] = (uint64_t)setup->cycle_time_us,
    };
    for (int k = 0; k < HORO_KNOB_COUNT; k++) {
        tuned->settled[k] = setup->tuned[k] <= HORO_KNOB_LIMIT ? setup->tuned[k] : first[k];
    }
    if (hr_lane_tune(world, tuned->settled) != HORO_OK) {
        return hr_fail(error, HORO_ERR_USAGE, "autotuning begins with values that this job cannot have");
    }
    tuned->is_on = 1;
    memcpy(tuned->values, tuned->settled, sizeof tuned->values);
    return HORO_OK;
}
