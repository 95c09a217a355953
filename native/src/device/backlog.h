/*
 * The work that horo has put on a stream and that is not known to have run. A driver makes a thread wait that puts
 * something on a stream with about a thousand pieces of work that have not; behind a kernel that waits for a rank that
 * is gone it would wait for ever. So whoever launches asks for room first, and comes again where there is none
 * (docs/adr/0044-nccl-does-what-all-ranks-agree-on.md). Weights are what a step puts there at most. One thread at a
 * time.
 */
#ifndef HR_DEVICE_BACKLOG_H
#define HR_DEVICE_BACKLOG_H

#include <stdint.h>

#include "device/device.h"

enum {
    HR_BACKLOG_MOST = 512, /* with this much on the stream, nobody may begin a step */
    HR_BACKLOG_EVERY = 64, /* behind so much, an event is put there if it is not there already */
};

struct hr_backlog {
    const struct hr_device *device;
    void *stream;
    void *event;
    int before;      /* the event, which is not known to be reached; 0: it is not on the stream */
    int behind;      /* the event, or all */
    int is_awaited;  /* there was no room when somebody asked last */
    uint64_t passed; /* how often the event has been reached */
};

/*
 * For a caller that has entered the device: of a stream, which outlives it. HORO_OK, or HORO_ERR_RESOURCE with a
 * sentence and nothing left behind.
 */
int hr_backlog_create(struct hr_backlog *backlog, const struct hr_device *device, void *stream,
                      struct hr_error *error);
/* For a caller that has entered the device. */
void hr_backlog_destroy(struct hr_backlog *backlog);

/* A step puts so much on the stream, or has. */
static inline void hr_backlog_add(struct hr_backlog *backlog, int weight) {
    backlog->behind += weight;
}

/* Puts the event behind added work, which is on the stream, if it is time. HORO_OK or as create. */
int hr_backlog_mark(struct hr_backlog *backlog, struct hr_error *error);
/* Whether a step may begin. */
int hr_backlog_has_room(struct hr_backlog *backlog);

#endif
