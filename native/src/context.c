/* The composition root: the only place that sees all layers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arena/arena.h"
#include "base/traits.h"
#include "base/system.h"
#include "base/timeline.h"
#include "engine/engine.h"
#include "engine/gpu/gpu.h"
#include "engine/membership/membership.h"
#include "engine/report/report.h"
#include "horo_pairs.h"
#include "node/team.h"
#include "node/watch.h"

struct horo_context {
    struct hr_node node;
    struct hr_engine engine;
    struct hr_timeline timeline;
    struct hr_owner owner; /* a forked child has the memory but not the threads */
};

/* Changes with anything that ranks must agree on: arena layout, wire format, handshake. */
HORO_API const char *horo_version(void) {
    return "0.1.0+abi38";
}

HORO_API const char *horo_change_name(void) {
    return HR_CHANGE_NAME;
}

HORO_API uint64_t horo_arena_bytes(int32_t local_size, uint64_t segment_bytes, int32_t teams) {
    return hr_arena_layout_bytes(local_size, (size_t)segment_bytes, teams);
}

/* Returns the status; of an error, its sentence goes into `error`, which may be NULL. */
static int leave(int status, const struct hr_error *failure, char *error, size_t error_bytes) {
    if (status < 0 && error != NULL && error_bytes > 0) {
        (void)snprintf(error, error_bytes, "%s", failure->text);
    }
    return status;
}

HORO_API int horo_create_memory(uint64_t bytes, int32_t *descriptor, char *error, size_t error_bytes) {
    struct hr_error failure = {0};
    return leave(hr_descriptor_memory(bytes, descriptor, &failure), &failure, error, error_bytes);
}

HORO_API int horo_create_wake(int32_t *descriptor, char *error, size_t error_bytes) {
    struct hr_error failure = {0};
    return leave(hr_descriptor_event(descriptor, &failure), &failure, error, error_bytes);
}

HORO_API int horo_create_watch(horo_watch **watch, char *error, size_t error_bytes) {
    struct hr_error failure = {0};
    return leave(hr_watch_create(watch, &failure), &failure, error, error_bytes);
}

HORO_API void horo_destroy_watch(horo_watch *watch) {
    if (watch != NULL) {
        hr_watch_destroy(watch);
    }
}

HORO_API int horo_create(const horo_setup *setup, horo_context **context, char *error, size_t error_bytes) {
    struct hr_error failure = {0};
    struct horo_context *created = calloc(1, sizeof *created);
    struct hr_team *world = created == NULL ? NULL : calloc(1, sizeof *world);
    int status = world == NULL
                     ? hr_fail(&failure, HORO_ERR_RESOURCE, "out of memory for a context")
                     : hr_team_init(world, &created->node, setup->rank, setup->size, setup->host_of_rank,
                                    (size_t)setup->segment_bytes, &failure);
    status = status == HORO_OK ? hr_node_init(&created->node, setup, world, &failure) : status;
    if (status != HORO_OK) {
        hr_team_destroy(world);
    } else {
        status = hr_engine_init(&created->engine, world, setup, &failure);
        if (status != HORO_OK) {
            hr_node_fini(&created->node);
        }
    }
    if (status != HORO_OK) {
        free(created);
        return leave(status, &failure, error, error_bytes);
    }
    hr_node_own(&created->node, setup);
    hr_timeline_init(&created->timeline, &created->node.recorder, &created->node.log);
    hr_owner_init(&created->owner);
    *context = created;
    return HORO_OK;
}

HORO_API void horo_destroy(horo_context *context) {
    if (context == NULL || !hr_owner_is_here(&context->owner)) {
        return; /* in a forked child everything belongs to the parent */
    }
    hr_engine_fini(&context->engine);
    hr_timeline_fini(&context->timeline); /* it shows the end, too */
    hr_node_fini(&context->node);
    hr_owner_fini(&context->owner);
    free(context);
}

HORO_API void horo_leave(horo_context *context, int32_t status, const char *words) {
    if (context != NULL && hr_owner_is_here(&context->owner)) {
        hr_engine_leave(&context->engine, status, words);
    }
}

HORO_API void horo_abort(horo_context *context, const char *words) {
    if (context != NULL && hr_owner_is_here(&context->owner)) {
        hr_engine_abort(&context->engine, words);
    }
}

HORO_API void horo_show_step(horo_context *context, const int64_t *step) {
    atomic_store(&context->node.step, step);
}

HORO_API uint64_t horo_count_of(horo_context *context, int32_t op) {
    return op < 0 || op >= HORO_ANY_OP_COUNT ? 0 : atomic_load(&context->engine.requests.count_of[op]);
}

HORO_API void horo_after_fork(horo_context *context) {
    hr_engine_close_fds(&context->engine);
}

/* HORO_OK in the process that made the context; else a status, with its sentence in `error`, which may be NULL. */
static int enter(const horo_context *context, char *error, size_t error_bytes) {
    if (context != NULL && hr_owner_is_here(&context->owner)) {
        return HORO_OK;
    }
    struct hr_error failure = {0};
    const int status =
        context == NULL ? hr_fail(&failure, HORO_ERR_NOT_INITIALIZED,
                                  "horo has not been initialized, or was shut down; call init()")
                        : hr_fail(&failure, HORO_ERR_FORKED,
                                  "this process was forked from a rank (process %d) after init(); horo can be used in "
                                  "the rank's own process only",
                                  (int)context->owner.pid);
    return leave(status, &failure, error, error_bytes);
}

HORO_API int horo_submit(horo_context *context, const horo_request *request, int64_t *handle, char *error,
                         size_t error_bytes) {
    struct hr_error failure;
    failure.code = HORO_OK; /* the text is written only with a code */
    if (context == NULL) {
        struct hr_request *made = NULL;
        const int status = hr_request_create(request, &made, &failure);
        hr_request_destroy(made);
        *handle = 0;
        return leave(status, &failure, error, error_bytes);
    }
    HR_TRY(enter(context, error, error_bytes));
    return leave(hr_engine_submit(&context->engine, request, handle, &failure), &failure, error, error_bytes);
}

HORO_API int horo_add_team(horo_context *context, const horo_team_setup *setup, int64_t *handle, char *error,
                           size_t error_bytes) {
    struct hr_error failure = {0};
    HR_TRY(enter(context, error, error_bytes));
    return leave(hr_sets_add(&context->engine, setup, handle, &failure), &failure, error, error_bytes);
}

HORO_API int horo_remove_team(horo_context *context, int32_t team, int64_t *handle, char *error, size_t error_bytes) {
    struct hr_error failure = {0};
    HR_TRY(enter(context, error, error_bytes));
    return leave(hr_sets_remove(&context->engine, team, handle, &failure), &failure, error, error_bytes);
}

HORO_API int horo_join(horo_context *context, int32_t team, int64_t *handle, char *error, size_t error_bytes) {
    struct hr_error failure = {0};
    HR_TRY(enter(context, error, error_bytes));
    return leave(hr_join_submit(&context->engine, team, handle, &failure), &failure, error, error_bytes);
}

HORO_API int horo_refuse(horo_context *context, int32_t team, const char *name, int32_t status, const char *reason) {
    HR_TRY(enter(context, NULL, 0));
    hr_drive_lock(&context->engine.drive);
    const int outcome = hr_requests_refuse(&context->engine.requests, team, name, status, reason);
    hr_drive_unlock(&context->engine.drive);
    return outcome < 0 ? outcome : HORO_OK;
}

static int begin_move(horo_context *context, const horo_request *call, struct hr_pair pair, int64_t *handle,
                      char *error, size_t error_bytes) {
    struct hr_error failure = {0};
    HR_TRY(enter(context, error, error_bytes));
    return leave(hr_pairs_submit(&context->engine.pairs, call, pair, handle, &failure), &failure, error, error_bytes);
}

HORO_API int horo_send(horo_context *context, const horo_tensor *tensor, int32_t peer, int32_t tag, int32_t flags,
                       int32_t timeout_ms, int64_t *handle, char *error, size_t error_bytes) {
    const horo_request call = {.op = HORO_SEND, .tensors = tensor, .flags = flags, .timeout_ms = timeout_ms};
    return begin_move(context, &call, (struct hr_pair){peer, tag}, handle, error, error_bytes);
}

HORO_API int horo_receive(horo_context *context, const horo_tensor *tensor, int32_t peer, int32_t tag, int32_t flags,
                          int32_t timeout_ms, int64_t *handle, char *error, size_t error_bytes) {
    const horo_request call = {.op = HORO_RECEIVE, .tensors = tensor, .flags = flags, .timeout_ms = timeout_ms};
    return begin_move(context, &call, (struct hr_pair){peer, tag}, handle, error, error_bytes);
}

HORO_API int horo_answer(horo_context *context, int64_t handle) {
    HR_TRY(enter(context, NULL, 0));
    return hr_requests_answer(&context->engine.requests, handle);
}

static int wait_for(horo_context *context, int64_t *handle, int32_t timeout_ms, enum hr_wait_end end, char *error,
                    size_t error_bytes) {
    HR_TRY(enter(context, error, error_bytes));
    return hr_requests_wait(&context->engine.requests, handle, timeout_ms, end, error, error_bytes);
}

HORO_API int horo_poll(horo_context *context, int64_t handle) {
    return wait_for(context, &handle, 0, HR_WAIT_KEEPS, NULL, 0);
}

HORO_API int horo_wait(horo_context *context, int64_t handle, int32_t timeout_ms, char *error, size_t error_bytes) {
    return wait_for(context, &handle, timeout_ms, HR_WAIT_KEEPS, error, error_bytes);
}

HORO_API int horo_use_cuda(horo_context *context, const char *const *paths, int32_t path_count, char *error,
                           size_t error_bytes) {
    struct hr_error failure = {0};
    const size_t count = path_count < 0 ? 0 : (size_t)path_count;
    HR_TRY(enter(context, error, error_bytes));
    return leave(hr_engine_use_cuda(&context->engine, paths, count, &failure), &failure, error, error_bytes);
}

HORO_API int horo_use_nccl(horo_context *context, const char *const *paths, int32_t path_count, int32_t device,
                           horo_gpu *found, char *error, size_t error_bytes) {
    struct hr_error failure = {0};
    const size_t count = path_count < 0 ? 0 : (size_t)path_count;
    HR_TRY(enter(context, error, error_bytes));
    const int status = hr_engine_use_nccl(&context->engine, paths, count, device, found, &failure);
    return leave(status, &failure, error, error_bytes);
}

HORO_API int horo_nccl_id(horo_context *context, char *id, char *error, size_t error_bytes) {
    struct hr_error failure = {0};
    HR_TRY(enter(context, error, error_bytes));
    return leave(hr_engine_nccl_id(&context->engine, id, &failure), &failure, error, error_bytes);
}

HORO_API int horo_connect_nccl(horo_context *context, const char *id, int32_t size, int32_t rank, char *error,
                               size_t error_bytes) {
    struct hr_error failure = {0};
    HR_TRY(enter(context, error, error_bytes));
    return leave(hr_engine_connect_nccl(&context->engine, id, size, rank, &failure), &failure, error, error_bytes);
}

HORO_API int horo_await_nccl(horo_context *context, int32_t is_world, int32_t timeout_ms, char *error,
                             size_t error_bytes) {
    struct hr_error failure = {0};
    HR_TRY(enter(context, error, error_bytes));
    return leave(hr_engine_await_nccl(&context->engine, is_world, timeout_ms, &failure), &failure, error, error_bytes);
}

HORO_API int horo_copy_back(horo_context *context, int64_t handle, uint64_t stream, char *error, size_t error_bytes) {
    struct hr_error failure = {0};
    HR_TRY(enter(context, error, error_bytes));
    return leave(hr_engine_copy_back(&context->engine, handle, stream, &failure), &failure, error, error_bytes);
}

HORO_API int horo_wait_any(horo_context *context, const int64_t *handles, int32_t count, int32_t timeout_ms) {
    HR_TRY(enter(context, NULL, 0));
    return hr_requests_wait_any(&context->engine.requests, handles, count, timeout_ms);
}

HORO_API int horo_finish(horo_context *context, int64_t handle, int32_t timeout_ms, char *error, size_t error_bytes) {
    return wait_for(context, &handle, timeout_ms, HR_WAIT_RELEASES, error, error_bytes);
}

HORO_API int horo_report_blocked(horo_context *context, const horo_waiting *waits, int32_t count, uint32_t question,
                                 const char *others) {
    HR_TRY(enter(context, NULL, 0));
    return hr_engine_report_blocked(&context->engine, waits, count, question, others);
}

HORO_API uint32_t horo_blocked_question(horo_context *context) {
    return enter(context, NULL, 0) == HORO_OK ? hr_engine_blocked_question(&context->engine) : 0;
}

HORO_API int32_t horo_callers(horo_context *context, uint64_t *threads, int32_t capacity) {
    HR_TRY(enter(context, NULL, 0));
    return hr_requests_callers(&context->engine.requests, threads, capacity);
}

HORO_API int horo_run(horo_context *context, const horo_request *request, int32_t timeout_ms, int64_t *handle,
                      char *error, size_t error_bytes) {
    struct hr_error failure;
    failure.code = HORO_OK; /* the text is written only with a code */
    *handle = 0;
    HR_TRY(enter(context, error, error_bytes));
    const int status = hr_engine_submit(&context->engine, request, handle, &failure);
    if (status != HORO_OK) {
        return leave(status, &failure, error, error_bytes);
    }
    return hr_requests_wait(&context->engine.requests, handle, timeout_ms, HR_WAIT_RELEASES_WHAT_FITS, NULL, 0);
}

HORO_API int horo_error(horo_context *context, int64_t handle, char *error, size_t error_bytes) {
    HR_TRY(enter(context, error, error_bytes));
    return hr_requests_error(&context->engine.requests, handle, error, error_bytes);
}

HORO_API int horo_take_result(horo_context *context, int64_t handle, int32_t index, void **data, int64_t *bytes,
                              int64_t *first_dims) {
    HR_TRY(enter(context, NULL, 0));
    return hr_requests_take(&context->engine.requests, handle, index, data, bytes, first_dims);
}

HORO_API void horo_free(void *data) {
    free(data);
}

HORO_API int horo_release(horo_context *context, int64_t handle) {
    HR_TRY(enter(context, NULL, 0));
    return hr_requests_release(&context->engine.requests, handle);
}

HORO_API int horo_health(horo_context *context, char *error, size_t error_bytes) {
    struct hr_error failure = {0};
    HR_TRY(enter(context, error, error_bytes));
    return leave(hr_end_check(&context->node, &failure), &failure, error, error_bytes);
}

HORO_API int32_t horo_read_events(horo_context *context, horo_event *events, int32_t capacity) {
    HR_TRY(enter(context, NULL, 0));
    return capacity < 0 ? HORO_ERR_USAGE : (int32_t)hr_recorder_read(&context->node.recorder, events, (size_t)capacity);
}

HORO_API int horo_start_timeline(horo_context *context, int descriptor, int32_t marks_batches, char *error,
                                 size_t error_bytes) {
    struct hr_error failure = {0};
    HR_TRY(enter(context, error, error_bytes));
    const int status = hr_timeline_start(&context->timeline, descriptor, marks_batches, &failure);
    return leave(status, &failure, error, error_bytes);
}

HORO_API int horo_stop_timeline(horo_context *context) {
    HR_TRY(enter(context, NULL, 0));
    hr_timeline_stop(&context->timeline);
    return HORO_OK;
}

HORO_API int horo_read_tuning(horo_context *context, uint64_t *values, int32_t *is_final) {
    HR_TRY(enter(context, NULL, 0));
    struct hr_engine *engine = &context->engine;
    hr_drive_lock(&engine->drive);
    memcpy(values, engine->tuned.values, sizeof engine->tuned.values);
    *is_final = engine->tuned.is_final;
    hr_drive_unlock(&engine->drive);
    return HORO_OK;
}

HORO_API int horo_propose_tuning(horo_context *context, const uint64_t *values, int32_t is_final, char *error,
                                 size_t error_bytes) {
    struct hr_error failure = {0};
    HR_TRY(enter(context, error, error_bytes));
    return leave(hr_engine_propose_tuning(&context->engine, values, is_final, &failure), &failure, error, error_bytes);
}

HORO_API void horo_read_counters(horo_context *context, horo_counters *counters) {
    const struct hr_node *node = &context->node;
    const struct hr_meter *meter = &context->engine.requests.meter;
    const struct hr_tick_sample then = node->recorder.created, now = hr_tick_sample();
    const double ns_per_tick = (double)(now.ns - then.ns) / (double)(now.ticks - then.ticks);
    *counters = (horo_counters){
        .requests = atomic_load(&node->counts.requests),
        .cache_hits = atomic_load(&node->counts.cache_hits),
        .counted = atomic_load(&node->counts.counted),
        .batches = atomic_load(&node->counts.batches),
        .tensors = atomic_load(&node->counts.tensors),
        .bytes = atomic_load(&node->counts.bytes),
        .messages_sent = atomic_load(&node->counts.messages_sent),
        .link_bytes = atomic_load(&node->counts.link_bytes),
        .sleeps = atomic_load(&node->sleeps),
        .wakes = atomic_load(&node->wakes),
        .moves = atomic_load(&node->core_choice.moves),
        .mpi_stranded = atomic_load(&node->mpi.stranded),
        .blocked_ns = (uint64_t)((double)atomic_load(&meter->blocked_ticks) * ns_per_tick),
        .moved_ns = (uint64_t)((double)atomic_load(&meter->moved_ticks) * ns_per_tick),
    };
}
