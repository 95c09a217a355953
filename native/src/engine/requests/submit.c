/*
 * Submitting a request: from the caller to the queue of the driver.
 *
 * A call that was refused on this rank before anything of it was submitted is a request, too, without a handle. Other
 * ranks, whose calls of that name are in order, would wait for this one; so it is announced with the status and the
 * reason, and ends by the record FAIL that all get. Calls of one name keep their order: what is submitted under it
 * meanwhile stands behind the refusal, and goes into the queue when that is done.
 */
#include <stdio.h>
#include <string.h>

#include "base/op.h"
#include "engine/engine.h"
#include "engine/gpu/gpu.h"

/* The lane of the request's team; with the lock held. */
static int find_lane(const struct hr_engine *engine, struct hr_request *request, struct hr_error *error) {
    const horo_request *call = &request->call;
    const struct hr_team_place *place = hr_engine_find_team(engine, call->team, call->name, error);
    if (place == NULL) {
        return error->code;
    }
    struct hr_lane *lane = place->lane;
    if (lane == NULL) {
        return hr_fail(error, HORO_ERR_USAGE, "'%s': rank %d is no member of process set %d", call->name,
                       engine->node->rank, hr_team_number(call->team));
    }
    char name[HR_TEAM_NAME_BYTES];
    if (lane->refuses_requests) {
        return hr_fail(error, HORO_ERR_USAGE, "'%s': %s is being removed", call->name, hr_team_name(lane->team, name));
    }
    if (lane->is_joining) {
        return hr_fail(error, HORO_ERR_USAGE,
                       "'%s': rank %d has joined; it can submit nothing before all ranks have joined, which is when "
                       "join returns",
                       call->name, engine->node->rank);
    }
    if (call->op == HORO_BROADCAST && hr_team_member(lane->team, call->root_rank) < 0) {
        return call->team == 0
                   ? hr_fail(error, HORO_ERR_USAGE, "broadcast '%s': root rank %d does not exist; ranks are 0 to %d",
                             call->name, call->root_rank, lane->team->size - 1)
                   : hr_fail(error, HORO_ERR_USAGE, "broadcast '%s': root rank %d is no member of %s", call->name,
                             call->root_rank, hr_team_name(lane->team, name));
    }
    for (int i = 0; i < call->tensor_count && call->op == HORO_ALLTOALL; i++) {
        if (call->tensors[i].split_count != lane->team->size) {
            return hr_fail(error, HORO_ERR_USAGE, "alltoall '%s': %d splits; %d ranks take part", call->name,
                           call->tensors[i].split_count, lane->team->size);
        }
    }
    request->lane = lane;
    request->team_size = lane->team->size;
    request->team_rank = lane->team->rank;
    return HORO_OK;
}

void hr_engine_queue(struct hr_engine *engine, struct hr_request *request) {
    request->is_queued = 1;
    if (request->is_behind) {
        return;
    }
    request->next = NULL;
    *engine->submission.queue_tail = request;
    engine->submission.queue_tail = &request->next;
    atomic_fetch_add(&engine->submission.queued, 1);
}

/* With the lock held: the last one in flight of the request's name; NULL: there is none. */
static struct hr_request *last_of_name(const struct hr_request *request) {
    struct hr_request *last =
        hr_map_find(&request->lane->in_flight, request->name_hash, request->call.name, request->name_bytes);
    while (last != NULL && last->behind != NULL) {
        last = last->behind;
    }
    return last;
}

/* With the lock held: whether it may be the next call of its name, behind refusals or alone. */
static int is_next_of_name(struct hr_request *request) {
    const struct hr_request *last = last_of_name(request);
    request->is_behind = last != NULL;
    return last == NULL || last->refused != 0;
}

/* With the lock held: it is in flight. HORO_OK or HORO_ERR_RESOURCE. */
static int add_pending(struct hr_engine *engine, struct hr_request *request) {
    struct hr_lane *lane = request->lane;
    if (request->is_behind) {
        last_of_name(request)->behind = request;
    } else {
        HR_TRY(hr_map_insert(&lane->in_flight, request->name_hash, request->call.name, request->name_bytes, request));
    }
    request->older = engine->submission.newest;
    *(engine->submission.newest == NULL ? &engine->submission.oldest : &engine->submission.newest->newer) = request;
    engine->submission.newest = request;
    atomic_fetch_add(&engine->drive.pending, 1);
    atomic_store_explicit(&lane->pending, atomic_load_explicit(&lane->pending, memory_order_relaxed) + 1,
                          memory_order_relaxed);
    return HORO_OK;
}

/* With the lock held: whether it may be submitted; then it knows its lane. */
static int check(const struct hr_engine *engine, struct hr_request *request, struct hr_error *error) {
    const char *name = request->call.name;
    if (atomic_load(&engine->drive.stop)) {
        return hr_fail(error, HORO_ERR_ABORTED, "'%s': horo is shutting down", name);
    }
    HR_TRY(find_lane(engine, request, error));
    if (request->call.op == HORO_JOIN) {
        HR_TRY(hr_engine_check_join(engine, error));
    }
    if (!is_next_of_name(request)) {
        return hr_fail(error, HORO_ERR_DUPLICATE_NAME,
                       "'%s': a tensor of this name is being processed already; wait for it or use another name", name);
    }
    return HORO_OK;
}

/* With the lock held. */
static int enqueue(struct hr_engine *engine, struct hr_request *request, struct hr_error *error) {
    const char *name = request->call.name;
    HR_TRY(check(engine, request, error));
    hr_engine_note_caller(engine);
    request->handle = engine->submission.last_handle + 1;
    const uint64_t handle_hash = hr_hash_number(request->handle);
    const char *handle_key = (const char *)&request->handle;
    if (hr_map_insert(&engine->submission.handles, handle_hash, handle_key, sizeof request->handle, request) !=
        HORO_OK) {
        return hr_fail(error, HORO_ERR_RESOURCE, "'%s': out of memory", name);
    }
    if (add_pending(engine, request) != HORO_OK) {
        (void)hr_map_remove(&engine->submission.handles, handle_hash, handle_key, sizeof request->handle);
        return hr_fail(error, HORO_ERR_RESOURCE, "'%s': out of memory", name);
    }
    engine->submission.last_handle++;
    request->lane->is_joining = request->call.op == HORO_JOIN;
    if (request->staging == NULL) {
        hr_engine_queue(engine, request);
    }
    hr_engine_note_submitted(engine, request);
    atomic_fetch_add_explicit(&engine->node->counts.requests, 1, memory_order_relaxed);
    _Atomic uint64_t *count = &engine->submission.count_of[request->call.op]; /* changed here alone */
    atomic_store_explicit(count, atomic_load_explicit(count, memory_order_relaxed) + 1, memory_order_relaxed);
    return HORO_OK;
}

/* Its tensors stay on the GPU, or are on their way to the host; none of what is refused. */
static int place_on_gpu(struct hr_engine *engine, struct hr_request *request, struct hr_error *error) {
    hr_drive_lock(&engine->drive);
    const int status = check(engine, request, error);
    const int stays = status == HORO_OK && atomic_load(&request->lane->on_gpu) != NULL;
    hr_drive_unlock(&engine->drive);
    HR_TRY(status);
    return stays ? hr_gpu_place(engine, request, error) : hr_engine_stage(engine, request, error);
}

static int create_and_enqueue(struct hr_engine *engine, const horo_request *call, struct hr_lane *new_lane,
                              int64_t *handle, struct hr_error *error) {
    struct hr_request *request = NULL;
    HR_TRY(hr_request_create(call, &request, error));
    if (call->device != 0 && place_on_gpu(engine, request, error) != HORO_OK) {
        hr_request_destroy(request);
        return error->code;
    }
    const int is_staged = request->staging != NULL;
    hr_drive_lock(&engine->drive);
    const int status = enqueue(engine, request, error);
    if (status == HORO_OK) {
        request->new_lane = new_lane;
        *handle = request->handle;
        const int sync = (call->flags & HORO_SUBMIT_SYNC) != 0;
        if (!hr_drive_is_free(&engine->drive) || !sync) {
            hr_drive_kick(&engine->drive);
        }
    }
    hr_drive_unlock(&engine->drive);
    if (status != HORO_OK) {
        hr_request_destroy(request);
    } else if (is_staged) {
        hr_engine_launch(engine, request, *handle);
    }
    return status;
}

int hr_engine_submit_with(struct hr_engine *engine, const horo_request *call, struct hr_lane *new_lane, int64_t *handle,
                          struct hr_error *error) {
    /*
     * A process that ends at its error must not be taken for the cause: its driver tells other hosts first, then fails
     * this.
     */
    const int untold = atomic_load(&engine->drive.serves_hosts) && hr_arena_aborted(&engine->node->arena).code != 0;
    if (!untold && hr_engine_health(engine, error) != HORO_OK) {
        hr_engine_show_end(engine);
        return error->code;
    }
    return create_and_enqueue(engine, call, new_lane, handle, error);
}

int hr_engine_submit(struct hr_engine *engine, const horo_request *call, int64_t *handle, struct hr_error *error) {
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
    return hr_engine_submit_with(engine, call, NULL, handle, error);
}

/* ---- Refusals ---- */

enum { REASON_MAX = 700 };

/* With the lock held. 1: it is announced; 0: nobody waits for it, or a request of the name is under way here. */
static int enqueue_refusal(struct hr_engine *engine, struct hr_request *refusal) {
    struct hr_error unused = {0};
    const struct hr_team_place *place = hr_engine_find_team(engine, refusal->call.team, refusal->call.name, &unused);
    refusal->lane = place == NULL ? NULL : place->lane;
    if (refusal->lane == NULL || refusal->lane->refuses_requests || refusal->lane->is_joining ||
        atomic_load(&engine->drive.stop) || !is_next_of_name(refusal)) {
        return 0;
    }
    HR_TRY(add_pending(engine, refusal));
    hr_engine_queue(engine, refusal);
    hr_drive_kick(&engine->drive);
    return 1;
}

int hr_engine_refuse_locked(struct hr_engine *engine, int32_t team, const char *name, int32_t status,
                            const char *reason) {
    if (status != HORO_ERR_USAGE && status != HORO_ERR_UNSUPPORTED && status != HORO_ERR_RESOURCE) {
        return HORO_ERR_USAGE;
    }
    if (hr_engine_end(engine).code != HORO_OK || strcmp(name, HR_JOIN_NAME) == 0) {
        return 0;
    }
    /* The form of a request without tensors, of which there is nothing to refuse. */
    const horo_request call = {.name = name, .op = HORO_BARRIER, .prescale = 1.0, .postscale = 1.0, .team = team};
    struct hr_request *refusal = NULL;
    struct hr_error error = {0};
    HR_TRY(hr_request_create(&call, &refusal, &error));
    char text[HORO_MESSAGE_MAX];
    const struct hr_node *node = engine->node;
    (void)snprintf(text, sizeof text, "rank %d (%.200s) has refused it: %.*s", node->rank,
                   node->host_name_of_rank[node->rank], REASON_MAX, reason);
    refusal->refused = status;
    refusal->error_text = strdup(text);
    const int outcome = refusal->error_text == NULL ? HORO_ERR_RESOURCE : enqueue_refusal(engine, refusal);
    if (outcome != 1) {
        hr_request_destroy(refusal);
    }
    return outcome;
}

int hr_engine_refuse(struct hr_engine *engine, int32_t team, const char *name, int32_t status, const char *reason) {
    hr_drive_lock(&engine->drive);
    const int outcome = hr_engine_refuse_locked(engine, team, name, status, reason);
    hr_drive_unlock(&engine->drive);
    return outcome < 0 ? outcome : HORO_OK;
}
