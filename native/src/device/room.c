#include "device/room.h"

#include <stdlib.h>
#include <string.h>

#include "device/stager.h"
#include "device/fill.h"

/* With the device entered. */
static int stand_in(struct hr_room *room, size_t bytes, const struct hr_error *reason, struct hr_error *error) {
    struct hr_error refusal = {0};
    if (hr_stager_take_block(room->stager, room->device, bytes, &room->block, &refusal) != HORO_OK) {
        return hr_fail(error, HORO_ERR_RESOURCE, "no %zu bytes on the GPU for values: %.200s; and %.200s", bytes,
                       reason->text, refusal.text);
    }
    room->data = room->block->data;
    return HORO_OK;
}

/* With the device entered. */
static int take(struct hr_room *room, void *stream, size_t bytes, struct hr_error *error) {
    struct hr_device *device = room->device;
    struct hr_error reason = {0};
    uint64_t address = 0;
    if (device->releases == NULL) {
        HR_TRY(hr_device_create_stream(device, &device->releases, error));
    }
    if (hr_cuda_check(device->cuda, device->cuda->alloc_async(&address, bytes, stream), "cuMemAllocAsync", &reason) !=
        HORO_OK) {
        return stand_in(room, bytes, &reason, error);
    }
    room->data = (char *)(uintptr_t)address;
    return HORO_OK;
}

int hr_room_create(struct hr_stager *stager, struct hr_device *device, void *stream, size_t bytes,
                   struct hr_room **room, struct hr_error *error) {
    struct hr_device_visit visit;
    struct hr_room *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for tensors on a GPU");
    }
    *made = (struct hr_room){.stager = stager, .device = device};
    atomic_init(&made->references, 1);
    int status = hr_device_enter(device, &visit, error);
    if (status == HORO_OK) {
        status = take(made, stream, bytes, error);
        hr_device_leave(device, &visit);
    }
    if (status != HORO_OK) {
        free(made);
        return status;
    }
    *room = made;
    return HORO_OK;
}

static int copy(const struct hr_cuda *cuda, struct hr_mark *mark, const void *from, void *to, size_t bytes,
                void *stream, struct hr_error *error) {
    HR_TRY(hr_cuda_check(cuda, cuda->stream_wait_event(stream, mark->event, 0), "cuStreamWaitEvent", error));
    if (bytes == 0) {
        return HORO_OK;
    }
    HR_TRY(hr_cuda_check(cuda, cuda->copy((uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, bytes, stream),
                         "cuMemcpyAsync", error));
    return hr_mark_move(mark, stream, error);
}

int hr_room_copy(struct hr_mark *mark, const void *from, void *to, size_t bytes, void *stream,
                 struct hr_error *error) {
    struct hr_device_visit visit;
    HR_TRY(hr_device_enter(mark->device, &visit, error));
    int status = hr_device_refuse_capture(mark->device, stream, error);
    status = status == HORO_OK ? copy(mark->device->cuda, mark, from, to, bytes, stream, error) : status;
    hr_device_leave(mark->device, &visit);
    return status;
}

/*
 * Of pinned memory, by the host: CUDA says of no function that fills memory of a GPU that it fills that, too, and one
 * that copies from there to there makes this thread wait for all that is on the stream, which may wait for a rank that
 * is gone.
 */
static void fill_on_host(char *data, size_t bytes, size_t width, uint64_t bits) {
    if (bits == 0) {
        memset(data, 0, bytes);
        return;
    }
    for (size_t at = 0; at < bytes; at += width) {
        memcpy(data + at, &bits, width);
    }
}

int hr_room_fill(const struct hr_room *room, void *data, size_t bytes, size_t width, uint64_t bits, void *stream,
                 struct hr_error *error) {
    if (hr_room_is_on_host(room)) {
        fill_on_host(data, bytes, width, bits);
        return HORO_OK;
    }
    return hr_device_fill(room->device, data, bytes, width, bits, stream, error);
}

/* With the device entered. */
static void give_back(struct hr_room *room, void *stream) {
    struct hr_error ignored = {0};
    if (hr_room_is_on_host(room)) {
        (void)hr_stager_give_block_behind(room->stager, room->block, stream, &ignored);
    } else {
        (void)room->device->cuda->free_async((uint64_t)(uintptr_t)room->data, stream);
    }
    room->data = NULL;
}

void hr_room_leave(struct hr_room *room, void *stream) {
    struct hr_error ignored = {0};
    struct hr_device_visit visit;
    if (room->data != NULL && hr_device_enter(room->device, &visit, &ignored) == HORO_OK) {
        give_back(room, stream);
        hr_device_leave(room->device, &visit);
    }
}

void hr_room_keep(struct hr_room *room) {
    atomic_fetch_add(&room->references, 1);
}

void hr_room_drop(struct hr_room *room, const struct hr_mark *mark) {
    struct hr_error ignored = {0};
    if (room == NULL || atomic_fetch_sub(&room->references, 1) > 1) {
        return;
    }
    if (room->data != NULL && mark != NULL && hr_mark_await(mark, room->device->releases, &ignored) == HORO_OK) {
        hr_room_leave(room, room->device->releases);
    }
    free(room);
}
