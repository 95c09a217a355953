/* A GPU of this process, with streams of horo's own on it, on which its copies run beside the program's work. */
#ifndef HR_DEVICE_DEVICE_H
#define HR_DEVICE_DEVICE_H

#include <pthread.h>
#include <stdatomic.h>

#include "device/cuda.h"

struct hr_device {
    const struct hr_cuda *cuda;
    int number; /* as torch counts: of the devices that this process sees */
    int handle; /* the driver's */
    void *context; /* the primary one, which torch uses; retained */
    void *to_host, *to_device; /* streams of highest priority, one for each direction of copies */
    void *to_tell; /* a stream for functions of the host that are told of copies, none of which waits for them */
    /* held while something is put on to_host that is not to be parted by what waits for another stream */
    pthread_mutex_t copying;
    void *behind_marks; /* a stream for copies to the host that wait for a mark; NULL: none yet. Of one thread */
    void *behind_program; /* at the end: an event behind the program's work that is waited for; NULL: none yet */
    _Atomic int is_kept; /* the context stays retained: it has memory that must not go, see blocks.h */
};

/* HORO_OK, or HORO_ERR_RESOURCE with a sentence and nothing left behind. */
int hr_device_open(struct hr_device *device, const struct hr_cuda *cuda, int number, struct hr_error *error);
/* Closes it; work that still runs on its streams goes on to its end. The context is let go unless it is kept. */
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
int hr_device_refuse_capture(const struct hr_device *device, void *stream, struct hr_error *error);
/* Likewise: a stream of its own, of highest priority, that does not order itself by the default stream. */
int hr_device_create_stream(const struct hr_device *device, void **stream, struct hr_error *error);

#endif
