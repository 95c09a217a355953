/* The end of a request: its callers get the outcome; and what the flight recorder gets of requests. */
#include <stdio.h>
#include <string.h>

#include "base/dtype.h"
#include "engine/requests/private.h"
#include "node/end.h"

/* ---- Events ---- */

static void note_all(struct hr_recorder *recorder, int event, struct hr_request *const *requests, size_t count,
                     int status, uint64_t ticks) {
    const int is_traced = hr_recorder_is_traced(recorder);
    for (size_t i = 0; i < count; i++) {
        if (requests[i]->refused != 0) {
            continue; /* it was never submitted */
        }
        hr_recorder_add(recorder, &(struct hr_event){
                                      .ticks = ticks,
                                      .event = event,
                                      .op = requests[i]->call.op,
                                      .status = status,
                                      .team = hr_team_number(requests[i]->call.team),
                                      .number = is_traced ? (int32_t)requests[i]->name_hash : 0,
                                      .bytes = requests[i]->data_bytes,
                                      .name = requests[i]->call.name,
                                      .name_bytes = requests[i]->name_bytes,
                                  });
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

void hr_requests_note_submitted(const struct hr_requests *requests, struct hr_request *request) {
    struct hr_recorder *recorder = &requests->node->recorder;
    if (hr_recorder_is_traced(recorder)) {
        describe(recorder, request);
    }
    note_all(recorder, HORO_EVENT_SUBMITTED, &request, 1, HORO_OK, hr_ticks());
}

void hr_requests_note_batch(const struct hr_requests *requests, struct hr_request *const *batch, size_t count,
                            uint64_t bytes) {
    if (count == 0) {
        return;
    }
    struct hr_recorder *recorder = &requests->node->recorder;
    const uint64_t ticks = hr_ticks(); /* one look at the counter for all */
    note_all(recorder, HORO_EVENT_AGREED, batch, count, HORO_OK, ticks);
    hr_recorder_add(recorder, &(struct hr_event){
                                  .ticks = ticks,
                                  .event = HORO_EVENT_BEGUN,
                                  .op = batch[0]->call.op,
                                  .team = hr_team_number(batch[0]->call.team),
                                  .number = (int32_t)count,
                                  .bytes = (int64_t)bytes,
                                  .name = batch[0]->call.name,
                                  .name_bytes = batch[0]->name_bytes,
                              });
}

/* ---- Completion ---- */

void hr_requests_complete_locked(struct hr_requests *requests, struct hr_request *request, int status,
                                 const char *text) {
    hr_port_remove(requests, request);
    if (request->cargo.hooks != NULL && request->cargo.hooks->ended != NULL) {
        request->cargo.hooks->ended(request->cargo.owner, request, status);
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
            done[i]->cargo.hooks->ended(done[i]->cargo.owner, done[i], status);
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
static void append_pending(const struct hr_requests *requests, char *text, size_t text_bytes) {
    size_t used = strlen(text);
    size_t count = 0;
    used += (size_t)snprintf(text + used, text_bytes - used, "; pending here: ");
    for (const struct hr_request *request = requests->oldest; request != NULL; request = request->newer) {
        if (count++ < HR_NAMES_IN_TEXT && used < text_bytes) {
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
    if (atomic_load(&requests->drive->pending) == 0) {
        return 0;
    }
    char text[HORO_MESSAGE_MAX];
    const struct hr_abort end = hr_end_find(requests->node);
    hr_end_describe(requests->node, end, text, sizeof text);
    hr_end_show(requests->node);
    hr_drive_lock(requests->drive);
    if (end.code != HORO_ERR_DEADLOCK) { /* which says what is waited for, of all ranks */
        append_pending(requests, text, sizeof text);
    }
    while (requests->oldest != NULL) {
        hr_requests_complete_locked(requests, requests->oldest, end.code, text);
    }
    requests->queue_head = NULL;
    requests->queue_tail = &requests->queue_head;
    atomic_store(&requests->queued, 0);
    hr_drive_wake_waiters(requests->drive);
    hr_drive_unlock(requests->drive);
    return 1;
}
