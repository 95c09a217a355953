/*
 * A place in the order of a stream, which other streams can wait for: behind what a program had put on its stream when
 * it called horo, and later behind what horo has put on its own.
 */
#ifndef HR_DEVICE_MARK_H
#define HR_DEVICE_MARK_H

#include <stdatomic.h>

#include "device/device.h"

struct hr_mark {
    _Atomic int references;
    struct hr_device *device;
    void *event;
};

/*
 * HORO_OK, HORO_ERR_USAGE (a stream that is being captured) or HORO_ERR_RESOURCE, with a sentence and nothing left
 * behind. Any thread.
 */
hr_status hr_mark_create(struct hr_device *device, void *stream, struct hr_mark **mark, struct hr_error *error);
/* It is gone when all have dropped it; NULL is allowed. Streams that wait for it go on to wait. */
void hr_mark_keep(struct hr_mark *mark);
void hr_mark_drop(struct hr_mark *mark);

/* The stream goes on when the mark is reached. HORO_OK or as create. Any thread. */
int hr_mark_await(const struct hr_mark *mark, void *stream, struct hr_error *error);
/* Whether it has been reached, or never will be: the GPU has failed. Any thread. */
int hr_mark_is_reached(const struct hr_mark *mark);
/* For a caller that has entered the device: to behind all that is on the stream now. */
int hr_mark_move(struct hr_mark *mark, void *stream, struct hr_error *error);

#endif
