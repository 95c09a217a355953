/* The beginning and end of a timeline, and the thread that writes it. */
#include "base/timeline.h"

#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/thread.h"

enum { LOOK_MS = 50 };

void hr_timeline_init(struct hr_timeline *timeline, struct hr_recorder *recorder, const struct hr_log *log) {
    *timeline = (struct hr_timeline){.recorder = recorder, .log = log, .file.fd = -1};
    pthread_condattr_t attributes;
    (void)pthread_condattr_init(&attributes);
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    (void)pthread_cond_init(&timeline->changed, &attributes);
    (void)pthread_condattr_destroy(&attributes);
    (void)pthread_mutex_init(&timeline->lock, NULL);
    (void)pthread_mutex_init(&timeline->control, NULL);
}

void hr_timeline_fini(struct hr_timeline *timeline) {
    hr_timeline_stop(timeline);
    (void)pthread_cond_destroy(&timeline->changed);
    (void)pthread_mutex_destroy(&timeline->lock);
    (void)pthread_mutex_destroy(&timeline->control);
}

void hr_timeline_after_fork(struct hr_timeline *timeline) {
    hr_trace_close(&timeline->file);
}

static void flush(struct hr_timeline *timeline) {
    const int failed_before = timeline->file.error != 0;
    if (!hr_trace_flush(&timeline->file) && !failed_before) {
        hr_log(timeline->log, HORO_LOG_WARNING, "the timeline ends here, since it cannot be written: %s",
               strerror(timeline->file.error));
    }
}

static void look(struct hr_timeline *timeline) {
    enum { EVENTS_PER_FLUSH = 4096 };
    horo_event event;
    int count = 0;
    hr_recorder_begin_look(&timeline->tail);
    for (uint64_t lost = 0; hr_recorder_next(timeline->recorder, &timeline->tail, &event, &lost); lost = 0) {
        if (lost > 0) {
            hr_timeline_show_loss(&timeline->rows, lost);
        }
        hr_timeline_show(&timeline->rows, &event);
        if (++count % EVENTS_PER_FLUSH == 0) {
            flush(timeline);
        }
    }
    flush(timeline);
}

static int sleep_until_look(struct hr_timeline *timeline) {
    const int64_t until_ns = hr_now_ns() + LOOK_MS * 1000000ll;
    const struct timespec until = {.tv_sec = until_ns / 1000000000, .tv_nsec = until_ns % 1000000000};
    (void)pthread_mutex_lock(&timeline->lock);
    if (!timeline->must_stop) {
        (void)pthread_cond_timedwait(&timeline->changed, &timeline->lock, &until);
    }
    const int must_stop = timeline->must_stop;
    (void)pthread_mutex_unlock(&timeline->lock);
    return !must_stop;
}

static void *write_timeline(void *arg) {
    struct hr_timeline *timeline = arg;
    while (sleep_until_look(timeline)) {
        look(timeline);
    }
    look(timeline);
    return NULL;
}

static void put_head(struct hr_timeline *timeline, const char *about) {
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    hr_trace_put(&timeline->file,
                 "{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": 0, \"tid\": 0, \"args\": {"
                 "\"name\": \"rank %d\", \"start_time_since_epoch_in_micros\": %lld, \"monotonic_ns\": %lld%s%s}}",
                 timeline->log->rank, (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000,
                 (long long)timeline->rows.begin_ns, about[0] == '\0' ? "" : ", ", about);
    hr_trace_put(&timeline->file, "{\"name\": \"process_sort_index\", \"ph\": \"M\", \"pid\": 0, \"tid\": 0, "
                                  "\"args\": {\"sort_index\": 0}}");
    flush(timeline);
}

static void clear(struct hr_timeline *timeline) {
    hr_recorder_trace(timeline->recorder, 0);
    hr_trace_close(&timeline->file);
    hr_timeline_rows_fini(&timeline->rows);
    timeline->is_on = timeline->must_stop = 0;
}

/* The caller holds `control`, as of start. */
static void stop(struct hr_timeline *timeline) {
    (void)pthread_mutex_lock(&timeline->lock);
    timeline->must_stop = 1;
    (void)pthread_cond_signal(&timeline->changed);
    (void)pthread_mutex_unlock(&timeline->lock);
    (void)pthread_join(timeline->thread, NULL);
    hr_timeline_end_all(&timeline->rows, hr_now_ns());
    flush(timeline);
    clear(timeline);
}

static int start(struct hr_timeline *timeline, const char *path, const char *about, int marks_batches,
                 struct hr_error *error) {
    struct hr_trace_file file;
    const int is_written = timeline->is_on && timeline->file.error == 0;
    HR_TRY(hr_trace_open(&file, path, is_written ? timeline->file.fd : -1, error));
    if (file.fd < 0) {
        timeline->rows.marks_batches = marks_batches;
        return HORO_OK;
    }
    if (timeline->is_on) {
        stop(timeline);
    }
    timeline->file = file;
    memset(&timeline->rows, 0, sizeof timeline->rows);
    timeline->rows.file = &timeline->file;
    timeline->rows.marks_batches = marks_batches;
    timeline->rows.begin_ns = timeline->rows.last_ns = hr_now_ns();
    hr_recorder_trace(timeline->recorder, 1);
    timeline->tail = hr_recorder_end(timeline->recorder);
    put_head(timeline, about);
    const int status =
        hr_thread_start(&timeline->thread, write_timeline, timeline, "the thread of the timeline", error);
    if (status != HORO_OK) {
        clear(timeline);
        return status;
    }
    timeline->is_on = 1;
    return HORO_OK;
}

int hr_timeline_start(struct hr_timeline *timeline, const char *path, const char *about, int marks_batches,
                      struct hr_error *error) {
    (void)pthread_mutex_lock(&timeline->control);
    const int status = start(timeline, path, about, marks_batches, error);
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
