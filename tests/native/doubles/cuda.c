/*
 * A double of the CUDA driver: the functions that horo calls, with host memory behind them. Each stream is a thread
 * that does what has been put on it, one after the other; with PENDING_MAX pieces of work before it, it makes a thread
 * wait that puts another one there, as a driver does. Memory of the device is mapped twice: where horo knows it, no
 * access is allowed, so a processor that touches it ends the process; copies go through the other mapping.
 *
 * Compiled for each test with what it is to do:
 *   VERSION       what cuDriverGetVersion says; 12040 where it is not given
 *   VERSION_CODE  what cuDriverGetVersion returns
 *   INIT_CODE     what cuInit returns
 *   DEVICES       how many there are; 2 where it is not given
 *   LACKS_INIT    there is no cuInit
 *   DELAYS        before each piece of work a stream sleeps for up to so many us, by chance; 0 where it is not given.
 *                 Giving way instead costs a time slice on a busy machine
 * The functions that begin with "double" are for tests.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef VERSION
#define VERSION 12040
#endif
#ifndef VERSION_CODE
#define VERSION_CODE 0
#endif
#ifndef INIT_CODE
#define INIT_CODE 0
#endif
#ifndef DEVICES
#define DEVICES 2
#endif
#ifndef DELAYS
#define DELAYS 0
#endif

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, LAUNCH_FAILED = 719,
       CAPTURE_UNSUPPORTED = 900, CAPTURE_ISOLATION = 905 };
enum { MEMORY_BYTES = 256 << 20, CONTEXTS_MAX = 16, PENDING_MAX = 1024 };

struct event {
    uint64_t recorded, done; /* records asked for, and records reached */
    int code;
    int device; /* whose context was current when it was made; -1: none was */
};

struct work {
    struct work *next;
    void (*run)(struct work *work);
    struct stream *stream;
    struct event *event;
    uint64_t number;
    void *target;
    const void *source;
    size_t bytes;
    void (*function)(void *);
    void *data;
    float value;
    int is_to_host; /* a copy */
};

struct stream {
    pthread_t thread;
    struct work *head, **tail;
    int is_busy, is_ending, is_capturing;
    int pending; /* pieces of work that are not over */
    int device;  /* whose context was current when it was made; -1: the program's */
    struct stream *next;
    unsigned seed;
    int code; /* after a failure nothing is done any more, as on a device */
};

static struct stream *default_stream; /* what NULL means */
static struct stream *all_streams;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int is_initialized;
static char *hidden, *open_memory; /* the two mappings */
static size_t used;
static unsigned seeds = 1;
static int host_allocs, host_frees, streams, contexts, events, host_limit = 1 << 30;
static __thread int entered, capture_mode;
static __thread int entered_devices[8]; /* of the contexts that are pushed; the last one is current */
static int waits; /* of threads for a stream that is full and not the program's */
static int captures, spoiled; /* streams that are being captured; whether a call has ended a capture */

/* Adds to a number and returns what it is then. */
static int count(int *number, int change) {
    pthread_mutex_lock(&lock);
    const int found = *number += change;
    pthread_mutex_unlock(&lock);
    return found;
}

/* ---- What is refused, as a driver does ---- */

enum { NON_BLOCKING = 1, GREATEST_PRIORITY = -5 };

/* In the mode "global", which is 0, such a call ends the capture of any stream. */
static int is_unsafe(void) {
    pthread_mutex_lock(&lock);
    const int found = captures > 0 && capture_mode != 2;
    spoiled |= found;
    pthread_mutex_unlock(&lock);
    return found ? CAPTURE_UNSUPPORTED : 0;
}

/* Whether the stream is being captured: to make it wait for an event from outside ends that. */
static int ends_capture(const struct stream *stream) {
    pthread_mutex_lock(&lock);
    const int is_capturing = (stream == NULL ? default_stream : stream)->is_capturing;
    spoiled |= is_capturing;
    pthread_mutex_unlock(&lock);
    return is_capturing;
}

/* The device whose context is current on this thread; -1: none is. */
static int current_device(void) {
    return entered > 0 ? entered_devices[(entered - 1) % 8] : -1;
}

/* Streams of horo, which enters a device for them, have the highest priority and no order with the default stream. */
static int is_ordinary(unsigned flags, int priority) {
    return current_device() >= 0 && (flags != NON_BLOCKING || priority != GREATEST_PRIORITY);
}

/* An event goes onto a stream of its own context only; of the program's streams the context is not known. */
static int is_elsewhere(const struct event *event, const struct stream *stream) {
    return stream != NULL && stream->device >= 0 && event->device != stream->device;
}

static void init_memory(void) {
    const int file = memfd_create("double", 0);
    if (ftruncate(file, MEMORY_BYTES) != 0) {
        abort();
    }
    hidden = mmap(NULL, MEMORY_BYTES, PROT_NONE, MAP_SHARED, file, 0);
    open_memory = mmap(NULL, MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
}

/* The open mapping of memory of the device; NULL: it is none. */
static char *opened(uint64_t address, size_t bytes) {
    const uint64_t first = (uint64_t)(uintptr_t)hidden;
    const int is_inside = hidden != NULL && address >= first && address + bytes <= first + used;
    return is_inside ? open_memory + (address - first) : NULL;
}

/* ---- Streams ---- */

static void *run_stream(void *data) {
    struct stream *stream = data;
    pthread_mutex_lock(&lock);
    while (!stream->is_ending || stream->head != NULL) {
        struct work *work = stream->head;
        if (work == NULL) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        stream->head = work->next;
        stream->tail = stream->head == NULL ? &stream->head : stream->tail;
        pthread_mutex_unlock(&lock);
        (void)usleep(DELAYS == 0 ? 0 : (unsigned)rand_r(&stream->seed) % (DELAYS + 1));
        work->stream = stream;
        work->run(work);
        free(work);
        pthread_mutex_lock(&lock);
        if (stream->pending-- == PENDING_MAX || stream->pending == 0) {
            pthread_cond_broadcast(&changed);
        }
    }
    for (struct stream **link = &all_streams; *link != NULL; link = &(*link)->next) {
        if (*link == stream) {
            *link = stream->next;
            break;
        }
    }
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    free(stream);
    return NULL;
}

static int make_stream(struct stream **out) {
    struct stream *stream = calloc(1, sizeof *stream);
    stream->tail = &stream->head;
    stream->seed = seeds++;
    if (pthread_create(&stream->thread, NULL, run_stream, stream) != 0) {
        return OUT_OF_MEMORY;
    }
    pthread_detach(stream->thread);
    stream->device = current_device();
    stream->next = all_streams;
    all_streams = stream;
    *out = stream;
    return 0;
}

static int put(void *to, struct work work) {
    struct stream *stream = to == NULL ? default_stream : to;
    struct work *copy = malloc(sizeof *copy);
    *copy = work;
    copy->next = NULL;
    pthread_mutex_lock(&lock);
    waits += stream->pending >= PENDING_MAX && stream->device >= 0;
    while (stream->pending >= PENDING_MAX) {
        pthread_cond_wait(&changed, &lock);
    }
    stream->pending++;
    *stream->tail = copy;
    stream->tail = &copy->next;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuStreamCreateWithPriority(struct stream **out, unsigned flags, int priority) {
    if (is_ordinary(flags, priority)) {
        return INVALID_VALUE;
    }
    if (is_unsafe()) {
        return CAPTURE_UNSUPPORTED;
    }
    pthread_mutex_lock(&lock);
    const int code = make_stream(out);
    streams += code == 0;
    pthread_mutex_unlock(&lock);
    return code;
}

int cuStreamDestroy_v2(struct stream *stream) {
    pthread_mutex_lock(&lock);
    stream->is_ending = 1;
    streams--;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuStreamIsCapturing(const struct stream *stream, int *state) {
    *state = (stream == NULL ? default_stream : stream)->is_capturing;
    return 0;
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
    const int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return 0;
}

/* ---- Events ---- */

int cuEventCreate(struct event **event, unsigned flags) {
    (void)flags;
    *event = calloc(1, sizeof **event);
    (*event)->device = current_device();
    count(&events, 1);
    return 0;
}

int cuEventDestroy_v2(struct event *event) {
    (void)event; /* a stream may wait for it still */
    count(&events, -1);
    return 0;
}

static void reach(struct work *work) {
    pthread_mutex_lock(&lock);
    work->event->done = work->number > work->event->done ? work->number : work->event->done;
    work->event->code = work->stream->code;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* What waits behind a failure has failed: on a device all streams have. */
static void await_event(struct work *work) {
    struct stream *stream = work->stream;
    pthread_mutex_lock(&lock);
    while (work->event->done < work->number) {
        pthread_cond_wait(&changed, &lock);
    }
    stream->code = work->event->code != 0 ? work->event->code : stream->code;
    pthread_mutex_unlock(&lock);
}

int cuEventRecord(struct event *event, void *stream) {
    if (is_elsewhere(event, stream)) {
        return INVALID_HANDLE;
    }
    pthread_mutex_lock(&lock);
    const uint64_t number = ++event->recorded;
    pthread_mutex_unlock(&lock);
    return put(stream, (struct work){.run = reach, .event = event, .number = number});
}

static int *next_pause; /* where the next thread that makes a stream wait for an event has to wait itself */

/* With the lock held: waits if the thread has to, and returns the code that its call fails with then. */
static int await_resumption(void) {
    int *mine = next_pause;
    next_pause = NULL;
    if (mine == NULL) {
        return 0;
    }
    *mine = 1;
    while (*(volatile int *)mine == 1) {
        pthread_cond_wait(&changed, &lock);
    }
    return *mine - 2;
}

int cuStreamWaitEvent(void *stream, struct event *event, unsigned flags) {
    if (ends_capture(stream)) {
        return CAPTURE_ISOLATION;
    }
    (void)flags;
    pthread_mutex_lock(&lock);
    const int code = await_resumption();
    const uint64_t number = event->recorded;
    pthread_mutex_unlock(&lock);
    return code != 0 ? code : put(stream, (struct work){.run = await_event, .event = event, .number = number});
}

int cuEventQuery(const struct event *event) {
    pthread_mutex_lock(&lock);
    const int code = event->done < event->recorded ? NOT_READY : event->code;
    pthread_mutex_unlock(&lock);
    return is_unsafe() ? CAPTURE_UNSUPPORTED : entered > 0 ? code : INVALID_CONTEXT;
}

#include "cuda_memory.h"

/* ---- Functions of the host ---- */

/* As on a device, a function behind a failure is not called. */
static void call(struct work *work) {
    if (work->stream->code == 0) {
        work->function(work->data);
    }
}

int cuLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    return put(stream, (struct work){.run = call, .function = function, .data = data});
}

/* ---- Devices ---- */

int cuDriverGetVersion(int *version) {
    *version = VERSION;
    return VERSION_CODE;
}

#ifdef LACKS_INIT
#define cuInit double_init
#endif
int cuInit(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    is_initialized = INIT_CODE == 0;
    if (hidden == NULL) {
        init_memory();
        (void)make_stream(&default_stream);
    }
    pthread_mutex_unlock(&lock);
    return INIT_CODE;
}

int cuDeviceGetCount(int *count) {
    *count = DEVICES;
    return is_initialized ? 0 : NOT_INITIALIZED;
}

int cuDeviceGet(int *device, int number) {
    *device = number;
    return number < DEVICES ? 0 : INVALID_VALUE;
}

int cuDeviceGetUuid_v2(char *uuid, int device) {
    memcpy(uuid, "a double's GPU 0", 16);
    uuid[15] = (char)('0' + device);
    return is_initialized ? 0 : NOT_INITIALIZED;
}

static char names[CONTEXTS_MAX]; /* of contexts, by device */

int cuDevicePrimaryCtxRetain(void **context, int device) {
    count(&contexts, 1);
    *context = &names[device];
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    (void)device;
    count(&contexts, -1);
    return 0;
}

int cuCtxPushCurrent_v2(void *context) {
    const char *name = context;
    entered_devices[entered % 8] = name >= names && name < names + CONTEXTS_MAX ? (int)(name - names) : 0;
    entered += context != NULL;
    return 0;
}

int cuCtxPopCurrent_v2(void **context) {
    *context = NULL;
    entered--;
    return 0;
}

int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = GREATEST_PRIORITY;
    return 0;
}

int cuGetErrorString(int code, const char **text) {
    *text = code == NO_DEVICE ? "no CUDA-capable device is detected"
            : code == OUT_OF_MEMORY ? "out of memory"
            : code == LAUNCH_FAILED ? "unspecified launch failure"
                                    : NULL;
    return *text == NULL;
}

/* The device whose context is current on this thread; -1: none is. */
int double_current(void) {
    return current_device();
}

/* ---- For tests ---- */

/* Where a test may touch memory of the device; NULL: it is none. */
void *double_address(uint64_t address) {
    return opened(address, 0);
}

/* Not in the order of any stream. */
void double_write(uint64_t address, const void *data, size_t bytes) {
    memcpy(opened(address, bytes), data, bytes);
}

void double_read(uint64_t address, void *data, size_t bytes) {
    memcpy(data, opened(address, bytes), bytes);
}

#include "cuda_gates.h"

/* At the end: whether another call has ended the capture. */
int double_capture(struct stream *stream, int is_capturing) {
    (stream == NULL ? default_stream : stream)->is_capturing = is_capturing;
    pthread_mutex_lock(&lock);
    captures += is_capturing ? 1 : -1;
    const int was_spoiled = spoiled;
    spoiled = captures > 0 ? spoiled : 0;
    pthread_mutex_unlock(&lock);
    return was_spoiled;
}

/* From now on pinned memory is to be had in pieces of up to so many bytes. */
void double_limit_pinned(int bytes) {
    count(&host_limit, bytes - host_limit);
}

/* How often a thread has had to wait because a stream of horo's was full. */
int double_waits(void) {
    return count(&waits, 0);
}

/* Streams, contexts, events, pieces of pinned memory that exist and of all. */
void double_count(int *counts) {
    pthread_mutex_lock(&lock);
    counts[0] = streams;
    counts[1] = contexts;
    counts[2] = events;
    counts[3] = host_allocs - host_frees;
    counts[4] = host_allocs;
    pthread_mutex_unlock(&lock);
}
