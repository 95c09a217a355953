/*
 * Memory on a GPU for results whose size is known only when all ranks have called, and for what a rank that has joined
 * gives. It comes and goes in the order of streams, so nothing waits for the GPU. Where the GPU has none left, pinned
 * memory of the host stands in, which the GPU reaches, too: what the other ranks have begun is not lost.
 */
#ifndef HR_DEVICE_ROOM_H
#define HR_DEVICE_ROOM_H

#include "device/mark.h"
#include "device/staging.h"

struct hr_room {
    _Atomic int references;
    struct hr_stager *stager;
    struct hr_device *device;
    char *data;             /* by its address on the GPU; NULL: it has been given back */
    struct hr_block *block; /* the block that stands in; else NULL */
};

/* Whether pinned memory stands in. */
static inline int hr_room_is_on_host(const struct hr_room *room) {
    return room->block != NULL;
}

/*
 * Can be used on `stream` from now on. HORO_OK, or HORO_ERR_RESOURCE with a sentence that names the size, and nothing
 * left behind. For one thread.
 */
int hr_room_create(struct hr_stager *stager, struct hr_device *device, void *stream, size_t bytes,
                   struct hr_room **room, struct hr_error *error);
/*
 * Copies a part of it to memory of the GPU, on `stream`, behind the mark, which is behind that then. HORO_OK or as
 * hr_mark_create. One thread at a time.
 */
int hr_room_copy(struct hr_mark *mark, const void *from, void *to, size_t bytes, void *stream,
                 struct hr_error *error);
/*
 * For a caller that has entered the device: writes the lowest `width` (1, 2, 4 or 8) bytes of `bits` into each element
 * of a part, for what comes behind it on `stream`. Nobody else uses the part yet; it begins and ends where an element
 * does. HORO_OK or as create.
 */
int hr_room_fill(const struct hr_room *room, void *data, size_t bytes, size_t width, uint64_t bits, void *stream,
                 struct hr_error *error);
/* Gives it back in the order of `stream`. */
void hr_room_leave(struct hr_room *room, void *stream);
/* For a call that copies from it while its owner may let go. */
void hr_room_keep(struct hr_room *room);
/*
 * Drops the room. Once all have, it is freed, and given back behind the mark if it has not been, which needs one. A
 * room of NULL is allowed. Not while another thread moves the mark.
 */
void hr_room_drop(struct hr_room *room, const struct hr_mark *mark);

#endif
