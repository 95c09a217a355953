/* Makes an engine of its rooms. */
#include <stdio.h>
#include <string.h>

#include "base/traits.h"
#include "engine/engine.h"
#include "engine/gpu/gpu.h"
#include "engine/membership/membership.h"
#include "engine/report/report.h"
#include "node/team.h"

/* ---- Tuning ---- */

/*
 * The change, while a job runs, of what operations run with. Rank 0 proposes values (horo_propose_tuning), a TUNE
 * record in the log of all ranks says them, and every rank changes over where it executes that record: between two
 * tasks, so that sizes, algorithms and turns of sockets are the same on all ranks in each. The root writes the record
 * in front of a batch only, so that nothing is sent for it while nothing is pending.
 *
 * Other teams run with the first values, so that none is left with what was tried out while it was made; those that
 * exist when the values are final get them by a record in their own log, each from its root.
 */

int hr_engine_propose_tuning(struct hr_engine *engine, const uint64_t *values, int is_final, struct hr_error *error) {
    struct hr_lane *world = engine->lanes[0];
    if (!engine->tuned.is_on || !world->leader.is_root) {
        return hr_fail(error, HORO_ERR_USAGE, "values are proposed by rank 0, in a job that has begun with some");
    }
    if (!hr_lane_fits(world, values)) {
        return hr_fail(error, HORO_ERR_USAGE, "these values of autotuning are none that this job can have");
    }
    hr_drive_lock(&engine->drive);
    hr_leader_make_due(&world->leader, values, is_final);
    hr_drive_unlock(&engine->drive);
    return HORO_OK;
}

static int execute_tune(struct hr_lane *lane, const struct hr_wire_message *record) {
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
    for (int i = 1; record->is_final && i < engine->lane_count; i++) {
        struct hr_leader *leader = &engine->lanes[i]->leader;
        if (leader->is_root) {
            hr_leader_make_due(leader, values, 1);
        }
    }
    hr_drive_unlock(&engine->drive);
    if (record->is_final) {
        memcpy(tuned->settled, values, sizeof values);
    }
    return HORO_OK;
}

/* Before anything drives. The world begins with setup->tuned. HORO_OK or a status with *error set. */
static int init_tuning(struct hr_engine *engine, const horo_setup *setup, struct hr_error *error) {
    struct hr_tuned *tuned = &engine->tuned;
    struct hr_lane *world = engine->lanes[0];
    const struct hr_tuning *own = &world->team->tuning;
    if (setup->tuned == NULL) {
        return HORO_OK;
    }
    const uint64_t first[HORO_KNOB_COUNT] = {
        [HORO_KNOB_SEGMENT] = own->segment, [HORO_KNOB_PIECE] = own->piece, [HORO_KNOB_SOCKETS] = 1,
        [HORO_KNOB_FUSION] = setup->fusion_bytes < HORO_KNOB_LIMIT ? setup->fusion_bytes : HORO_KNOB_LIMIT,
        [HORO_KNOB_DOUBLING] = own->doubling, [HORO_KNOB_CARRIED] = own->carried,
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

/* ---- The part that takes what callers have submitted, and their reports, to the lanes ---- */

static int turn(struct hr_part *part) {
    struct hr_engine *engine = part->owner;
    struct hr_blocked *blocked = &engine->blocked;
    int moved = HR_STILL;
    const int has_queue = atomic_load(&engine->requests.queued) != 0;
    const int has_ended = engine->drive.stage != HR_STAGE_RUNNING; /* sends and receives go on */
    /* where something is announced, the last report about this rank holds no more */
    if (has_ended) {
        atomic_store(&blocked->is_new, 0);
    } else if (atomic_load_explicit(&blocked->is_new, memory_order_relaxed) || (has_queue && blocked->is_told)) {
        HR_TRY(hr_engine_tell_blocked(engine));
        moved = HR_MOVED;
    }
    if (!has_queue) {
        return moved;
    }
    int status = HORO_OK; /* all of the queue is announced, or fails with the group, since it is no longer there */
    struct hr_request *next = NULL;
    for (struct hr_request *request = hr_requests_take_queue(&engine->requests); request != NULL; request = next) {
        const struct hr_hooks *hooks = request->cargo.hooks;
        struct hr_lane *lane = request->port == NULL ? NULL : request->port->lane;
        next = request->next;
        if (request->call.timeout_ms > 0) {
            hr_part_expect(&engine->late.part, hr_late_deadline_ns(request));
        }
        if (lane != NULL) {
            lane->part.is_quiet = 0;
        }
        if (status == HORO_OK && (lane == NULL || !has_ended)) {
            status = hooks != NULL && hooks->announce != NULL ? hooks->announce(request)
                                                              : hr_lane_announce(lane, request);
        }
    }
    atomic_store_explicit(&engine->node->arena.blocks[engine->node->local_rank].pending,
                          atomic_load(&engine->drive.pending), memory_order_relaxed);
    return status == HORO_OK ? HR_MOVED : status;
}

static const struct hr_part_ops SUBMISSIONS = {.rank = HR_PART_SUBMISSIONS, .turn = turn, .outlives = 1};

/* ---- The rooms of an engine ---- */

static int handle_mail(struct hr_lane *lane, int member, const struct hr_wire_message *wire, int64_t now_ns) {
    (void)now_ns;
    return lane->team->number != 0 ? HORO_ERR_INTERNAL : hr_pairs_take_in(&lane->engine->pairs, member, wire);
}

/* The handlers of messages that are none of a leader's own. */
static hr_leader_handler *const on_message[HR_WIRE_TYPES] = {
    [HR_WIRE_JOINED] = hr_join_handle,
    [HR_WIRE_BLOCKED] = hr_blocked_handle,
    [HR_WIRE_QUERY] = hr_blocked_handle_query,
    [HR_WIRE_ASK] = hr_stall_handle_question,
    [HR_WIRE_LATE] = hr_late_handle,
    [HR_WIRE_MAIL] = handle_mail,
};

static const struct hr_executor_ops EXECUTOR_OPS = {
    .handlers = {[HR_WIRE_REQUEST] = hr_stand_in_describe,
                 [HR_WIRE_JOINED] = hr_join_execute,
                 [HR_WIRE_TUNE] = execute_tune},
    .change = hr_membership_change,
    .absent = hr_stand_in_for,
};

static void free_parts(struct hr_engine *engine) {
    hr_requests_fini(&engine->requests);
    hr_pairs_fini(&engine->pairs);
    hr_engine_end_cuda(engine);
    for (int i = engine->lane_count - 1; i >= 0; i--) {
        hr_membership_forget(engine->lanes[i]);
        hr_lane_destroy(engine->lanes[i]);
    }
    hr_deadlock_fini(&engine->judge);
    (void)pthread_mutex_destroy(&engine->staging_lock);
    hr_drive_fini(&engine->drive);
}

static hr_status init_parts(struct hr_engine *engine, struct hr_team *world, const horo_setup *setup,
                            struct hr_error *error) {
    HR_TRY(hr_lane_create(&engine->lane_setup, world, &engine->lanes[0], error));
    engine->lane_count = 1;
    struct hr_drive *drive = &engine->drive;
    hr_drive_add(drive, &engine->leaving.part, &hr_part_end, engine);
    hr_drive_add(drive, &engine->submissions, &SUBMISSIONS, engine);
    hr_drive_add(drive, &engine->lanes[0]->part, &hr_part_lane, engine->lanes[0]);
    const int passes_mail = engine->lanes[0]->is_leader && world->host_count > 1;
    HR_TRY(hr_pairs_init(&engine->pairs, &engine->requests, setup->direct_bytes > 0,
                         passes_mail ? &engine->lanes[0]->leader : NULL, error));
    hr_drive_add(drive, &engine->stall, &hr_part_stall, engine);
    hr_drive_add(drive, &engine->deadlock, &hr_part_deadlock, engine);
    hr_drive_add(drive, &engine->late.part, &hr_part_late, engine);
    if (engine->node->stall_warning_ns <= 0) { /* it never looks: its silence means nothing to ranks that do */
        atomic_store(&engine->node->arena.blocks[engine->node->local_rank].alive_until_ns, INT64_MAX);
    }
    engine->requests.places[0] = (struct hr_place){.is_used = 1, .port = &engine->lanes[0]->port, .has_local = 1};
    HR_TRY(init_tuning(engine, setup, error));
    return hr_drive_start(&engine->drive, error);
}

hr_status hr_engine_init(struct hr_engine *engine, struct hr_team *world, const horo_setup *setup,
                         struct hr_error *error) {
    struct hr_node *node = world->node;
    *engine = (struct hr_engine){
        .node = node,
        .lane_setup = {
            .engine = engine, .executor_ops = &EXECUTOR_OPS, .requests = &engine->requests,
            .leader = {.drive = &engine->drive, .handlers = on_message, .fusion_bytes = setup->fusion_bytes,
                       .cycle_ns = (int64_t)setup->cycle_time_us * 1000},
            .lane_count = &engine->lane_count,
            .cache_capacity = setup->cache_capacity < 0 ? 0 : (uint32_t)setup->cache_capacity,
            .may_count = setup->cycle_time_us == 0 && setup->spin_us > 0,
        },
    };
    hr_status status = hr_drive_init(&engine->drive, node, (int64_t)setup->spin_us * 1000, error);
    if (status != HORO_OK) {
        hr_team_destroy(world);
        hr_node_close_fds(node);
        return status;
    }
    hr_requests_init(&engine->requests, &engine->drive);
    atomic_store(&engine->drive.serves_hosts, world->local_rank == 0 && world->transport != NULL);
    (void)pthread_mutex_init(&engine->staging_lock, NULL);
    status = init_parts(engine, world, setup, error);
    if (status != HORO_OK) {
        hr_node_close_fds(node);
        free_parts(engine);
    }
    return status;
}

void hr_engine_close_fds(struct hr_engine *engine) {
    for (int i = 0; i < engine->lane_count; i++) {
        hr_team_close_links(engine->lanes[i]->team);
    }
    for (size_t i = 0; i < engine->requests.handle_capacity; i++) {
        const struct hr_lane *added = hr_sets_lane_of(engine->requests.handles[i]);
        if (added != NULL) {
            hr_team_close_links(added->team);
        }
    }
    hr_node_close_fds(engine->node);
    hr_drive_close_fd(&engine->drive);
}

void hr_engine_leave(struct hr_engine *engine, int status, const char *words) {
    hr_drive_lock(&engine->drive);
    if (!atomic_load(&engine->drive.stop)) {
        engine->leaving.status = status;
        (void)snprintf(engine->leaving.words, sizeof engine->leaving.words, "%s", words);
        atomic_store(&engine->drive.stop, 1);
        hr_drive_kick(&engine->drive);
    }
    hr_drive_unlock(&engine->drive);
    hr_drive_end_thread(&engine->drive);
}

/* Leaves, unless that has been done, and gives all but memory back. */
static void end(struct hr_engine *engine) {
    hr_engine_leave(engine, HORO_ERR_ABORTED, "");
    hr_drive_lock(&engine->drive);
    while (engine->requests.calls > 0) { /* which end now, for all that they wait for has ended */
        hr_drive_wait(&engine->drive, INT64_MAX);
    }
    const int has_ended = engine->leaving.has_ended;
    engine->leaving.has_ended = 1;
    hr_drive_unlock(&engine->drive);
    if (has_ended) {
        return;
    }
    hr_gpu_end(engine, hr_leave_has_failed(engine));
    hr_drive_lock(&engine->drive); /* after an abort, others may still call */
    hr_engine_close_fds(engine); /* links let go of what is posted before its memory is freed */
    hr_drive_unlock(&engine->drive);
}

void hr_engine_abort(struct hr_engine *engine, const char *words) {
    struct hr_node *node = engine->node;
    hr_drive_lock(&engine->drive);
    if (!atomic_load(&engine->drive.stop)) { /* else its descriptors may be gone */
        hr_arena_keep_last_words(&node->arena, node->rank, words, strlen(words));
        hr_node_abort(node, HORO_ERR_ABORTED, node->rank, HR_REASON_ABORTED);
    }
    hr_drive_unlock(&engine->drive);
    end(engine);
}

void hr_engine_fini(struct hr_engine *engine) {
    end(engine);
    free_parts(engine);
}

hr_status hr_engine_submit(struct hr_engine *engine, const horo_request *call, int64_t *handle,
                           struct hr_error *error) {
    if (hr_op_is(call->op, HR_OP_OF_TEAMS) || hr_op_is(call->op, HR_OP_OF_PAIRS) || call->op == HORO_JOIN) {
        return hr_fail(error, HORO_ERR_UNSUPPORTED, "operation number %d has a function of its own", call->op);
    }
    if (call->name != NULL && strcmp(call->name, HR_JOIN_NAME) == 0) {
        return hr_fail(error, HORO_ERR_USAGE, "'%s' is the name of joining; use another name", call->name);
    }
    if ((call->flags & HORO_SUBMIT_ON_GPU) != 0) {
        return hr_fail(error, HORO_ERR_USAGE, "'%s': what is done on the GPU is for horo to say",
                       call->name == NULL ? "" : call->name);
    }
    return call->device != 0 ? hr_gpu_submit(engine, call, handle, error)
                             : hr_requests_submit(&engine->requests, call, (struct hr_cargo){0}, handle, error);
}
