/*
 * A timeline: what the recorder notes, written to a file by a thread of its own, event by event as it is. Python makes
 * trace events of them when the rank ends (horo/timeline/rows.py). A process that dies in the middle of a write leaves
 * the beginning of one event at the end.
 */
#ifndef HR_BASE_TIMELINE_H
#define HR_BASE_TIMELINE_H

#include <pthread.h>

#include "base/log.h"
#include "base/recorder.h"
#include "base/status.h"

enum { HR_TIMELINE_ROWS = 256 }; /* of a write */

struct hr_timeline {
    struct hr_recorder *recorder;
    const struct hr_log *log;
    pthread_mutex_t control; /* held by whoever starts or stops */
    pthread_mutex_t lock;    /* of must_stop */
    pthread_cond_t changed;
    int must_stop, is_on;
    _Atomic int marks_batches;
    pthread_t thread;
    struct hr_recorder_tail tail;
    int fd;        /* the caller's */
    int has_failed; /* a write has, after which nothing more is written */
    int row_count;
    horo_event rows[HR_TIMELINE_ROWS]; /* that have not been written */
};

/* Starts nothing. recorder and log must outlive it. */
void hr_timeline_init(struct hr_timeline *timeline, struct hr_recorder *recorder, const struct hr_log *log);
/* Stops it, too. */
void hr_timeline_fini(struct hr_timeline *timeline);
/* As horo_start_timeline. */
int hr_timeline_start(struct hr_timeline *timeline, int fd, int marks_batches, struct hr_error *error);
void hr_timeline_stop(struct hr_timeline *timeline);

#endif
