/* What the flight recorder gets from the engine, and when it is shown. */
#include "engine/engine.h"

enum { LINES = 16, TEXT_BYTES = 2 * HORO_MESSAGE_MAX - 128 }; /* of a line of the log, less its head */

static void note_all(struct hr_engine *engine, int event, struct hr_request *const *requests, size_t count, int status,
                     uint64_t ticks) {
    for (size_t i = 0; i < count; i++) {
        hr_recorder_add(&engine->node->recorder, &(struct hr_event){
                                                     .ticks = ticks,
                                                     .event = event,
                                                     .op = requests[i]->call.op,
                                                     .status = status,
                                                     .team = hr_team_number(requests[i]->call.team),
                                                     .bytes = requests[i]->data_bytes,
                                                     .name = requests[i]->call.name,
                                                     .name_bytes = requests[i]->name_bytes,
                                                 });
    }
}

void hr_engine_note_submitted(struct hr_engine *engine, struct hr_request *request) {
    note_all(engine, HORO_EVENT_SUBMITTED, &request, 1, HORO_OK, hr_ticks());
}

void hr_engine_note_done(struct hr_engine *engine, struct hr_request *const *requests, size_t count, int status) {
    note_all(engine, status == HORO_OK ? HORO_EVENT_ENDED : HORO_EVENT_FAILED, requests, count, status, hr_ticks());
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
    const int has_left = end.reason == HR_REASON_LEFT;
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
