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
 *     ready     | the values are on the host: on_ready of the    | the collective; hr_staging_copy_back
 *               | stager (device/stager.h)                       |
 *     returned  | copies to the device are on horo's stream, and | hr_staging_drop; the memory is used again when
 *               | the caller's stream waits for them             | they are done
 *
 * A staging belongs to its request.
 */
#ifndef HR_DEVICE_STAGING_H
#define HR_DEVICE_STAGING_H

#include "device/stager.h"

enum { HR_STAGED_ALIGNMENT = 64 };

/* One tensor of a request. */
struct hr_staged_tensor {
    uint64_t source, target; /* on the device */
    size_t source_bytes;     /* to be copied to the host; 0: this rank's values do not count */
    size_t room;             /* in host memory, for the values and for the result */
    size_t result_at;        /* where in the room the result is */
    size_t offset;           /* of it in the block */
};

struct hr_staging {
    struct hr_block *block;
    void *from_device; /* the stream of its copies to the host */
    int is_lost; /* nobody knows when copies no longer use the block, so it is not given back */
    size_t count;
    struct hr_staged_tensor tensors[];
};

/*
 * Begins to copy `count` tensors to the host, behind what is on `stream` of the device now. Fills in their offsets.
 * HORO_OK, HORO_ERR_USAGE (no such device; a stream that is being captured) or HORO_ERR_RESOURCE, with a sentence and
 * nothing left behind. Blocks for as long as pinning new memory takes. Any thread, which may have to wait for the
 * program's stream where it is far ahead of that.
 */
hr_status hr_staging_create(struct hr_stager *stager, int device, void *stream, struct hr_staged_tensor *tensors,
                            size_t count, struct hr_staging **staging, struct hr_error *error);

static inline void *hr_staging_host(const struct hr_staging *staging, size_t tensor) {
    return staging->block->data + staging->tensors[tensor].offset;
}

/* Makes `stream` wait for results: bytes[i] of tensor i go to its target; NULL: another call has begun that. */
int hr_staging_copy_back(struct hr_staging *staging, const size_t *bytes, void *stream, struct hr_error *error);

/* NULL is allowed. Not with a lock that on_ready takes. */
void hr_staging_drop(void *staging);

#endif
