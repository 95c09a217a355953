#include "horo.h"

#include "shim_recorder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/recorder.h"

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

void shim_recorder_add(shim_recorder *recorder, int32_t event, int32_t op, int32_t status, int32_t team, int32_t number, int64_t bytes,
                       const char *name) {
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
    static const size_t capacity = HR_RECORDER_RECORDS;
    horo_event *events = malloc(capacity * sizeof *events);
    int32_t torn = 0;
    for (int done = events == NULL; !done;) {
        const size_t count = hr_recorder_read(&recorder->recorder, events, capacity);
        for (size_t i = 0; i < count; i++) {
            char name[32];
            (void)snprintf(name, sizeof name, "%d.%d", (int)events[i].team, (int)events[i].number);
            torn += events[i].bytes != events[i].number || strcmp(name, events[i].name) != 0;
            done |= events[i].number == last;
        }
    }
    free(events);
    return torn;
}

int32_t shim_recorder_read(shim_recorder *recorder, horo_event *events, int32_t capacity) {
    return (int32_t)hr_recorder_read(&recorder->recorder, events, (size_t)capacity);
}

int shim_recorder_describe(shim_recorder *recorder, int lines, char *text, size_t text_bytes) {
    return hr_recorder_describe(&recorder->recorder, lines, text, text_bytes);
}

int64_t shim_recorder_now_ns(void) {
    return hr_now_ns();
}
