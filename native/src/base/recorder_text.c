/* The flight recorder in words. */
#include <stdio.h>
#include <string.h>

#include "base/op.h"
#include "base/recorder.h"

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

static const char *size_text(int64_t bytes, char *out, size_t out_bytes) {
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB"};
    if (bytes < 1024) {
        (void)snprintf(out, out_bytes, "%lld bytes", (long long)bytes);
        return out;
    }
    double amount = (double)bytes / 1024;
    size_t unit = 0;
    for (; amount >= 1024 && unit + 1 < sizeof units / sizeof *units; unit++) {
        amount /= 1024;
    }
    (void)snprintf(out, out_bytes, "%.1f %s", amount, units[unit]);
    return out;
}

static const char *verb(int event) {
    switch (event) {
    case HORO_EVENT_SUBMITTED: return "submitted";
    case HORO_EVENT_BEGUN: return "began";
    case HORO_EVENT_ENDED: return "finished";
    case HORO_EVENT_FAILED: return "failed";
    default: return "did";
    }
}

static void write_run(const struct run *run, char *line, size_t line_bytes) {
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
        (void)snprintf(line, line_bytes, "%-9s  %s '%s'%s%s%s", verb(first->event), hr_op_name(first->op), first->name,
                       rest, run->bytes > 0 ? ", " : "",
                       run->bytes > 0 ? size_text(run->bytes, size, sizeof size) : "");
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
