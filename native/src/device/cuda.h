/*
 * The driver of CUDA (libcuda.so.1), by its own interface: what torch's runtime is built on, and the same in every
 * version of CUDA. Types and codes are those of the driver, in the names of this file: contexts, streams and events are
 * pointers, and memory of a device is a number.
 */
#ifndef HR_DEVICE_CUDA_H
#define HR_DEVICE_CUDA_H

#include "device/library.h"

enum {
    HR_CUDA_OK = 0,
    HR_CUDA_NOT_READY = 600,
    HR_CUDA_UUID_BYTES = 16,
    HR_CUDA_VERSION_LEAST = 11040, /* the first that tells the parts of a divided GPU (MIG) apart */
};

enum {
    HR_CUDA_STREAM_NON_BLOCKING = 1, /* takes no part in the implicit waits of the default stream */
    HR_CUDA_EVENT_DISABLE_TIMING = 2,
    HR_CUDA_HOST_PORTABLE = 1, /* pinned for all contexts */
    HR_CUDA_CAPTURE_RELAXED = 2, /* calls of this thread end nobody's capture of a graph */
};

/* Functions of the driver, by their names there. Each returns a code, HR_CUDA_OK for success. */
struct hr_cuda {
    int (*init)(unsigned flags);
    int (*driver_get_version)(int *version);
    int (*get_error_string)(int code, const char **text);
    int (*device_get_count)(int *count);
    int (*device_get)(int *device, int number);
    int (*device_get_uuid)(char *uuid, int device); /* HR_CUDA_UUID_BYTES; each part of a divided GPU has its own */
    int (*primary_context_retain)(void **context, int device);
    int (*primary_context_release)(int device);
    int (*context_push)(void *context);
    int (*context_pop)(void **context);
    int (*priority_range)(int *least, int *greatest);
    int (*stream_create)(void **stream, unsigned flags, int priority);
    int (*stream_destroy)(void *stream);
    int (*stream_wait_event)(void *stream, void *event, unsigned flags);
    int (*stream_is_capturing)(void *stream, int *state);
    int (*thread_exchange_capture_mode)(int *mode);
    int (*event_create)(void **event, unsigned flags);
    int (*event_record)(void *event, void *stream);
    int (*event_query)(void *event);
    int (*event_destroy)(void *event);
    int (*host_alloc)(void **data, size_t bytes, unsigned flags);
    int (*host_free)(void *data);
    int (*copy_to_host)(void *host, uint64_t device, size_t bytes, void *stream);
    int (*copy_to_device)(uint64_t device, const void *host, size_t bytes, void *stream);
    int (*launch_host_function)(void *stream, void (*function)(void *data), void *data);
};

/* Of a struct hr_cuda. To load it does not initialize the driver. */
extern const struct hr_library_kind hr_cuda_library;

/*
 * Initializes the driver and counts the devices of this process. A process that has done so once cannot use CUDA in
 * children that it forks. HORO_OK, or HORO_ERR_RESOURCE with a sentence.
 */
int hr_cuda_initialize(const struct hr_cuda *cuda, int *device_count, struct hr_error *error);

/* HORO_OK, or HORO_ERR_RESOURCE with the name of the function and the driver's text for the code. */
hr_status hr_cuda_check(const struct hr_cuda *cuda, int code, const char *function, struct hr_error *error);

#endif
