/* A GPU of this process, with streams of horo's own on it, on which its copies run beside the program's work. */
#ifndef HR_DEVICE_DEVICE_H
#define HR_DEVICE_DEVICE_H

#include <stdatomic.h>

#include "device/libraries.h"

struct hr_device {
    const struct hr_cuda *cuda;
    int number; /* as torch counts: of the devices that this process sees */
    int handle; /* the driver's */
    void *context; /* the primary one, which torch uses; retained */
    void *to_host, *to_device; /* streams of highest priority, one for each direction of copies */
    _Atomic int held; /* pieces of memory in the context, which stays retained with them: something may touch them */
};

/* HORO_OK, or HORO_ERR_RESOURCE with a sentence and nothing left behind. */
int hr_device_open(struct hr_device *device, const struct hr_cuda *cuda, int number, struct hr_error *error);
/* Closes it; work that still runs on its streams goes on to its end. The context is let go unless something is held. */
void hr_device_close(struct hr_device *device);

/* The state of a thread before it entered a device. */
struct hr_device_visit {
    int capture_mode;
};

/*
 * Between the two, calls of this thread are for this device, whatever its current context was and will be again, and
 * end no capture of a CUDA graph: the program may capture one on a stream of its own, on this thread or another, in
 * the mode "global", in which any call that is not part of it, such as cuEventQuery, would make it fail. HORO_OK, or
 * HORO_ERR_RESOURCE with a sentence; then there is nothing to leave.
 */
int hr_device_enter(const struct hr_device *device, struct hr_device_visit *visit, struct hr_error *error);
void hr_device_leave(const struct hr_device *device, const struct hr_device_visit *visit);

/*
 * For a caller that has entered the device. HORO_OK; HORO_ERR_USAGE with a sentence: the stream is being captured into
 * a graph, which would repeat what horo puts on it, but not the exchange; HORO_ERR_RESOURCE.
 */
hr_status hr_device_refuse_capture(const struct hr_device *device, void *stream, struct hr_error *error);
/* Likewise: a stream of its own, of highest priority, that does not order itself by the default stream. */
int hr_device_create_stream(const struct hr_device *device, void **stream, struct hr_error *error);

/*
 * ---- Marks ----
 *
 * A place in the order of a stream, which other streams can wait for: behind what a program had put on its stream when
 * it called horo, and later behind what horo has put on its own.
 */

struct hr_mark {
    _Atomic int references;
    struct hr_device *device;
    void *event;
};

/* HORO_OK, HORO_ERR_USAGE (a captured stream) or HORO_ERR_RESOURCE, with a sentence, nothing left. Any thread. */
hr_status hr_mark_create(struct hr_device *device, void *stream, struct hr_mark **mark, struct hr_error *error);
/* It is gone when all have dropped it; NULL is allowed. Streams that wait for it go on to wait. */
void hr_mark_keep(struct hr_mark *mark);
void hr_mark_drop(void *mark);

/* The stream goes on when the mark is reached. HORO_OK or as create. Any thread. */
int hr_mark_await(const struct hr_mark *mark, void *stream, struct hr_error *error);
/* Whether it has been reached, or never will be: the GPU has failed. Any thread. */
int hr_mark_is_reached(const struct hr_mark *mark);
/* For a caller that has entered the device: to behind all that is on the stream now. */
int hr_mark_move(struct hr_mark *mark, void *stream, struct hr_error *error);

#endif
