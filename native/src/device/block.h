/* Pinned memory of the host with events that tell when copies no longer use it. */
#ifndef HR_DEVICE_BLOCK_H
#define HR_DEVICE_BLOCK_H

#include "device/device.h"

struct hr_stager;

struct hr_block {
    struct hr_device *device;
    char *data;
    size_t bytes;
    void *copied_in, *copied_out; /* events */
    int is_out;                   /* copied_out has been recorded for its last use */
    /* the stager's: */
    struct hr_stager *stager;
    struct hr_block *next;            /* that is idle */
    struct hr_block *earlier, *later; /* that are launched */
    void *request;                    /* of the owner, who is told of it; NULL: nobody is */
    int users;                        /* 0: it is idle */
    int is_launched, has_failed;
};

/* The caller has entered the device. HORO_OK, or HORO_ERR_RESOURCE with a sentence that names the size. */
hr_status hr_block_create(struct hr_device *device, size_t bytes, struct hr_block **block, struct hr_error *error);
/* Waits for all that runs on the device. */
void hr_block_destroy(struct hr_block *block);
/* Whether no copy uses it. The caller has entered the device. */
int hr_block_is_done(const struct hr_block *block);

#endif
