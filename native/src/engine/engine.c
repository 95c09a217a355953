/* Makes an engine of its rooms. */
#include "engine/engine.h"

#include <stdio.h>
#include <string.h>

#include "base/op.h"
#include "engine/gpu/gpu.h"
#include "engine/membership/membership.h"
#include "engine/report/report.h"
#include "node/team.h"

/* The handlers of messages that are none of a leader's own. */
static hr_leader_handler *const on_message[HR_WIRE_TYPES] = {
    [HR_WIRE_JOINED] = hr_join_handle,
    [HR_WIRE_BLOCKED] = hr_blocked_handle,
    [HR_WIRE_QUERY] = hr_blocked_handle_query,
    [HR_WIRE_ASK] = hr_stall_handle_question,
};

static const struct hr_executor_ops EXECUTOR_OPS = {
    .handlers = {[HR_WIRE_REQUEST] = hr_stand_in_describe,
                 [HR_WIRE_JOINED] = hr_join_execute,
                 [HR_WIRE_TUNE] = hr_tuning_execute},
    .change = hr_membership_change,
    .absent = hr_stand_in_for,
    .backend_on_gpu = hr_gpu_backend,
    .end_on_gpu = hr_gpu_end_batch,
    .bury = hr_gpu_bury,
};

static const struct hr_membership_ops MEMBERSHIP_OPS = {
    .added = hr_gpu_attach, .going = hr_gpu_detach, .is_quiet = hr_gpu_is_quiet};

static const struct hr_report_ops REPORT_OPS = {.awaits = hr_gpu_awaits};

static void free_parts(struct hr_engine *engine) {
    hr_requests_fini(&engine->requests);
    hr_engine_end_cuda(engine);
    for (int i = engine->lane_count - 1; i >= 0; i--) {
        hr_membership_forget(engine->lanes[i]);
        hr_lane_destroy(engine->lanes[i]);
    }
    hr_deadlock_fini(&engine->judge);
    (void)pthread_mutex_destroy(&engine->staging_lock);
    hr_drive_fini(&engine->drive);
}

static void add_parts(struct hr_engine *engine) {
    struct hr_drive *drive = &engine->drive;
    hr_drive_add(drive, &engine->leaving.part, &hr_part_end, engine);
    hr_drive_add(drive, &engine->submissions, &hr_part_submissions, engine);
    hr_drive_add(drive, &engine->gpu, &hr_part_gpu, engine);
    hr_drive_add(drive, &engine->lanes[0]->part, &hr_part_lane, engine->lanes[0]);
    hr_drive_add(drive, &engine->stall, &hr_part_stall, engine);
    hr_drive_add(drive, &engine->deadlock, &hr_part_deadlock, engine);
    if (engine->node->stall_warning_ns <= 0) { /* it never looks: its silence means nothing to ranks that do */
        atomic_store(&engine->node->arena.blocks[engine->node->local_rank].alive_until_ns, INT64_MAX);
    }
}

static hr_status init_parts(struct hr_engine *engine, struct hr_team *world, struct hr_backend *backend,
                            const horo_setup *setup, struct hr_error *error) {
    HR_TRY(hr_lane_create(engine, &engine->lane_setup, world, backend, &engine->lanes[0], error));
    add_parts(engine);
    engine->requests.places[0] = (struct hr_place){.is_used = 1, .port = &engine->lanes[0]->port};
    engine->teams[0].has_local = 1;
    engine->lane_count = 1;
    HR_TRY(hr_engine_init_tuning(engine, setup, error));
    return hr_drive_start(&engine->drive, error);
}

hr_status hr_engine_init(struct hr_engine *engine, struct hr_team *world, struct hr_backend *backend,
                         const horo_setup *setup, struct hr_error *error) {
    struct hr_node *node = world->node;
    *engine = (struct hr_engine){
        .node = node,
        .membership = &MEMBERSHIP_OPS,
        .report = &REPORT_OPS,
        .lane_setup =
            {
                .leader.drive = &engine->drive,
                .leader.handlers = on_message,
                .leader.fusion_bytes = setup->fusion_bytes,
                .leader.cycle_ns = (int64_t)setup->cycle_time_us * 1000,
                .executor_ops = &EXECUTOR_OPS,
                .requests = &engine->requests,
                .lane_count = &engine->lane_count,
                .cache_capacity = setup->cache_capacity < 0 ? 0 : (uint32_t)setup->cache_capacity,
                .may_count = setup->cycle_time_us == 0 && setup->spin_us > 0,
            },
    };
    hr_status status = hr_drive_init(&engine->drive, node, (int64_t)setup->spin_us * 1000, error);
    if (status != HORO_OK) {
        hr_backend_destroy(backend);
        hr_team_destroy(world);
        hr_node_close_fds(node);
        return status;
    }
    hr_requests_init(&engine->requests, &engine->drive);
    atomic_store(&engine->drive.serves_hosts, world->local_rank == 0 && world->transport != NULL);
    (void)pthread_mutex_init(&engine->staging_lock, NULL);
    status = init_parts(engine, world, backend, setup, error);
    if (status != HORO_OK) {
        hr_node_close_fds(node);
        free_parts(engine);
    }
    return status;
}

void hr_engine_close_links(struct hr_engine *engine) {
    for (int i = 0; i < engine->lane_count; i++) {
        hr_team_close_links(engine->lanes[i]->team);
    }
    for (size_t i = 0; i < engine->requests.handles.capacity; i++) {
        const struct hr_request *request = engine->requests.handles.slots[i].value;
        const struct hr_lane *added = hr_sets_lane_of(request);
        if (added != NULL) {
            hr_team_close_links(added->team);
        }
    }
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

void hr_engine_fini(struct hr_engine *engine) {
    hr_engine_leave(engine, HORO_ERR_ABORTED, "");
    hr_requests_await_calls(&engine->requests); /* which end now, for all that they wait for has ended */
    hr_gpu_end(engine);
    hr_engine_close_links(engine); /* which let go of what is posted before its memory is freed */
    hr_node_close_fds(engine->node);
    free_parts(engine);
}

/* Its tensors stay on the GPU, or are on their way to the host; none of what is refused. */
static hr_status submit_on_gpu(struct hr_engine *engine, const horo_request *call, int64_t *handle,
                               struct hr_error *error) {
    struct hr_request *request = NULL;
    HR_TRY(hr_requests_create(&engine->requests, call, &request, error));
    hr_drive_lock(&engine->drive);
    hr_status status = hr_requests_check(&engine->requests, request, error);
    const int stays = status == HORO_OK && atomic_load(&request->port->lane->on_gpu) != NULL;
    hr_drive_unlock(&engine->drive);
    if (status == HORO_OK) {
        status = stays ? hr_gpu_place(engine, request, error) : HORO_OK;
    }
    if (status == HORO_OK && request->cargo.data == NULL) {
        status = hr_engine_stage(engine, request, error);
    }
    if (status != HORO_OK) {
        hr_request_destroy(request);
        return status;
    }
    const int is_staged = request->state == HR_REQUEST_STAGING;
    HR_TRY(hr_requests_add(&engine->requests, request, handle, error));
    if (is_staged) {
        hr_engine_launch(engine, request, *handle);
    }
    return HORO_OK;
}

hr_status hr_engine_submit(struct hr_engine *engine, const horo_request *call, int64_t *handle,
                           struct hr_error *error) {
    if (hr_op_is_of_teams(call->op) || call->op == HORO_JOIN) {
        return hr_fail(error, HORO_ERR_UNSUPPORTED, "operation number %d has a function of its own", call->op);
    }
    if (call->name != NULL && strcmp(call->name, HR_JOIN_NAME) == 0) {
        return hr_fail(error, HORO_ERR_USAGE, "'%s' is the name of joining; use another name", call->name);
    }
    if ((call->flags & HORO_SUBMIT_ON_GPU) != 0) {
        return hr_fail(error, HORO_ERR_USAGE, "'%s': what is done on the GPU is for horo to say",
                       call->name == NULL ? "" : call->name);
    }
    return call->device != 0
               ? submit_on_gpu(engine, call, handle, error)
               : hr_requests_submit(&engine->requests, call, (struct hr_cargo){0}, handle, error);
}

hr_status hr_engine_refuse(struct hr_engine *engine, int32_t team, const char *name, int32_t status,
                           const char *reason) {
    hr_drive_lock(&engine->drive);
    const int outcome = hr_requests_refuse(&engine->requests, team, name, status, reason);
    hr_drive_unlock(&engine->drive);
    return outcome < 0 ? outcome : HORO_OK;
}

uint64_t hr_engine_link_bytes(struct hr_engine *engine) {
    hr_drive_lock(&engine->drive);
    uint64_t bytes = engine->gone_link_bytes;
    for (int i = 0; i < engine->lane_count; i++) {
        const struct hr_transport *transport = engine->lanes[i]->team->transport;
        bytes += transport == NULL ? 0 : atomic_load(&transport->data_bytes);
    }
    hr_drive_unlock(&engine->drive);
    return bytes;
}
