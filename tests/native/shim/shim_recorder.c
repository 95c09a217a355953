#include "shim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/recorder.h"
#include "base/timeline.h"

struct shim_recorder {
    struct hr_recorder recorder;
    struct hr_recorder_tail tail;
    struct hr_log log;
    struct hr_timeline timeline;
};

shim_recorder *shim_recorder_create(void) {
    shim_recorder *made = calloc(1, sizeof *made);
    if (made == NULL || hr_recorder_init(&made->recorder) != HORO_OK) {
        free(made);
        return NULL;
    }
    hr_timeline_init(&made->timeline, &made->recorder, &made->log);
    return made;
}

void shim_recorder_destroy(shim_recorder *recorder) {
    hr_timeline_fini(&recorder->timeline);
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

uint64_t shim_recorder_claim(shim_recorder *recorder) {
    const uint64_t place = atomic_fetch_add(&recorder->recorder.next, 1);
    atomic_store(&recorder->recorder.records[place & atomic_load(&recorder->recorder.mask)].mark, 2 * place + 1);
    return place;
}

void shim_recorder_publish(shim_recorder *recorder, uint64_t place) {
    shim_recorder *other = shim_recorder_create(); /* whose record is copied */
    atomic_store(&other->recorder.mask, atomic_load(&recorder->recorder.mask));
    atomic_store(&other->recorder.next, place);
    shim_recorder_add(other, HORO_EVENT_SUBMITTED, HORO_ALLREDUCE, HORO_OK, 0, 2, 4, "held");
    const uint64_t index = place & atomic_load(&other->recorder.mask);
    const struct hr_record *from = &other->recorder.records[index];
    struct hr_record *to = &recorder->recorder.records[index];
    atomic_store(&to->ticks, atomic_load(&from->ticks));
    atomic_store(&to->bytes, atomic_load(&from->bytes));
    atomic_store(&to->what, atomic_load(&from->what));
    for (int i = 0; i < HR_RECORDER_NAME_WORDS; i++) {
        atomic_store(&to->name[i], atomic_load(&from->name[i]));
    }
    atomic_store(&to->mark, atomic_load(&from->mark));
    shim_recorder_destroy(other);
}

int32_t shim_recorder_look(shim_recorder *recorder, horo_event *events, int32_t capacity, uint64_t *lost) {
    int32_t count = 0;
    recorder->tail.now = hr_tick_sample();
    *lost = 0;
    while (count < capacity && hr_recorder_next(&recorder->recorder, &recorder->tail, &events[count], lost)) {
        count++;
    }
    return count;
}

void shim_recorder_add_requests(shim_recorder *recorder, int32_t count) {
    for (int32_t k = 0; k < count; k++) {
        shim_recorder_add(recorder, HORO_EVENT_SUBMITTED, HORO_ALLREDUCE, HORO_OK, 0, 1, 4, "x");
        shim_recorder_add(recorder, HORO_EVENT_ENDED, HORO_ALLREDUCE, HORO_OK, 0, 1, 4, "x");
    }
}

int shim_recorder_start_timeline(shim_recorder *recorder, int descriptor) {
    struct hr_error error = {0};
    return hr_timeline_start(&recorder->timeline, descriptor, 0, &error);
}

int shim_recorder_is_stopping(shim_recorder *recorder) {
    (void)pthread_mutex_lock(&recorder->timeline.lock);
    const int is_stopping = recorder->timeline.must_stop;
    (void)pthread_mutex_unlock(&recorder->timeline.lock);
    return is_stopping;
}

void shim_recorder_stop_timeline(shim_recorder *recorder) {
    hr_timeline_stop(&recorder->timeline);
}
