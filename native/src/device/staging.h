/*
 * Tensors on a GPU, for collectives that work on host memory: their values are copied to pinned host memory before the
 * request is announced, and results back once it is done. The thread that submits and the one that takes the results
 * only begin copies; none of this waits for the GPU.
 *
 *     state     | what has happened                              | what comes next
 *     ----------+------------------------------------------------+------------------------------------------------
 *     created   | copies to the host are on horo's stream,       | hr_staging_launch
 *               | behind the caller's stream                     |
 *     launched  | a function of the host is behind them          | the driver calls it, from a thread of its own
 *     ready     | the values are on the host: on_ready           | the collective; hr_staging_copy_back
 *     returned  | copies to the device are on horo's stream, and | hr_staging_release; the memory is used again
 *               | the caller's stream waits for them             | when they are done
 *
 * A large tensor is copied in pieces, one behind the other, where its collective may begin with the first one
 * (base/flow.h): launching begins the copies, and a function of the host is behind each of them, on another stream, for
 * the copies are not to wait for it. on_ready is called for each, and results may return from the front meanwhile.
 *
 * Where a copy to the host fails, no function behind it is called: on_failed tells of that, from a thread of the
 * stager's (device/watchdog.h).
 *
 * A staging belongs to the request and to the call that has been launched, and is gone when both have let go.
 */
#ifndef HR_DEVICE_STAGING_H
#define HR_DEVICE_STAGING_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/flow.h"
#include "device/mark.h"

enum { HR_DEVICES_MAX = 64, HR_STAGED_ALIGNMENT = 64 };

struct hr_staging;

/* Called with the stager's lock held, from a thread of the driver, which must not call CUDA. */
typedef void hr_staging_ready(void *owner, struct hr_staging *staging);

/* Likewise from a thread of the stager's: its copies to the host have failed, so on_ready comes for none of them. */
typedef void hr_staging_failed(void *owner, struct hr_staging *staging, const char *text);

/* Pinned memory with the events that tell when copies no longer use it. */
struct hr_block {
    struct hr_block *next;
    struct hr_device *device; /* whose events they are */
    char *data;
    size_t bytes;
    void *copied_in, *copied_out;
    int is_out; /* copied_out has been recorded for its last use */
};

enum hr_stager_end {
    HR_STAGER_OPEN,
    HR_STAGER_FREES, /* it is closed, and the watchdog lets go of all that is there */
    HR_STAGER_STAYS, /* likewise, but the driver may call a function with it at any time */
};

/* All GPUs of a context, and the pinned memory that is not in use. */
struct hr_stager {
    struct hr_cuda cuda;
    horo_library library;
    pthread_mutex_t opening; /* held while a device is opened */
    struct hr_device *devices[HR_DEVICES_MAX]; /* by number; those that have been used */
    pthread_mutex_t lock;    /* of what follows; nobody calls CUDA with it, since CUDA calls a function that takes it */
    pthread_cond_t drained;
    struct hr_block *idle;
    size_t idle_bytes;
    int launched; /* functions of the host that have not been called yet */
    _Atomic int is_broken; /* a copy has failed: they may never be called */
    _Atomic int is_kept; /* pinned memory is not freed at the end: something may run on a device for ever */
    void *owner;  /* NULL: closed */
    hr_staging_ready *on_ready;
    hr_staging_failed *on_failed;
    /* the watchdog's: */
    pthread_t watchdog;
    pthread_cond_t stirred; /* it rests, and copies are awaited; or the stager is closed */
    struct hr_staging *first_launched, *last_launched; /* of which functions of the host are to come */
    int is_resting, has_ended;
    enum hr_stager_end end;
    int64_t quiet_until_ns; /* FREES: so long it looks whether anything runs on a device */
    int goes_on;            /* likewise: something does, and it goes on to wait for that, which nobody else need */
    int is_left;            /* likewise: nobody waits for it any more, so the stager is the watchdog's */
};

/* One tensor of a request. */
struct hr_staged_tensor {
    uint64_t source, target; /* on the device */
    size_t source_bytes;     /* to be copied to the host; 0: this rank's values do not count */
    size_t room;             /* in host memory, for the values and for the result */
    size_t result_at;        /* where in the room the result is */
    size_t offset;           /* of it in the block */
    size_t piece_bytes;      /* of the only one: it is copied in pieces; 0: at once */
};

struct hr_staging {
    struct hr_stager *stager;
    struct hr_device *device;
    struct hr_block *block;
    void *from_device;           /* the stream of its copies to the host */
    void *request;               /* the owner's */
    _Atomic int is_ready;
    _Atomic int is_disowned; /* the block is */
    _Atomic int references;
    size_t told, to_tell; /* under the stager's lock: functions of the host that were called, and of how many */
    /* likewise, while some of them are to come: */
    struct hr_staging *earlier, *later; /* of the stager's */
    int has_failed;                     /* they never come, and on_failed has been called if there was a request */
    /* in pieces, also: */
    struct hr_flow flow;
    size_t returned;  /* bytes of the result that are on their way to the device */
    int returns_late; /* the owner's: nothing more returns before all is done */
    size_t count;
    struct hr_staged_tensor tensors[];
};

/*
 * Loads and initializes the driver from one of the paths. HORO_OK, or HORO_ERR_RESOURCE with a sentence. The stager
 * must be closed.
 */
int hr_stager_create(const char *const *paths, size_t path_count, void *owner, hr_staging_ready *on_ready,
                     hr_staging_failed *on_failed, struct hr_stager **stager, struct hr_error *error);

/*
 * Neither on_ready nor on_failed is called from now on. Waits up to timeout_ms for what has been launched and for
 * copies; if that is not enough, what the driver still holds is never freed. Where something of the program's is found
 * to run on a device, a thread of the stager's frees what there is when that has ended, and this one does not wait. Nor
 * does it for a driver that waits for more than could be found.
 */
void hr_stager_close(struct hr_stager *stager, int timeout_ms);

/*
 * Frees pinned memory of which too much is idle. Waits for all that runs on the device: not for a thread that others
 * count on, and not while something runs there that may need other ranks.
 */
void hr_stager_trim(struct hr_stager *stager);

/*
 * Begins to copy `count` tensors to the host, behind what is on `stream` of the device now or, where that is not
 * NULL, `behind` a mark of the device, at once and not in pieces. Fills in their offsets. HORO_OK, HORO_ERR_USAGE (no
 * such device; a stream that is being captured) or HORO_ERR_RESOURCE, with a sentence and nothing left behind. Blocks
 * for as long as pinning new memory takes. Any thread, which may have to wait for the program's stream where it is far
 * ahead of that; behind marks, one thread at a time, which waits for no other: those have a stream of their own.
 */
int hr_staging_create(struct hr_stager *stager, int device, void *stream, const struct hr_mark *behind,
                      struct hr_staged_tensor *tensors, size_t count, struct hr_staging **staging,
                      struct hr_error *error);

static inline void *hr_staging_host(const struct hr_staging *staging, size_t tensor) {
    return staging->block->data + staging->tensors[tensor].offset;
}

/*
 * on_ready is called later for `request`, once or, in pieces, once for each, unless hr_staging_release comes first.
 * HORO_OK or as create; after a failure it may still come for pieces before.
 */
int hr_staging_launch(struct hr_staging *staging, void *request, struct hr_error *error);

/*
 * Whether the copies to the host have failed: then on_ready never comes. HORO_OK, or HORO_ERR_RESOURCE with a sentence.
 */
int hr_staging_check(struct hr_staging *staging, struct hr_error *error);

/*
 * In pieces: begins to copy the result up to `bytes` to its target, which is more than before. HORO_OK or as create.
 * And: whether nothing of that is under way any more.
 */
int hr_staging_return(struct hr_staging *staging, size_t bytes, struct hr_error *error);
int hr_staging_is_back(const struct hr_staging *staging);
/*
 * Begins to copy `bytes[i]` of tensor i to its target, less what has returned, and makes `stream` wait for that. Once,
 * when ready. HORO_OK or as create.
 */
int hr_staging_copy_back(struct hr_staging *staging, const size_t *bytes, void *stream, struct hr_error *error);
/* After hr_staging_copy_back: another stream waits for what that has begun, too. HORO_OK or as create. */
int hr_staging_follow(const struct hr_staging *staging, void *stream, struct hr_error *error);

/* Something may touch the memory for ever: it is neither used again nor freed. While the request has it. */
void hr_staging_disown(struct hr_staging *staging);

/* The request lets go: on_ready does not come any more. NULL is allowed. Not with a lock that on_ready takes. */
void hr_staging_release(struct hr_staging *staging);

/* For a call that uses it while the request may let go. */
void hr_staging_keep(struct hr_staging *staging);
void hr_staging_drop(struct hr_staging *staging);

#endif
