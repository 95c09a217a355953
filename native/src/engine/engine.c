/* The callers' side of the engine, behind submit.c: poll, wait, release; and its beginning and end. */
#include "engine/engine.h"
#include "engine/gpu/gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/membership/membership.h"
#include "engine/report/report.h"
#include "node/node_setup.h"

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
    for (int i = engine->lane_count - 1; i >= 0; i--) {
        hr_membership_forget(engine->lanes[i]);
        hr_lane_destroy(engine->lanes[i]);
    }
    hr_deadlock_fini(&engine->judge);
    hr_map_fini(&engine->submission.handles);
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
    for (int number = 0; number < HR_TEAMS_MAX; number++) {
        engine->teams[number].id = number;
    }
    add_parts(engine);
    engine->teams[0] = (struct hr_team_place){.is_used = 1, .has_local = 1, .lane = engine->lanes[0]};
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
                .cache_capacity = setup->cache_capacity < 0 ? 0 : (uint32_t)setup->cache_capacity,
                .may_count = setup->cycle_time_us == 0 && setup->spin_us > 0,
            },
    };
    engine->submission.queue_tail = &engine->submission.queue_head;
    hr_status status = hr_drive_init(&engine->drive, node, (int64_t)setup->spin_us * 1000, error);
    if (status != HORO_OK) {
        hr_backend_destroy(backend);
        hr_team_destroy(world);
        hr_node_close_fds(node);
        return status;
    }
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
    for (size_t i = 0; i < engine->submission.handles.capacity; i++) {
        const struct hr_request *request = engine->submission.handles.slots[i].value;
        if (request != NULL && request->new_lane != NULL) {
            hr_team_close_links(request->new_lane->team);
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
    hr_drive_lock(&engine->drive);
    while (engine->submission.calls > 0) { /* which end now, for all that they wait for has ended */
        hr_drive_wait(&engine->drive, INT64_MAX);
    }
    hr_drive_unlock(&engine->drive);
    hr_gpu_end(engine);
    hr_engine_close_links(engine); /* which let go of what is posted before its memory is freed */
    hr_node_close_fds(engine->node);
    for (size_t i = 0; i < engine->submission.handles.capacity; i++) {
        hr_request_destroy(engine->submission.handles.slots[i].value);
    }
    hr_engine_end_cuda(engine);
    free_parts(engine);
}

struct hr_request *hr_lane_next_pending(const struct hr_lane *lane, const struct hr_request *last) {
    struct hr_request *request = last == NULL ? lane->engine->submission.oldest : last->newer;
    while (request != NULL && request->lane != lane) {
        request = request->newer;
    }
    return request;
}

struct hr_request *hr_engine_find_handle(const struct hr_engine *engine, int64_t handle) {
    return hr_map_find(&engine->submission.handles, hr_hash_number(handle), (const char *)&handle, sizeof handle);
}

/* With the lock held, for a request that is not done: it may have been submitted for a wait that has not come. */
static void kick_if_idle(struct hr_engine *engine) {
    if (hr_drive_is_free(&engine->drive)) {
        hr_drive_kick(&engine->drive);
    }
}

int hr_engine_poll(struct hr_engine *engine, int64_t handle) {
    hr_drive_lock(&engine->drive);
    const struct hr_request *request = hr_engine_find_handle(engine, handle);
    const int status = request == NULL ? HORO_ERR_HANDLE : atomic_load(&request->status);
    if (status == HORO_IN_PROGRESS) {
        kick_if_idle(engine);
    }
    hr_drive_unlock(&engine->drive);
    return status;
}

/* With the lock held, where the thread drives: it saves a switch of threads in this call, and in those that follow. */
static void ask_to_drive(struct hr_engine *engine, const struct hr_request *request) {
    const int sync = (request->call.flags & HORO_SUBMIT_SYNC) != 0;
    const int is_alone = atomic_load(&engine->drive.pending) == 1;
    if (sync && is_alone && atomic_load(&engine->drive.serves_hosts)) {
        atomic_store(&engine->drive.wanted, 1);
    }
}

/* With the lock held, which it lets go meanwhile: the caller is one of the request's owners. */
static int wait_for_request(struct hr_engine *engine, const struct hr_request *request, int32_t timeout_ms) {
    int status;
    int64_t deadline_ns = 0; /* a request that is done already needs no clock */
    while ((status = atomic_load(&request->status)) == HORO_IN_PROGRESS) {
        const int64_t now_ns = hr_now_ns();
        deadline_ns = deadline_ns == 0 ? now_ns + (int64_t)timeout_ms * 1000000 : deadline_ns;
        if (now_ns >= deadline_ns) {
            kick_if_idle(engine);
            break;
        }
        if (hr_drive_is_free(&engine->drive)) {
            hr_drive_until(&engine->drive, &request->status, HORO_IN_PROGRESS, now_ns, deadline_ns);
            status = atomic_load(&request->status);
            break; /* done, out of time, or a signal to be handled first */
        }
        ask_to_drive(engine, request);
        hr_drive_wait(&engine->drive, deadline_ns);
    }
    return status;
}

/* With the lock held. */
static int write_unknown(int64_t handle, char *text, size_t text_bytes) {
    if (text_bytes > 0) {
        (void)snprintf(text, text_bytes, "Handle %lld was not created or has been cleared.", (long long)handle);
    }
    return HORO_ERR_HANDLE;
}

static void write_error(const struct hr_request *request, char *text, size_t text_bytes) {
    if (text_bytes > 0) {
        const int done = atomic_load(&request->status) != HORO_IN_PROGRESS;
        (void)snprintf(text, text_bytes, "%s",
                       done && request->error_text != NULL ? request->error_text : "the operation is still running");
    }
}

/* With the lock held: the table of handles owns it no longer. */
static void forget_handle(struct hr_engine *engine, struct hr_request *request) {
    (void)hr_map_remove(&engine->submission.handles, hr_hash_number(request->handle), (const char *)&request->handle,
                        sizeof request->handle);
    request->handle = 0;
    request->owners--;
}

/* With the lock held: whether results of a request that has ended well lie in memory that the core has allocated. */
static int holds_results(const struct hr_request *request) {
    int holds = 0;
    for (int i = 0; request->gathered != NULL && i < request->call.tensor_count; i++) {
        holds |= !request->gathered[i].is_given;
    }
    return holds;
}

static int releases(const struct hr_request *request, enum hr_wait_end end) {
    return end == HR_WAIT_RELEASES ||
           (end == HR_WAIT_RELEASES_WHAT_FITS &&
            ((request->call.flags & HORO_SUBMIT_OFFER) == 0 || !holds_results(request)));
}

/* Without the lock, of a request that nobody owns. */
static void free_request(struct hr_engine *engine, struct hr_request *request) {
    const int is_on_gpu = request->call.device != 0;
    hr_request_destroy(request);
    if (is_on_gpu) {
        hr_engine_trim_pinned(engine);
    }
}

/* With the lock held, which it lets go: a call ends, for which `unowned` is left (NULL: nothing is). */
static void end_call(struct hr_engine *engine, struct hr_request *unowned) {
    if (unowned != NULL) {
        hr_drive_unlock(&engine->drive);
        free_request(engine, unowned);
        hr_drive_lock(&engine->drive);
    }
    if (--engine->submission.calls == 0 && atomic_load(&engine->drive.stop)) {
        hr_drive_wake_waiters(&engine->drive); /* hr_engine_fini is one */
    }
    hr_drive_unlock(&engine->drive);
}

int hr_engine_wait(struct hr_engine *engine, int64_t *handle, int32_t timeout_ms, enum hr_wait_end end, char *text,
                   size_t text_bytes) {
    hr_drive_lock(&engine->drive);
    struct hr_request *request = hr_engine_find_handle(engine, *handle);
    if (request == NULL) {
        hr_drive_unlock(&engine->drive);
        return write_unknown(*handle, text, text_bytes);
    }
    hr_engine_note_caller(engine);
    engine->submission.calls++;
    request->owners++;
    const int status = wait_for_request(engine, request, timeout_ms);
    if (status < 0) {
        write_error(request, text, text_bytes);
    } else if (status == HORO_OK && releases(request, end)) {
        *handle = 0;
        if (request->handle != 0) { /* else another call has released it meanwhile */
            forget_handle(engine, request);
        }
    }
    end_call(engine, --request->owners == 0 ? request : NULL);
    return status;
}

/* With the lock held. */
static int is_any_done(const struct hr_engine *engine, const int64_t *handles, int32_t count) {
    for (int32_t i = 0; i < count; i++) {
        const struct hr_request *request = hr_engine_find_handle(engine, handles[i]);
        if (request == NULL || atomic_load(&request->status) != HORO_IN_PROGRESS) {
            return 1;
        }
    }
    return 0;
}

/* The background thread drives meanwhile: a caller would drive for one request, and sleep while another is done. */
int hr_engine_wait_any(struct hr_engine *engine, const int64_t *handles, int32_t count, int32_t timeout_ms) {
    const int64_t deadline_ns = hr_now_ns() + (int64_t)timeout_ms * 1000000;
    hr_drive_lock(&engine->drive);
    hr_engine_note_caller(engine);
    engine->submission.calls++;
    int done;
    while (!(done = is_any_done(engine, handles, count)) && hr_now_ns() < deadline_ns) {
        kick_if_idle(engine);
        hr_drive_wait(&engine->drive, deadline_ns);
    }
    end_call(engine, NULL);
    return done ? HORO_OK : HORO_IN_PROGRESS;
}

int hr_engine_error(struct hr_engine *engine, int64_t handle, char *text, size_t text_bytes) {
    int status = HORO_OK;
    hr_drive_lock(&engine->drive);
    const struct hr_request *request = hr_engine_find_handle(engine, handle);
    if (request == NULL) {
        status = write_unknown(handle, text, text_bytes);
    } else {
        write_error(request, text, text_bytes);
    }
    hr_drive_unlock(&engine->drive);
    return status;
}

int hr_engine_take(struct hr_engine *engine, int64_t handle, int32_t index, void **data, int64_t *bytes,
                   int64_t *first_dims) {
    hr_drive_lock(&engine->drive);
    struct hr_request *request = hr_engine_find_handle(engine, handle);
    int status = HORO_ERR_USAGE;
    if (request != NULL && atomic_load(&request->status) == HORO_OK && request->gathered != NULL && index >= 0 &&
        index < request->call.tensor_count &&
        (request->gathered[index].is_given || request->gathered[index].data != NULL)) {
        struct hr_gathered *result = &request->gathered[index];
        *data = result->is_given ? NULL : result->data;
        *bytes = result->bytes;
        memcpy(first_dims, result->first_dims, (size_t)request->team_size * sizeof *first_dims);
        result->data = result->is_given ? result->data : NULL;
        status = HORO_OK;
    }
    hr_drive_unlock(&engine->drive);
    return status;
}

int hr_engine_release(struct hr_engine *engine, int64_t handle) {
    hr_drive_lock(&engine->drive);
    struct hr_request *request = hr_engine_find_handle(engine, handle);
    struct hr_request *unowned = NULL;
    int status = HORO_ERR_HANDLE;
    if (request != NULL) {
        status = atomic_load(&request->status) == HORO_IN_PROGRESS ? HORO_ERR_USAGE : HORO_OK;
    }
    if (status == HORO_OK) {
        forget_handle(engine, request);
        unowned = request->owners == 0 ? request : NULL;
    }
    hr_drive_unlock(&engine->drive);
    if (unowned != NULL) {
        free_request(engine, unowned);
    }
    return status;
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

int hr_engine_health(struct hr_engine *engine, struct hr_error *error) {
    const struct hr_abort end = hr_engine_end(engine);
    if (end.code == 0) {
        return HORO_OK;
    }
    char text[HORO_MESSAGE_MAX];
    hr_engine_describe_end(engine, end, text, sizeof text);
    return hr_fail(error, end.code, "%s", text);
}
