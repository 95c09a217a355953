#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "base/cut.h"
#include "base/recorder.h"
#include "base/traits.h"

enum { OP_NONE = 15 }; /* the lower bits of -1 */

static const char cut_mark[] = "...";

_Static_assert(sizeof(struct hr_record) == 64, "a record is one cache line");
_Static_assert(sizeof ((horo_event *)0)->name > HR_RECORDER_NAME_BYTES, "a name fits with its end");

enum { MEMORY_BYTES = HR_RECORDER_TRACED_RECORDS * sizeof(struct hr_record) };

hr_status hr_recorder_init(struct hr_recorder *recorder) {
    *recorder = (struct hr_recorder){.created = hr_tick_sample(), .mask = HR_RECORDER_RECORDS - 1};
    /* pages are touched only when used */
    void *memory = mmap(NULL, MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        return HORO_ERR_RESOURCE;
    }
    recorder->records = memory;
    return HORO_OK;
}

void hr_recorder_fini(struct hr_recorder *recorder) {
    if (recorder->records != NULL) {
        (void)munmap((void *)recorder->records, MEMORY_BYTES);
        recorder->records = NULL;
    }
}

void hr_recorder_trace(struct hr_recorder *recorder, int is_traced) {
    const int records = is_traced ? HR_RECORDER_TRACED_RECORDS : HR_RECORDER_RECORDS;
    atomic_store_explicit(&recorder->mask, (uint64_t)records - 1, memory_order_relaxed);
}

/*
 * The words are stored with release and loaded with acquire: whoever has seen a word of a record also sees that it is
 * being written. A fence would do the same, but ThreadSanitizer does not know fences.
 */
static void write_at(struct hr_recorder *recorder, uint64_t place, const struct hr_event *event) {
    struct hr_record *record = &recorder->records[place & atomic_load_explicit(&recorder->mask, memory_order_relaxed)];
    const uint64_t writing = 2 * place + 1;
    uint64_t seen = atomic_load_explicit(&record->mark, memory_order_relaxed);
    /* Partner: the release of the last store below, by the one before. */
    if (seen % 2 != 0 || seen > writing ||
        !atomic_compare_exchange_strong_explicit(&record->mark, &seen, writing, memory_order_acquire,
                                                 memory_order_relaxed)) {
        uint64_t last = atomic_load_explicit(&recorder->dropped, memory_order_relaxed);
        while (last <= place && !atomic_compare_exchange_weak(&recorder->dropped, &last, place + 1)) {
        }
        return;
    }
    uint64_t words[HR_RECORDER_NAME_WORDS];
    /* The end of a name tells more than its beginning, which many share. Filled up with zeros. */
    char text[HR_RECORDER_NAME_BYTES] = {0};
    if (event->name_bytes <= sizeof text) {
        if (event->name_bytes > 0) {
            memcpy(text, event->name, event->name_bytes);
        }
    } else {
        const size_t mark_bytes = sizeof cut_mark - 1;
        size_t from = event->name_bytes - (sizeof text - mark_bytes);
        while (from < event->name_bytes && ((unsigned char)event->name[from] & 0xc0) == 0x80) {
            from++; /* not in the middle of a character */
        }
        memcpy(text, cut_mark, mark_bytes);
        memcpy(text + mark_bytes, event->name + from, event->name_bytes - from);
    }
    memcpy(words, text, sizeof text);
    const uint64_t what = (uint64_t)(uint32_t)event->number << 32 | (uint64_t)(uint16_t)event->team << 16 |
                          (uint64_t)(uint8_t)event->status << 8 | ((uint64_t)event->op & 15) << 4 |
                          ((uint64_t)event->event & 15);
    /* Partners of all these: the loads in read_at. */
    atomic_store_explicit(&record->ticks, event->ticks != 0 ? event->ticks : hr_ticks(), memory_order_release);
    atomic_store_explicit(&record->bytes, (uint64_t)event->bytes, memory_order_release);
    atomic_store_explicit(&record->what, what, memory_order_release);
    for (int i = 0; i < HR_RECORDER_NAME_WORDS; i++) {
        atomic_store_explicit(&record->name[i], words[i], memory_order_release);
    }
    atomic_store_explicit(&record->mark, writing + 1, memory_order_release);
}

void hr_recorder_add(struct hr_recorder *recorder, const struct hr_event *event) {
    write_at(recorder, atomic_fetch_add_explicit(&recorder->next, 1, memory_order_relaxed), event);
}

void hr_recorder_add_text(struct hr_recorder *recorder, uint32_t hash, const char *text, size_t text_bytes) {
    const size_t parts = hr_divide_up(text_bytes, HR_RECORDER_NAME_BYTES);
    const uint64_t place = atomic_fetch_add_explicit(&recorder->next, parts, memory_order_relaxed);
    const uint64_t ticks = hr_ticks();
    for (size_t i = 0; i < parts; i++) {
        const size_t offset = i * HR_RECORDER_NAME_BYTES;
        write_at(recorder, place + i,
                 &(struct hr_event){
                     .ticks = ticks,
                     .event = HR_EVENT_TEXT,
                     .op = -1,
                     .number = (int32_t)hash,
                     .bytes = (int64_t)((uint64_t)text_bytes << 32 | offset),
                     .name = text + offset,
                     .name_bytes = hr_smaller(text_bytes - offset, HR_RECORDER_NAME_BYTES),
                 });
    }
}

static int read_at(const struct hr_recorder *recorder, const struct hr_record *record, struct hr_tick_sample now,
                   uint64_t place, horo_event *event) {
    const uint64_t stands = 2 * place + 2;
    /* partners: the stores in write_at */
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
    /* that reading lies between two samples of both clocks, or shortly after the second */
    const double span_ticks = (double)(int64_t)(now.ticks - recorder->created.ticks);
    const double ns_per_tick = span_ticks > 0 ? (double)(now.ns - recorder->created.ns) / span_ticks : 0;
    const int64_t ago_ns = (int64_t)((double)(int64_t)(now.ticks - ticks) * ns_per_tick);
    const int op = (int)(what >> 4 & 15);
    *event = (horo_event){.time_ns = now.ns - ago_ns, .bytes = (int64_t)bytes, .event = (int32_t)(what & 15)};
    memcpy(event->name, words, sizeof words);
    event->op = op == OP_NONE ? -1 : op;
    event->status = (int8_t)(what >> 8 & 0xff);
    event->team = (int32_t)(what >> 16 & 0xffff);
    event->number = (int32_t)(uint32_t)(what >> 32);
    return 1;
}

/* A record that was written before the ring changed its size is where that size puts it. */
int hr_recorder_look(const struct hr_recorder *recorder, struct hr_tick_sample now, uint64_t place, horo_event *event) {
    const struct hr_record *records = recorder->records;
    return read_at(recorder, &records[place % HR_RECORDER_RECORDS], now, place, event) ||
           read_at(recorder, &records[place % HR_RECORDER_TRACED_RECORDS], now, place, event);
}

int hr_recorder_next(const struct hr_recorder *recorder, struct hr_recorder_tail *tail, horo_event *event,
                     uint64_t *lost) {
    for (;;) {
        const uint64_t end = atomic_load_explicit(&recorder->next, memory_order_relaxed);
        const uint64_t records = atomic_load_explicit(&recorder->mask, memory_order_relaxed) + 1;
        const uint64_t dropped = atomic_load_explicit(&recorder->dropped, memory_order_relaxed);
        if (tail->place >= end) {
            return 0;
        }
        if (end - tail->place > records) {
            *lost += end - records - tail->place;
            tail->place = end - records;
        }
        if (hr_recorder_look(recorder, tail->now, tail->place, event)) {
            tail->place++;
            return 1;
        }
        const struct hr_record *record = &recorder->records[tail->place % records];
        const uint64_t mark = atomic_load_explicit(&record->mark, memory_order_relaxed);
        if (mark == 2 * tail->place + 2) {
            continue; /* since the look */
        }
        /* A writer drops its event only once the ring has come round to a record that is still being written. */
        if (mark < 2 * tail->place + 2 && tail->place >= tail->given_up && tail->place >= dropped) {
            return 0;
        }
        tail->place++;
        (*lost)++;
    }
}

size_t hr_recorder_read(const struct hr_recorder *recorder, horo_event *events, size_t capacity) {
    const struct hr_tick_sample now = hr_tick_sample();
    const uint64_t end = atomic_load_explicit(&recorder->next, memory_order_relaxed);
    const size_t most = capacity < HR_RECORDER_RECORDS ? capacity : HR_RECORDER_RECORDS;
    size_t count = 0;
    for (uint64_t place = end > most ? end - most : 0; place < end; place++) {
        count += hr_recorder_look(recorder, now, place, &events[count]) && events[count].event <= HORO_EVENT_LOST;
    }
    return count;
}

/* ---- In words ---- */

enum { LINE_BYTES = 192 };

/* Records of one kind that follow one another. */
struct run {
    horo_event first, last;
    int64_t bytes;
    size_t count;
};

/* From the last record backwards; returns how many runs. That all agreed is told by the batch that begins. */
static int collect(const struct hr_recorder *recorder, struct hr_tick_sample now, uint64_t end, struct run *runs,
                   int most) {
    const uint64_t begin = end > HR_RECORDER_RECORDS ? end - HR_RECORDER_RECORDS : 0;
    int count = 0;
    for (uint64_t place = end; place > begin; place--) {
        horo_event event;
        if (!hr_recorder_look(recorder, now, place - 1, &event) || event.event == HORO_EVENT_AGREED ||
            event.event > HORO_EVENT_LOST) {
            continue;
        }
        const int is_alone =
            event.event == HORO_EVENT_BEGUN || event.event == HORO_EVENT_LEFT || event.event == HORO_EVENT_LOST;
        if (count == 0 || is_alone || runs[count - 1].first.event != event.event) {
            if (count == most) {
                break;
            }
            runs[count++] = (struct run){.last = event};
        }
        struct run *run = &runs[count - 1];
        run->first = event;
        run->bytes += event.bytes;
        run->count++;
    }
    return count;
}

static void write_run(const struct run *run, char *line, size_t line_bytes) {
    static const char *const verbs[] = {[HORO_EVENT_SUBMITTED] = "submitted",
                                        [HORO_EVENT_AGREED] = "did",
                                        [HORO_EVENT_BEGUN] = "began",
                                        [HORO_EVENT_ENDED] = "finished",
                                        [HORO_EVENT_FAILED] = "failed"};
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    const horo_event *event = &run->last;
    if (event->event == HORO_EVENT_LEFT) {
        (void)snprintf(line, line_bytes, "the group ended: rank %d has shut horo down", (int)event->number);
    } else if (event->event == HORO_EVENT_LOST) {
        char who[32] = "";
        if (event->number >= 0) {
            (void)snprintf(who, sizeof who, ", rank %d", (int)event->number);
        }
        (void)snprintf(line, line_bytes, "the group ended: %s%s", horo_status_name(event->status), who);
    } else {
        char size[32] = "";
        char rest[112] = "";
        const horo_event *first = &run->first;
        if (first->event == HORO_EVENT_BEGUN && first->number > 1) {
            (void)snprintf(rest, sizeof rest, " and %d more in one batch", (int)first->number - 1);
        } else if (run->count > 1) {
            (void)snprintf(rest, sizeof rest, " to %s '%s', %zu in all", hr_op_name(event->op), event->name,
                           run->count);
        } else if (first->event == HORO_EVENT_FAILED) {
            (void)snprintf(rest, sizeof rest, ": %s error", horo_status_name(first->status));
        }
        double amount = (double)run->bytes;
        int unit = 0;
        for (; amount >= 1024 && unit < 4; unit++) {
            amount /= 1024;
        }
        if (run->bytes > 0) {
            (void)snprintf(size, sizeof size, ", %.*f %s", unit > 0, amount, units[unit]);
        }
        (void)snprintf(line, line_bytes, "%-9s  %s '%s'%s%s", verbs[first->event], hr_op_name(first->op), first->name,
                       rest, size);
    }
}

int hr_recorder_describe(struct hr_recorder *recorder, int lines, char *text, size_t text_bytes) {
    const struct hr_tick_sample now = hr_tick_sample();
    const uint64_t end = atomic_load_explicit(&recorder->next, memory_order_relaxed);
    struct run runs[HR_RECORDER_LINES_MAX];
    const int count = collect(recorder, now, end, runs, lines < HR_RECORDER_LINES_MAX ? lines : HR_RECORDER_LINES_MAX);
    /* the text grows towards its beginning, so that the last lines are the ones that fit */
    size_t from = text_bytes - 1;
    text[from] = '\0';
    for (int i = 0; i < count; i++) {
        char line[LINE_BYTES];
        const int head = snprintf(line, sizeof line, "\n%9.3f s ago  ", (double)(now.ns - runs[i].last.time_ns) / 1e9);
        write_run(&runs[i], line + head, sizeof line - (size_t)head);
        const size_t length = strlen(line);
        if (length > from) {
            break;
        }
        from -= length;
        memcpy(text + from, line, length);
    }
    memmove(text, text + from, text_bytes - from);
    return atomic_exchange_explicit(&recorder->described, end, memory_order_relaxed) != end;
}
