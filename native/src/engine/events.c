/* The events that the flight recorder gets from the engine, and when they are shown. */
#include <stdio.h>
#include <string.h>

#include "base/dtype.h"
#include "engine/engine.h"

enum { LINES = 16, TEXT_BYTES = 2 * HORO_MESSAGE_MAX - 128 }; /* of a line of the log, less its head */

static void note_all(struct hr_engine *engine, int event, struct hr_request *const *requests, size_t count, int status,
                     uint64_t ticks) {
    const int is_traced = hr_recorder_is_traced(&engine->node->recorder);
    for (size_t i = 0; i < count; i++) {
        if (requests[i]->refused != 0) {
            continue; /* it was never submitted */
        }
        hr_recorder_add(&engine->node->recorder, &(struct hr_event){
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
static void describe(struct hr_engine *engine, const struct hr_request *request) {
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
    hr_recorder_add_text(&engine->node->recorder, (uint32_t)request->name_hash, text, at);
}

void hr_engine_note_submitted(struct hr_engine *engine, struct hr_request *request) {
    if (hr_recorder_is_traced(&engine->node->recorder)) {
        describe(engine, request);
    }
    note_all(engine, HORO_EVENT_SUBMITTED, &request, 1, HORO_OK, hr_ticks());
}

void hr_engine_note_done(struct hr_engine *engine, struct hr_request *const *requests, size_t count, int status) {
    note_all(engine, status == HORO_OK ? HORO_EVENT_ENDED : HORO_EVENT_FAILED, requests, count, status, hr_ticks());
}

static int via(const struct hr_lane *lane, int moves_data) {
    if (!moves_data) {
        return HR_VIA_NONE;
    }
    const struct hr_transport *transport = lane->team->transport;
    if (transport == NULL) {
        return HR_VIA_SHM;
    }
    return strcmp(transport->ops->name, "mpi") == 0 ? HR_VIA_MPI : HR_VIA_TCP;
}

void hr_lane_note_record(const struct hr_lane *lane, int moves_data, int on_gpu) {
    struct hr_recorder *recorder = &lane->node->recorder;
    if (hr_recorder_is_traced(recorder)) {
        hr_recorder_add(recorder, &(struct hr_event){
                                      .event = HR_EVENT_RECORD,
                                      .op = -1,
                                      .team = lane->team->number,
                                      .number = on_gpu ? HR_VIA_GPU : via(lane, moves_data),
                                      .bytes = (int64_t)(hr_lane_place(lane) + hr_lane_step(lane)),
                                  });
    }
}

void hr_engine_note_batch(struct hr_engine *engine, struct hr_request *const *requests, size_t count, uint64_t bytes) {
    if (count == 0) {
        return;
    }
    const uint64_t ticks = hr_ticks(); /* one look at the counter for all */
    note_all(engine, HORO_EVENT_AGREED, requests, count, HORO_OK, ticks);
    hr_recorder_add(&engine->node->recorder, &(struct hr_event){
                                                 .ticks = ticks,
                                                 .event = HORO_EVENT_BEGUN,
                                                 .op = requests[0]->call.op,
                                                 .team = hr_team_number(requests[0]->call.team),
                                                 .number = (int32_t)count,
                                                 .bytes = (int64_t)bytes,
                                                 .name = requests[0]->call.name,
                                                 .name_bytes = requests[0]->name_bytes,
                                             });
}

void hr_engine_note_end(struct hr_engine *engine) {
    struct hr_recorder *recorder = &engine->node->recorder;
    const struct hr_abort end = hr_engine_end(engine);
    if (end.code == 0 || atomic_exchange(&recorder->end_noted, 1)) {
        return;
    }
    const int has_left =
        end.reason == HR_REASON_LEFT || (end.reason == HR_REASON_ENDED && end.code == HORO_ERR_ABORTED);
    hr_recorder_add(recorder, &(struct hr_event){
                                  .event = has_left ? HORO_EVENT_LEFT : HORO_EVENT_LOST,
                                  .op = -1,
                                  .status = has_left ? HORO_OK : end.code,
                                  .number = end.rank,
                              });
}

void hr_engine_show_events(struct hr_engine *engine, int level) {
    char text[TEXT_BYTES];
    if (hr_recorder_describe(&engine->node->recorder, LINES, text, sizeof text)) {
        hr_log(&engine->node->log, level, "the last events on this rank, the oldest first:%s", text);
    }
}

void hr_engine_show_end(struct hr_engine *engine) {
    hr_engine_note_end(engine); /* nobody need have driven since */
    const enum hr_abort_reason reason = hr_engine_end(engine).reason;
    const int is_explained = reason == HR_REASON_LEFT || reason == HR_REASON_ENDED;
    if (!is_explained && !atomic_exchange(&engine->node->recorder.end_shown, 1)) {
        hr_engine_show_events(engine, HORO_LOG_ERROR);
    }
}
