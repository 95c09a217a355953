/*
 * The description of a batch for kernels: the host writes it into pinned memory, from where it is copied to the head of
 * a room, in the order of a stream. Where pinned memory stands in for the room, kernels read it where it was written:
 * CUDA copies from host memory to host memory by making the calling thread wait for all that is on the stream, and that
 * may wait for a rank that is gone.
 */
#ifndef HR_DEVICE_TABLE_H
#define HR_DEVICE_TABLE_H

#include "device/room.h"

/* Zeroed: there is none. */
struct hr_table {
    const struct hr_room *room;
    struct hr_block *block; /* NULL: it has been given back */
    char *data;             /* where the host writes it, between take and send */
    uint64_t at;            /* where kernels find it */
    size_t bytes;
};

/*
 * For a caller that has entered the device: so many bytes that the host can write, of which `at` is known from now on.
 * HORO_OK, or HORO_ERR_RESOURCE with a sentence that names the size.
 */
int hr_table_take(struct hr_table *table, const struct hr_room *room, size_t bytes, struct hr_error *error);
/* Likewise: kernels find it from here on `stream` on. HORO_OK, or HORO_ERR_RESOURCE with a sentence. */
int hr_table_send(struct hr_table *table, void *stream, struct hr_error *error);
/* Kernels that read it are on the stream, or none will be; before the room is dropped. Of none, nothing. */
void hr_table_leave(struct hr_table *table, void *stream);

#endif
