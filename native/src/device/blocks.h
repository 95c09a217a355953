/* Pinned memory of a stager; between its files. */
#ifndef HR_DEVICE_BLOCKS_H
#define HR_DEVICE_BLOCKS_H

#include "device/staging.h"

/* The device, opened where it has not been used yet. HORO_OK or as hr_staging_create. */
int hr_stager_device(struct hr_stager *stager, int number, struct hr_device **device, struct hr_error *error);

/* A block of at least so many bytes that no copy uses. The caller has entered the device. */
int hr_stager_take_block(struct hr_stager *stager, struct hr_device *device, size_t bytes, struct hr_block **block,
                         struct hr_error *error);
/*
 * Copies may use it still: it is used again when they are done. Nothing is freed here: that waits for all that runs on
 * the device, perhaps for a rank that is gone, and this thread may be the one that looks for such.
 */
void hr_stager_give_block(struct hr_stager *stager, struct hr_block *block);
/* The same for a caller that holds the stager's lock. */
void hr_stager_give_block_locked(struct hr_stager *stager, struct hr_block *block);

/*
 * The parts of the end, for the watchdog: lets go of all that is there, which may wait for what runs on the devices. 0:
 * of devices on which something ran until the time was over, it has not; another call may. And of the stager itself, of
 * which nothing is left.
 */
int hr_stager_free_parts(struct hr_stager *stager, int64_t until_ns);
void hr_stager_free(struct hr_stager *stager);

/*
 * MPI may touch it for ever, or the GPU: instead of being given back it is left to nobody, neither used again nor
 * freed. The last one to let go of the device's context would free it: that stays, too.
 */
void hr_block_disown(struct hr_block *block);

/* The caller has entered the device. HORO_OK, or HORO_ERR_RESOURCE with a sentence that names the size. */
int hr_block_create(struct hr_device *device, size_t bytes, struct hr_block **block, struct hr_error *error);
void hr_block_destroy(struct hr_block *block);

#endif
