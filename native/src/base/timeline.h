/*
 * A timeline: what the recorder notes, written to a file as Chrome's trace events (Google's "Trace Event Format") by a
 * thread of its own, with Horovod's names. Each tensor has a row, as a process of the format: its negotiation from the
 * first announcement known here until all have agreed, then the operation, within it what moves the data.
 *
 * The file is a JSON array that is closed after each write: the next one begins over the closing bracket. A write is
 * one pwrite of at most a page (or one event), so that a process that dies leaves a whole file.
 */
#ifndef HR_BASE_TIMELINE_H
#define HR_BASE_TIMELINE_H

#include <pthread.h>

#include "base/buffer.h"
#include "base/log.h"
#include "base/map.h"
#include "base/recorder.h"
#include "base/status.h"

/* ---- timeline_file.c ---- */

struct hr_trace_file {
    int fd;             /* -1: none */
    int64_t end;        /* where the closing bracket begins */
    int is_empty;       /* no event yet */
    _Atomic int error;  /* errno of the write that failed, after which nothing more is written */
    struct hr_buffer text; /* events that have not been written, each with its length, a u32, before it */
};

/* Empties the file, unless it is the one that is open as `written` (-1: none): then file->fd is -1. */
int hr_trace_open(struct hr_trace_file *file, const char *path, int written, struct hr_error *error);
void hr_trace_close(struct hr_trace_file *file);
/* One event: a JSON object. It is dropped where there is no memory for it. */
void hr_trace_put(struct hr_trace_file *file, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Writes all events; 0 where that fails, or has failed before: file->error. */
int hr_trace_flush(struct hr_trace_file *file);

/* ---- timeline_rows.c ---- */

struct hr_timeline_row;

struct hr_timeline_rows {
    struct hr_trace_file *file;
    int64_t begin_ns;           /* of the timeline: its time 0 */
    int64_t last_ns;            /* of the event written last: times never fall */
    _Atomic int marks_batches;
    struct hr_map by_request;   /* rows of requests, by hash and team */
    struct hr_timeline_row *rows; /* all */
    int row_count;
    int via;                    /* of the batch whose AGREED come, and where its record ends */
    int64_t record;
    uint32_t text_hash;         /* whose text is being put together */
    size_t text_bytes, text_whole;
    char text[HORO_MESSAGE_MAX + 48 + HORO_DIMS_MAX * 22];
};

void hr_timeline_rows_fini(struct hr_timeline_rows *rows);
void hr_timeline_show(struct hr_timeline_rows *rows, const horo_event *event);
/* So many events are missing: what is in progress is unknown. */
void hr_timeline_show_loss(struct hr_timeline_rows *rows, uint64_t count);
/* Ends all that is open. */
void hr_timeline_end_all(struct hr_timeline_rows *rows, int64_t now_ns);

/* ---- timeline.c ---- */

struct hr_timeline {
    struct hr_recorder *recorder;
    const struct hr_log *log;
    pthread_mutex_t control; /* held by whoever starts or stops */
    pthread_mutex_t lock;    /* of must_stop */
    pthread_cond_t changed;
    int must_stop, is_on;
    pthread_t thread;
    struct hr_recorder_tail tail;
    struct hr_trace_file file;
    struct hr_timeline_rows rows;
};

/* Starts nothing. recorder and log must outlive it. */
void hr_timeline_init(struct hr_timeline *timeline, struct hr_recorder *recorder, const struct hr_log *log);
/* Stops it, too. */
void hr_timeline_fini(struct hr_timeline *timeline);
/* As horo_start_timeline. */
int hr_timeline_start(struct hr_timeline *timeline, const char *path, const char *about, int marks_batches,
                      struct hr_error *error);
void hr_timeline_stop(struct hr_timeline *timeline);
/* In a forked child, which has no thread. */
void hr_timeline_after_fork(struct hr_timeline *timeline);

#endif
