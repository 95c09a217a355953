#include "base/timeline.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/system.h"

enum { LOOK_MS = 50, LAST_WRITERS_MS = 2000 };

void hr_timeline_init(struct hr_timeline *timeline, struct hr_recorder *recorder, const struct hr_log *log) {
    *timeline = (struct hr_timeline){.recorder = recorder, .log = log};
    hr_condition_init(&timeline->changed);
    (void)pthread_mutex_init(&timeline->lock, NULL);
    (void)pthread_mutex_init(&timeline->control, NULL);
}

void hr_timeline_fini(struct hr_timeline *timeline) {
    hr_timeline_stop(timeline);
    (void)pthread_cond_destroy(&timeline->changed);
    (void)pthread_mutex_destroy(&timeline->lock);
    (void)pthread_mutex_destroy(&timeline->control);
}

static void flush(struct hr_timeline *timeline) {
    const char *bytes = (const char *)timeline->rows;
    size_t left = (size_t)timeline->row_count * sizeof timeline->rows[0];
    timeline->row_count = 0;
    while (left > 0 && !timeline->has_failed) {
        const ssize_t written = write(timeline->fd, bytes, left);
        if (written > 0) {
            bytes += written;
            left -= (size_t)written;
        } else if (written == 0 || errno != EINTR) {
            timeline->has_failed = 1;
            hr_log(timeline->log, HORO_LOG_WARNING, "the timeline ends here, since it cannot be written: %s",
                   strerror(written == 0 ? ENOSPC : errno));
        }
    }
}

static void put(struct hr_timeline *timeline, const horo_event *event) {
    timeline->rows[timeline->row_count++] = *event;
    if (timeline->row_count == HR_TIMELINE_ROWS) {
        flush(timeline);
    }
}

static void look(struct hr_timeline *timeline) {
    timeline->tail.now = hr_tick_sample();
    for (int has_event = 1; has_event;) {
        horo_event event;
        uint64_t lost = 0;
        has_event = hr_recorder_next(timeline->recorder, &timeline->tail, &event, &lost);
        if (lost > 0) {
            put(timeline, &(horo_event){.event = HR_EVENT_GAP, .bytes = (int64_t)lost});
        }
        if (has_event && (event.event != HORO_EVENT_BEGUN ||
                          atomic_load_explicit(&timeline->marks_batches, memory_order_relaxed))) {
            put(timeline, &event);
        }
    }
    flush(timeline);
}

static void *write_timeline(void *arg) {
    struct hr_timeline *timeline = arg;
    for (int must_stop = 0; !must_stop;) {
        (void)pthread_mutex_lock(&timeline->lock);
        if (!timeline->must_stop) {
            hr_condition_wait(&timeline->changed, &timeline->lock, hr_now_ns() + LOOK_MS * 1000000ll);
        }
        must_stop = timeline->must_stop;
        (void)pthread_mutex_unlock(&timeline->lock);
        look(timeline);
    }
    /* Writers that have their place may not have a core at the moment. */
    const uint64_t end = atomic_load(&timeline->recorder->next);
    const int64_t deadline_ns = hr_now_ns() + LAST_WRITERS_MS * 1000000ll;
    while (timeline->tail.place < end) {
        (void)usleep(1000);
        timeline->tail.given_up = hr_now_ns() < deadline_ns ? 0 : end;
        look(timeline);
    }
    return NULL;
}

/* The caller holds `control`, as of start. */
static void stop(struct hr_timeline *timeline) {
    (void)pthread_mutex_lock(&timeline->lock);
    timeline->must_stop = 1;
    (void)pthread_cond_signal(&timeline->changed);
    (void)pthread_mutex_unlock(&timeline->lock);
    (void)pthread_join(timeline->thread, NULL);
    put(timeline, &(horo_event){.event = HR_EVENT_STOPPED, .time_ns = hr_now_ns()});
    flush(timeline);
    hr_recorder_trace(timeline->recorder, 0);
    timeline->is_on = 0;
}

int hr_timeline_start(struct hr_timeline *timeline, int fd, int marks_batches, struct hr_error *error) {
    int status = HORO_OK;
    (void)pthread_mutex_lock(&timeline->control);
    if (fd >= 0 && timeline->is_on) {
        stop(timeline);
    }
    atomic_store_explicit(&timeline->marks_batches, marks_batches, memory_order_relaxed);
    if (fd >= 0) {
        timeline->fd = fd;
        timeline->has_failed = timeline->must_stop = 0;
        hr_recorder_trace(timeline->recorder, 1);
        timeline->tail = (struct hr_recorder_tail){.place = atomic_load(&timeline->recorder->next)};
        status = hr_thread_start(&timeline->thread, write_timeline, timeline, "the thread of the timeline", error);
        timeline->is_on = status == HORO_OK;
        hr_recorder_trace(timeline->recorder, timeline->is_on);
    }
    (void)pthread_mutex_unlock(&timeline->control);
    return status;
}

void hr_timeline_stop(struct hr_timeline *timeline) {
    (void)pthread_mutex_lock(&timeline->control);
    if (timeline->is_on) {
        stop(timeline);
    }
    (void)pthread_mutex_unlock(&timeline->control);
}
