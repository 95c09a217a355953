/*
 * The work that horo has put on a stream and that is not known to have run. A driver makes a thread wait that puts
 * something on a stream with about a thousand pieces of work that have not; behind a kernel that waits for a rank that
 * is gone it would wait for ever. So whoever launches asks for room first, and comes again where there is none
 * (docs/adr/0053-what-waits-on-a-stream-has-a-bound.md). Weights are what a step puts there at most. One thread at a
 * time.
 */
#ifndef HR_DEVICE_BACKLOG_H
#define HR_DEVICE_BACKLOG_H

#include <stdint.h>

#include "device/device.h"

enum {
    HR_BACKLOG_MOST = 512,   /* with this much on the stream, nobody may begin a step */
    HR_BACKLOG_EVERY = 64,   /* there is an event behind each so much */
    HR_BACKLOG_EVENTS = 16,  /* more than lie in what there is room for, with a step beyond it */
};

struct hr_backlog {
    const struct hr_device *device;
    void *stream;
    void *events[HR_BACKLOG_EVENTS]; /* a ring, of which `count` from `first` on are not known to be reached */
    int weights[HR_BACKLOG_EVENTS];  /* in front of each, behind the one before */
    int first, count;
    int rest;    /* behind the last event */
    int pending; /* all of it */
    int is_awaited;  /* there was no room when somebody asked last */
    uint64_t passed; /* events that have been reached */
};

/*
 * For a caller that has entered the device: of a stream, which outlives it. HORO_OK, or HORO_ERR_RESOURCE with a
 * sentence; hr_backlog_destroy frees what there is in any case.
 */
int hr_backlog_create(struct hr_backlog *backlog, const struct hr_device *device, void *stream,
                      struct hr_error *error);
/* For a caller that has entered the device. */
void hr_backlog_destroy(struct hr_backlog *backlog);

/* A step puts so much on the stream, or has. */
static inline void hr_backlog_add(struct hr_backlog *backlog, int weight) {
    backlog->rest += weight;
    backlog->pending += weight;
}

/* Puts an event behind what was added, which is on the stream, if it is time. HORO_OK or as create. */
int hr_backlog_mark(struct hr_backlog *backlog, struct hr_error *error);
/* Whether a step may begin. */
int hr_backlog_has_room(struct hr_backlog *backlog);

#endif
