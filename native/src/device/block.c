#include "device/block.h"

#include <stdlib.h>

/* The caller has entered the device. */
static void free_parts(struct hr_block *block) {
    const struct hr_cuda *cuda = block->device->cuda;
    if (block->data != NULL) {
        (void)cuda->host_free(block->data);
    }
    if (block->copied_in != NULL) {
        (void)cuda->event_destroy(block->copied_in);
    }
    if (block->copied_out != NULL) {
        (void)cuda->event_destroy(block->copied_out);
    }
    free(block);
}

void hr_block_destroy(struct hr_block *block) {
    struct hr_device_visit visit;
    struct hr_device *device = block->device;
    if (hr_device_enter(device, &visit, NULL) == HORO_OK) {
        free_parts(block);
        atomic_fetch_sub(&device->held, 1);
        hr_device_leave(device, &visit);
    }
}

hr_status hr_block_create(struct hr_device *device, size_t bytes, struct hr_block **block, struct hr_error *error) {
    struct hr_block *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for tensors on a GPU");
    }
    made->device = device;
    made->bytes = bytes;
    const struct hr_cuda *cuda = device->cuda;
    struct hr_error refusal = {0};
    void *data = NULL;
    int status = hr_cuda_check(cuda, cuda->host_alloc(&data, bytes, HR_CUDA_HOST_PORTABLE), "cuMemHostAlloc", &refusal);
    if (status != HORO_OK) {
        (void)hr_fail(error, status, "no %zu bytes of pinned memory: %s", bytes, refusal.text);
    } else {
        made->data = data;
        status = hr_cuda_check(cuda, cuda->event_create(&made->copied_in, HR_CUDA_EVENT_DISABLE_TIMING),
                               "cuEventCreate", error);
    }
    if (status == HORO_OK) {
        status = hr_cuda_check(cuda, cuda->event_create(&made->copied_out, HR_CUDA_EVENT_DISABLE_TIMING),
                               "cuEventCreate", error);
    }
    if (status != HORO_OK) {
        free_parts(made);
        return status;
    }
    atomic_fetch_add(&device->held, 1);
    *block = made;
    return HORO_OK;
}

int hr_block_is_done(const struct hr_block *block) {
    const struct hr_cuda *cuda = block->device->cuda;
    return cuda->event_query(block->copied_in) != HR_CUDA_NOT_READY &&
           (!block->is_out || cuda->event_query(block->copied_out) != HR_CUDA_NOT_READY);
}
