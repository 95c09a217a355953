#include "base/recorder.h"

#include <stdlib.h>
#include <string.h>

enum { OP_NONE = 15 };

static const char cut_mark[] = "...";

_Static_assert(sizeof(struct hr_record) == 64, "a record is one cache line");
_Static_assert(sizeof ((horo_event *)0)->name > HR_RECORDER_NAME_BYTES, "a name fits with its end");

int hr_recorder_init(struct hr_recorder *recorder) {
    *recorder = (struct hr_recorder){.created = hr_tick_sample()};
    recorder->records = aligned_alloc(_Alignof(struct hr_record), HR_RECORDER_RECORDS * sizeof *recorder->records);
    if (recorder->records == NULL) {
        return HORO_ERR_RESOURCE;
    }
    memset((void *)recorder->records, 0, HR_RECORDER_RECORDS * sizeof *recorder->records);
    return HORO_OK;
}

void hr_recorder_fini(struct hr_recorder *recorder) {
    free((void *)recorder->records);
    recorder->records = NULL;
}

/* The end of a name tells more than its beginning, which many share. Filled up with zeros. */
static void cut_name(const char *name, size_t name_bytes, uint64_t words[HR_RECORDER_NAME_WORDS]) {
    char text[HR_RECORDER_NAME_BYTES] = {0};
    if (name_bytes <= sizeof text) {
        if (name_bytes > 0) {
            memcpy(text, name, name_bytes);
        }
    } else {
        const size_t mark_bytes = sizeof cut_mark - 1;
        size_t from = name_bytes - (sizeof text - mark_bytes);
        while (from < name_bytes && ((unsigned char)name[from] & 0xc0) == 0x80) {
            from++; /* not in the middle of a character */
        }
        memcpy(text, cut_mark, mark_bytes);
        memcpy(text + mark_bytes, name + from, name_bytes - from);
    }
    memcpy(words, text, sizeof text);
}

static uint64_t pack(const struct hr_event *event) {
    const uint64_t op = event->op < 0 ? OP_NONE : (uint64_t)event->op & 15;
    return (uint64_t)(uint32_t)event->number << 32 | (uint64_t)(uint16_t)event->team << 16 |
           (uint64_t)(uint8_t)event->status << 8 | op << 4 | ((uint64_t)event->event & 15);
}

/*
 * The words are stored with release and loaded with acquire: whoever has seen a word of a record also sees that it is
 * being written. A fence would do the same, but ThreadSanitizer does not know fences.
 */
void hr_recorder_add(struct hr_recorder *recorder, const struct hr_event *event) {
    const uint64_t place = atomic_fetch_add_explicit(&recorder->next, 1, memory_order_relaxed);
    struct hr_record *record = &recorder->records[place % HR_RECORDER_RECORDS];
    const uint64_t writing = 2 * place + 1;
    uint64_t seen = atomic_load_explicit(&record->mark, memory_order_relaxed);
    /* Partner: the release of the last store below, by the one before. */
    if (seen % 2 != 0 || seen > writing ||
        !atomic_compare_exchange_strong_explicit(&record->mark, &seen, writing, memory_order_acquire,
                                                 memory_order_relaxed)) {
        return;
    }
    uint64_t words[HR_RECORDER_NAME_WORDS];
    cut_name(event->name, event->name_bytes, words);
    /* Partners of all these: the loads in hr_recorder_look. */
    atomic_store_explicit(&record->ticks, event->ticks != 0 ? event->ticks : hr_ticks(), memory_order_release);
    atomic_store_explicit(&record->bytes, (uint64_t)event->bytes, memory_order_release);
    atomic_store_explicit(&record->what, pack(event), memory_order_release);
    for (int i = 0; i < HR_RECORDER_NAME_WORDS; i++) {
        atomic_store_explicit(&record->name[i], words[i], memory_order_release);
    }
    atomic_store_explicit(&record->mark, writing + 1, memory_order_release);
}

static void unpack(uint64_t what, horo_event *event) {
    const int op = (int)(what >> 4 & 15);
    event->event = (int32_t)(what & 15);
    event->op = op == OP_NONE ? -1 : op;
    event->status = (int8_t)(what >> 8 & 0xff);
    event->team = (int32_t)(what >> 16 & 0xffff);
    event->number = (int32_t)(uint32_t)(what >> 32);
}

int hr_recorder_look(const struct hr_recorder *recorder, struct hr_tick_sample now, uint64_t place, horo_event *event) {
    const struct hr_record *record = &recorder->records[place % HR_RECORDER_RECORDS];
    const uint64_t stands = 2 * place + 2;
    /* partners: the stores in hr_recorder_add */
    if (atomic_load_explicit(&record->mark, memory_order_acquire) != stands) {
        return 0;
    }
    uint64_t words[HR_RECORDER_NAME_WORDS];
    const uint64_t ticks = atomic_load_explicit(&record->ticks, memory_order_acquire);
    const uint64_t bytes = atomic_load_explicit(&record->bytes, memory_order_acquire);
    const uint64_t what = atomic_load_explicit(&record->what, memory_order_acquire);
    for (int i = 0; i < HR_RECORDER_NAME_WORDS; i++) {
        words[i] = atomic_load_explicit(&record->name[i], memory_order_acquire);
    }
    if (atomic_load_explicit(&record->mark, memory_order_relaxed) != stands) {
        return 0;
    }
    *event = (horo_event){.time_ns = hr_tick_ns(recorder->created, now, ticks), .bytes = (int64_t)bytes};
    memcpy(event->name, words, sizeof words);
    unpack(what, event);
    return 1;
}

size_t hr_recorder_read(const struct hr_recorder *recorder, horo_event *events, size_t capacity) {
    const struct hr_tick_sample now = hr_tick_sample();
    const uint64_t end = atomic_load_explicit(&recorder->next, memory_order_relaxed);
    const size_t most = capacity < HR_RECORDER_RECORDS ? capacity : HR_RECORDER_RECORDS;
    size_t count = 0;
    for (uint64_t place = end > most ? end - most : 0; place < end; place++) {
        count += hr_recorder_look(recorder, now, place, &events[count]) != 0;
    }
    return count;
}
