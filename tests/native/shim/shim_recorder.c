#include "shim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/recorder.h"
#include "base/timeline.h"

struct shim_recorder {
    struct hr_recorder recorder;
};

shim_recorder *shim_recorder_create(void) {
    shim_recorder *made = malloc(sizeof *made);
    if (made != NULL && hr_recorder_init(&made->recorder) != HORO_OK) {
        free(made);
        return NULL;
    }
    return made;
}

void shim_recorder_destroy(shim_recorder *recorder) {
    hr_recorder_fini(&recorder->recorder);
    free(recorder);
}

void shim_recorder_add(shim_recorder *recorder, int32_t event, int32_t op, int32_t status, int32_t team, int32_t number,
                       int64_t bytes, const char *name) {
    hr_recorder_add(&recorder->recorder, &(struct hr_event){
                                             .event = event,
                                             .op = op,
                                             .status = status,
                                             .team = team,
                                             .number = number,
                                             .bytes = bytes,
                                             .name = name,
                                             .name_bytes = strlen(name),
                                         });
}

void shim_recorder_add_many(shim_recorder *recorder, int32_t writer, int32_t count) {
    for (int32_t k = 1; k <= count; k++) {
        char name[32];
        (void)snprintf(name, sizeof name, "%d.%d", (int)writer, (int)k);
        shim_recorder_add(recorder, HORO_EVENT_SUBMITTED, HORO_BARRIER, HORO_OK, writer, k, k, name);
    }
}

int32_t shim_recorder_read_until(shim_recorder *recorder, int32_t last) {
    const struct hr_tick_sample now = hr_tick_sample();
    int32_t torn = 0;
    for (int done = 0; !done;) {
        const uint64_t end = atomic_load(&recorder->recorder.next);
        /* the records whose turn to be written comes next, and the last one */
        for (uint64_t ahead = 0; ahead < 8; ahead++) {
            const uint64_t place = ahead == 0 ? end - 1 : end - HR_RECORDER_RECORDS + ahead;
            horo_event event;
            if (end >= HR_RECORDER_RECORDS && hr_recorder_look(&recorder->recorder, now, place, &event)) {
                char name[32];
                (void)snprintf(name, sizeof name, "%d.%d", (int)event.team, (int)event.number);
                torn += event.bytes != event.number || strcmp(name, event.name) != 0;
                done |= event.number == last;
            }
        }
    }
    return torn;
}

int32_t shim_recorder_read(shim_recorder *recorder, horo_event *events, int32_t capacity) {
    return (int32_t)hr_recorder_read(&recorder->recorder, events, (size_t)capacity);
}

int shim_recorder_describe(shim_recorder *recorder, int lines, char *text, size_t text_bytes) {
    return hr_recorder_describe(&recorder->recorder, lines, text, text_bytes);
}

int shim_recorder_write_timeline(shim_recorder *recorder, int descriptor, int32_t count) {
    const struct hr_log log = {0};
    struct hr_error error = {0};
    struct hr_timeline timeline;
    hr_timeline_init(&timeline, &recorder->recorder, &log);
    const int status = hr_timeline_start(&timeline, descriptor, 0, &error);
    for (int32_t k = 0; status == HORO_OK && k < count; k++) {
        shim_recorder_add(recorder, HORO_EVENT_SUBMITTED, HORO_ALLREDUCE, HORO_OK, 0, 1, 4, "x");
        shim_recorder_add(recorder, HORO_EVENT_ENDED, HORO_ALLREDUCE, HORO_OK, 0, 1, 4, "x");
    }
    hr_timeline_fini(&timeline);
    return status;
}
