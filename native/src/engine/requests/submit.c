/*
 * From the caller to the queue of the driver, and the end, where callers get the outcome.
 *
 * A call that was refused on this rank before anything of it was submitted is a request, too, without a handle. Other
 * ranks, whose calls of that name are in order, would wait for this one; so it is announced with the status and the
 * reason, and ends by the record FAIL that all get. Calls of one name keep their order: what is submitted under it
 * meanwhile stands behind the refusal, and goes into the queue when that is done.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/traits.h"
#include "engine/requests/requests.h"
#include "node/end.h"

void hr_requests_init(struct hr_requests *requests, struct hr_drive *drive) {
    *requests = (struct hr_requests){.drive = drive, .node = drive->node};
    requests->queue_tail = &requests->queue_head;
    for (int number = 0; number < HR_TEAMS_MAX; number++) {
        requests->places[number].id = number;
    }
}

void hr_requests_fini(struct hr_requests *requests) {
    for (size_t i = 0; i < requests->handle_capacity; i++) {
        hr_request_destroy(requests->handles[i]);
    }
    free((void *)requests->handles);
    hr_request_destroy(requests->spare);
}

/* ---- Events ---- */

static void note_all(struct hr_recorder *recorder, int event, struct hr_request *const *requests, size_t count,
                     int status, uint64_t ticks) {
    const int is_traced = hr_recorder_is_traced(recorder);
    for (size_t i = 0; i < count; i++) {
        const struct hr_request *one = requests[i];
        if (one->refused != 0) {
            continue; /* it was never submitted */
        }
        hr_recorder_add(recorder, &(struct hr_event){
            .ticks = ticks, .event = event, .op = one->call.op, .status = status,
            .team = hr_team_number(one->call.team), .number = is_traced ? (int32_t)one->name_hash : 0,
            .bytes = one->data_bytes, .name = one->call.name, .name_bytes = one->name_bytes});
    }
}

/*
 * For a timeline: the team's id, name, dtype and shape of the first tensor, and "adasum" or nothing, each with a
 * terminator.
 */
static void describe(struct hr_recorder *recorder, const struct hr_request *request) {
    char text[HORO_NAME_MAX + 48 + HORO_DIMS_MAX * 22];
    size_t at = (size_t)snprintf(text, sizeof text, "%d", (int)request->call.team) + 1;
    memcpy(text + at, request->call.name, request->name_bytes + 1);
    at += request->name_bytes + 1;
    if (request->call.tensor_count > 0) {
        const horo_tensor *tensor = &request->call.tensors[0];
        at += (size_t)snprintf(text + at, sizeof text - at, "%s", hr_dtype_name(tensor->dtype)) + 1;
        text[at++] = '[';
        for (int i = 0; i < tensor->ndim; i++) {
            const char *comma = i == 0 ? "" : ", ";
            at += (size_t)snprintf(text + at, sizeof text - at, "%s%lld", comma, (long long)tensor->shape[i]);
        }
        text[at++] = ']';
        text[at++] = '\0';
        at += (size_t)snprintf(text + at, sizeof text - at, "%s",
                               request->call.reduce_op == HORO_ADASUM ? "adasum" : "") + 1;
    }
    hr_recorder_add_text(recorder, (uint32_t)request->name_hash, text, at);
}

void hr_requests_note_batch(const struct hr_requests *requests, struct hr_request *const *batch, size_t count,
                            uint64_t bytes) {
    struct hr_recorder *recorder = &requests->node->recorder;
    const uint64_t ticks = hr_ticks(); /* one look at the counter for all */
    note_all(recorder, HORO_EVENT_AGREED, batch, count, HORO_OK, ticks);
    hr_recorder_add(recorder, &(struct hr_event){
        .ticks = ticks, .event = HORO_EVENT_BEGUN, .op = batch[0]->call.op,
        .team = hr_team_number(batch[0]->call.team), .number = (int32_t)count, .bytes = (int64_t)bytes,
        .name = batch[0]->call.name, .name_bytes = batch[0]->name_bytes});
}

/* ---- Completion ---- */

void hr_requests_complete_locked(struct hr_requests *requests, struct hr_request *request, int status,
                                 const char *text) {
    hr_port_remove(requests, request);
    if (request->cargo.hooks != NULL && request->cargo.hooks->ended != NULL) {
        request->cargo.hooks->ended(request, status);
    }
    if (request->refused != 0) { /* nobody waits for it */
        requests->passed++;
        hr_request_destroy(request);
        return;
    }
    request->error_text = text == NULL ? NULL : strdup(text);
    atomic_store(&request->status, status); /* last: from here on the caller may release it */
}

void hr_requests_complete(struct hr_requests *requests, struct hr_request *const *done, size_t count, int status,
                          const char *text) {
    note_all(&requests->node->recorder, status == HORO_OK ? HORO_EVENT_ENDED : HORO_EVENT_FAILED, done, count, status,
             hr_ticks());
    hr_drive_lock(requests->drive);
    for (size_t i = 0; i < count; i++) {
        if (done[i]->state == HR_REQUEST_STANDS_IN) {
            requests->passed++;
            done[i]->cargo.hooks->ended(done[i], status);
        } else {
            hr_requests_complete_locked(requests, done[i], status, text);
        }
    }
    hr_drive_wake_waiters(requests->drive);
    hr_drive_unlock(requests->drive);
}

void hr_port_drop_refusals(struct hr_port *port, int only_behind) {
    struct hr_request *older;
    for (struct hr_request *request = port->requests->newest; request != NULL; request = older) {
        older = request->older;
        if (request->port == port && request->refused != 0 && request->behind == NULL &&
            (request->is_behind || !only_behind)) {
            hr_requests_complete_locked(port->requests, request, HORO_ERR_ABORTED, NULL);
        }
    }
}

/* Behind the cause, which is whole: of the names as many as there is room for. */
void hr_requests_describe_end(const struct hr_requests *requests, struct hr_abort end, const struct hr_request *only,
                              char *text, size_t text_bytes) {
    hr_end_describe(requests->node, end, text, text_bytes);
    if (end.code == HORO_ERR_DEADLOCK) {
        return; /* its words name what is waited for, of all ranks */
    }
    size_t used = strlen(text);
    size_t count = 0;
    used += (size_t)snprintf(text + used, text_bytes - used, "; pending here: ");
    for (const struct hr_request *request = requests->oldest; request != NULL; request = request->newer) {
        if ((only == NULL || request == only) && count++ < HR_NAMES_IN_TEXT && used < text_bytes) {
            char where[32] = "";
            if (request->call.team != 0) {
                (void)snprintf(where, sizeof where, " (process set %d)", request->call.team % HORO_TEAM_ID_STEP);
            }
            used += (size_t)snprintf(text + used, text_bytes - used, "%s'%s'%s", count == 1 ? "" : ", ",
                                     request->call.name, where);
        }
    }
    if (count > HR_NAMES_IN_TEXT && used < text_bytes) {
        (void)snprintf(text + used, text_bytes - used, " and %zu more", count - HR_NAMES_IN_TEXT);
    }
}

int hr_requests_fail_all(struct hr_requests *requests) {
    struct hr_abort end = {0};
    char text[HORO_MESSAGE_MAX];
    struct hr_request *older;
    if (atomic_load(&requests->drive->pending) == 0) {
        return 0;
    }
    hr_drive_lock(requests->drive);
    requests->queue_head = NULL;
    requests->queue_tail = &requests->queue_head;
    atomic_store(&requests->queued, 0);
    for (struct hr_request *request = requests->newest; request != NULL; request = older) {
        older = request->older; /* in this order, what is behind a refusal does not get into the queue */
        if (request->port != NULL && end.code == 0) {
            end = hr_end_find(requests->node);
            hr_end_show(requests->node);
            hr_requests_describe_end(requests, end, NULL, text, sizeof text);
        }
        if (request->port != NULL) {
            hr_requests_complete_locked(requests, request, end.code, text);
        }
    }
    for (struct hr_request *request = requests->oldest; request != NULL; request = request->newer) {
        if (request->state == HR_REQUEST_QUEUED) {
            hr_requests_queue(requests, request);
        }
    }
    hr_drive_wake_waiters(requests->drive);
    hr_drive_unlock(requests->drive);
    return end.code != 0;
}

/* ---- Checks ---- */

/* The port of the request's process set; with the lock held. */
static hr_status find_port(const struct hr_requests *requests, struct hr_request *request, struct hr_error *error) {
    const horo_request *call = &request->call;
    struct hr_port *port;
    HR_TRY(hr_port_find(requests, call->team, call->name, &port, error));
    if (port == NULL) {
        return hr_fail(error, HORO_ERR_USAGE, "'%s': rank %d is no member of process set %d", call->name,
                       requests->node->rank, hr_team_number(call->team));
    }
    const struct hr_team *team = port->team;
    char name[HR_TEAM_NAME_BYTES];
    if (port->state == HR_PORT_REMOVING) {
        return hr_fail(error, HORO_ERR_USAGE, "'%s': %s is being removed", call->name, hr_team_name(team, name));
    }
    if (port->state == HR_PORT_PAUSED) {
        return hr_fail(error, HORO_ERR_USAGE,
                       "'%s': rank %d has joined; it can submit nothing before all ranks have joined, which is when "
                       "join returns",
                       call->name, requests->node->rank);
    }
    if (hr_op_is(call->op, HR_OP_ROOTED) && hr_team_member(team, call->root_rank) < 0) {
        const char *op = hr_op_name(call->op);
        return call->team == 0
                   ? hr_fail(error, HORO_ERR_USAGE, "%s '%s': root rank %d does not exist; ranks are 0 to %d", op,
                             call->name, call->root_rank, team->size - 1)
                   : hr_fail(error, HORO_ERR_USAGE, "%s '%s': root rank %d is no member of %s", op, call->name,
                             call->root_rank, hr_team_name(team, name));
    }
    for (int i = 0; i < call->tensor_count && call->op == HORO_ALLTOALL; i++) {
        if (call->tensors[i].split_count != team->size) {
            return hr_fail(error, HORO_ERR_USAGE, "alltoall '%s': %d splits; %d ranks take part", call->name,
                           call->tensors[i].split_count, team->size);
        }
    }
    request->port = port;
    request->team_size = team->size;
    request->team_rank = team->rank;
    return HORO_OK;
}

hr_status hr_requests_check(const struct hr_requests *requests, struct hr_request *request, struct hr_error *error) {
    const char *name = request->call.name;
    const struct hr_hooks *hooks = request->cargo.hooks;
    if (atomic_load(&requests->drive->stop)) {
        return hr_fail(error, HORO_ERR_ABORTED, "'%s': horo is shutting down", name);
    }
    if (hr_op_is(request->call.op, HR_OP_OF_PAIRS)) {
        return HORO_OK;
    }
    HR_TRY(find_port(requests, request, error));
    HR_TRY(hooks == NULL || hooks->check == NULL ? HORO_OK : hooks->check(request, error));
    if (!hr_port_is_next(request)) {
        return hr_fail(error, HORO_ERR_DUPLICATE_NAME,
                       "'%s': a tensor of this name is being processed already; wait for it or use another name", name);
    }
    return HORO_OK;
}

/* ---- Submitting ---- */

hr_status hr_requests_create(struct hr_requests *requests, const horo_request *call, struct hr_request **request,
                             struct hr_error *error) {
    struct hr_node *node = requests->node;
    /* A process that ends at its error must not be taken for the cause: its driver tells other hosts first. */
    const int is_aborted = hr_arena_aborted(&node->arena).code != 0;
    const int untold = atomic_load(&requests->drive->serves_hosts) && is_aborted;
    const int outlives = hr_op_is(call->op, HR_OP_OF_PAIRS) && !is_aborted;
    if (!untold && !outlives && hr_end_check(node, error) != HORO_OK) {
        hr_end_show(node);
        return error->code;
    }
    *request = NULL;
    if ((call->flags & HORO_SUBMIT_SYNC) != 0) {
        hr_drive_lock(requests->drive);
        if (requests->spare != NULL && hr_request_is_like(requests->spare, call)) {
            *request = requests->spare;
            requests->spare = NULL;
        }
        hr_drive_unlock(requests->drive);
    }
    if (*request == NULL) {
        return hr_request_create(call, request, error);
    }
    hr_request_renew(*request, call);
    return HORO_OK;
}

/* With the lock held: makes room for one handle. */
static hr_status reserve_handle(struct hr_requests *requests) {
    const size_t former = requests->handle_capacity;
    if (2 * (requests->handle_count + 1) <= former) {
        return HORO_OK;
    }
    const size_t capacity = former == 0 ? 64 : 2 * former;
    struct hr_request **larger = calloc(capacity, sizeof *larger);
    if (larger == NULL) {
        return HORO_ERR_RESOURCE;
    }
    struct hr_request **smaller = requests->handles;
    for (size_t i = 0; i < former; i++) {
        if (smaller[i] != NULL) {
            larger[(size_t)smaller[i]->handle & (capacity - 1)] = smaller[i];
        }
    }
    requests->handles = larger;
    requests->handle_capacity = capacity;
    free((void *)smaller);
    return HORO_OK;
}

/* With the lock held. */
static hr_status add(struct hr_requests *requests, struct hr_request *request, struct hr_error *error) {
    HR_TRY(hr_requests_check(requests, request, error));
    hr_requests_note_caller(requests);
    if (reserve_handle(requests) != HORO_OK || hr_port_add(requests, request) != HORO_OK) {
        return hr_fail(error, HORO_ERR_RESOURCE, "'%s': out of memory", request->call.name);
    }
    struct hr_request **place;
    do { /* a number whose place is taken is never given */
        request->handle = ++requests->last_handle;
        place = &requests->handles[(size_t)request->handle & (requests->handle_capacity - 1)];
    } while (*place != NULL);
    *place = request;
    requests->handle_count++;
    if (hr_op_is(request->call.op, HR_OP_LAST)) {
        request->port->state = HR_PORT_PAUSED;
    }
    if (request->state == HR_REQUEST_QUEUED) {
        hr_requests_queue(requests, request);
    }
    struct hr_recorder *recorder = &requests->node->recorder;
    if (hr_recorder_is_traced(recorder)) {
        describe(recorder, request);
    }
    note_all(recorder, HORO_EVENT_SUBMITTED, &request, 1, HORO_OK, hr_ticks());
    atomic_fetch_add_explicit(&requests->node->counts.requests, 1, memory_order_relaxed);
    _Atomic uint64_t *count = &requests->count_of[request->call.op]; /* changed here alone */
    atomic_store_explicit(count, atomic_load_explicit(count, memory_order_relaxed) + 1, memory_order_relaxed);
    if (!hr_drive_is_free(requests->drive) || (request->call.flags & HORO_SUBMIT_SYNC) == 0) {
        hr_drive_kick(requests->drive);
    }
    return HORO_OK;
}

hr_status hr_requests_add(struct hr_requests *requests, struct hr_request *request, int64_t *handle,
                          struct hr_error *error) {
    hr_drive_lock(requests->drive);
    const hr_status status = add(requests, request, error);
    if (status == HORO_OK) {
        *handle = request->handle;
    }
    hr_drive_unlock(requests->drive);
    if (status != HORO_OK) {
        hr_request_destroy(request);
    }
    return status;
}

hr_status hr_requests_submit(struct hr_requests *requests, const horo_request *call, struct hr_cargo cargo,
                             int64_t *handle, struct hr_error *error) {
    struct hr_request *request = NULL;
    const hr_status status = hr_requests_create(requests, call, &request, error);
    if (status != HORO_OK) {
        hr_cargo_drop(&cargo);
        return status;
    }
    request->cargo = cargo;
    return hr_requests_add(requests, request, handle, error);
}

/* ---- Refusals ---- */

enum { REASON_MAX = 700 };

int hr_requests_refuse(struct hr_requests *requests, int32_t team, const char *name, int32_t status,
                       const char *reason) {
    const struct hr_node *node = requests->node;
    if (status != HORO_ERR_USAGE && status != HORO_ERR_UNSUPPORTED && status != HORO_ERR_RESOURCE) {
        return HORO_ERR_USAGE;
    }
    struct hr_port *port = NULL;
    if (hr_end_find(node).code != HORO_OK || (name != NULL && strcmp(name, HR_JOIN_NAME) == 0) ||
        hr_port_find(requests, team, name, &port, NULL) != HORO_OK || port == NULL || port->state != HR_PORT_OPEN ||
        atomic_load(&requests->drive->stop)) {
        return 0;
    }
    /* The form of a request without tensors, of which there is nothing to refuse. */
    const horo_request call = {.name = name, .op = HORO_BARRIER, .flags = name == NULL ? HORO_SUBMIT_ORDERED : 0,
                               .prescale = 1.0, .postscale = 1.0, .team = team};
    struct hr_request *refusal = NULL;
    HR_TRY(hr_request_create(&call, &refusal, NULL));
    char text[HORO_MESSAGE_MAX];
    (void)snprintf(text, sizeof text, "rank %d (%.200s) has refused it: %.*s", node->rank,
                   node->host_name_of_rank[node->rank], REASON_MAX, reason);
    refusal->port = port;
    refusal->refused = status;
    refusal->error_text = strdup(text);
    const int is_next = hr_port_is_next(refusal); /* else a request of the name is under way here */
    int outcome = refusal->error_text == NULL ? HORO_ERR_RESOURCE : HORO_OK;
    if (is_next && outcome == HORO_OK) {
        outcome = hr_port_add(requests, refusal);
    }
    if (!is_next || outcome != HORO_OK) {
        hr_request_destroy(refusal);
        return outcome;
    }
    hr_requests_queue(requests, refusal);
    hr_drive_kick(requests->drive);
    return 1;
}
