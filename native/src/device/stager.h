/*
 * The GPUs of a context: pinned host memory for copies from and to them, and who is told that a copy to the host is
 * over.
 *
 * Behind such a copy the driver calls a function of the host, from a thread of its own, and nobody has to wait for the
 * GPU. Of copies that fail a driver tells nobody. A thread of the stager's looks for those, the watchdog: callers leave
 * that to it, since a driver may keep whoever calls it, as long as another call waits there for all that runs on a GPU
 * (docs/adr/0042-tensors-on-gpus-are-staged.md). It looks only while copies are awaited.
 */
#ifndef HR_DEVICE_STAGER_H
#define HR_DEVICE_STAGER_H

#include "device/device.h"

/* Both are called with the stager's lock held. This one from a thread of the driver, and must not call CUDA. */
typedef void hr_stager_ready(void *owner, void *request);
/* From the watchdog: the copies to the host have failed, so on_ready never comes. */
typedef void hr_stager_failed(void *owner, void *request, const char *text);

struct hr_stager;

/* Pinned memory of the host with an event that tells when copies no longer use it. */
struct hr_block {
    struct hr_device *device;
    char *data;
    size_t bytes;
    void *copied; /* the event: behind the copies to the host, and later behind those back, which wait for it first */
    /* the stager's: */
    struct hr_stager *stager;
    struct hr_block *next;            /* that is idle */
    struct hr_block *earlier, *later; /* that are launched */
    void *request;                    /* of the owner, who is told of it; NULL: nobody is */
    int users;                        /* 0: it is idle */
    int is_launched, has_failed;
};

/* Loads and initializes the driver from a path. HORO_OK, or HORO_ERR_RESOURCE with a sentence. To be closed. */
hr_status hr_stager_create(const char *const *paths, size_t path_count, void *owner, hr_stager_ready *on_ready,
                           hr_stager_failed *on_failed, struct hr_stager **stager, struct hr_error *error);
/* Pinned memory is not freed at the end: something may run on a device for ever, and freeing waits for that. */
void hr_stager_keep_all(struct hr_stager *stager);

/*
 * Neither on_ready nor on_failed is called from now on. The watchdog frees all that is there when nothing runs on its
 * device any more, neither of horo's nor of the program's. This thread waits for that up to timeout_ms.
 */
void hr_stager_close(struct hr_stager *stager, int timeout_ms);

/* The device, opened where it has not been used yet. HORO_OK, HORO_ERR_USAGE (no such device) or HORO_ERR_RESOURCE. */
int hr_stager_device(struct hr_stager *stager, int number, struct hr_device **device, struct hr_error *error);

/*
 * A block of at least so many bytes that no copy uses. The caller has entered the device. HORO_OK, or HORO_ERR_RESOURCE
 * with a sentence that names the size. One that something may touch for ever is not given back: it is neither used
 * again nor freed, and the device's context, which would free it, stays.
 */
hr_status hr_stager_take_block(struct hr_stager *stager, struct hr_device *device, size_t bytes,
                               struct hr_block **block, struct hr_error *error);
/*
 * Copies may use it still: it is used again when they are done. If it is launched, nobody is told any more. Nothing is
 * freed here: that waits for all that runs on the device, perhaps for a rank that is gone, and this thread may be the
 * one that looks for such. Not with a lock that on_ready takes.
 */
void hr_stager_give_block(struct hr_block *block);

/*
 * The values of a block are on their way, on a stream where `copied` is behind them: on_ready or on_failed is called
 * for `request` later, unless the block is given back first. HORO_OK, or HORO_ERR_RESOURCE with a sentence.
 */
int hr_stager_launch(struct hr_block *block, void *stream, void *request, struct hr_error *error);

#endif
