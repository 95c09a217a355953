#include "device/table.h"

#include "device/stager.h"

int hr_table_take(struct hr_table *table, const struct hr_room *room, size_t bytes, struct hr_error *error) {
    struct hr_block *block;
    HR_TRY(hr_stager_take_block(room->stager, room->device, bytes, &block, error));
    *table = (struct hr_table){
        .room = room,
        .block = block,
        .data = block->data,
        .at = (uint64_t)(uintptr_t)(hr_room_is_on_host(room) ? block->data : room->data),
        .bytes = bytes,
    };
    return HORO_OK;
}

/* With the device entered. */
static int give_back(struct hr_table *table, void *stream, struct hr_error *error) {
    struct hr_block *block = table->block;
    table->block = NULL;
    return hr_stager_give_block_behind(table->room->stager, block, stream, error);
}

int hr_table_send(struct hr_table *table, void *stream, struct hr_error *error) {
    const struct hr_cuda *cuda = table->room->device->cuda;
    if (hr_room_is_on_host(table->room)) {
        return HORO_OK;
    }
    const uint64_t from = (uint64_t)(uintptr_t)table->data;
    HR_TRY(hr_cuda_check(cuda, cuda->copy(table->at, from, table->bytes, stream), "cuMemcpyAsync", error));
    return give_back(table, stream, error);
}

void hr_table_leave(struct hr_table *table, void *stream) {
    struct hr_error ignored = {0};
    struct hr_device_visit visit;
    if (table->block != NULL && hr_device_enter(table->room->device, &visit, &ignored) == HORO_OK) {
        (void)give_back(table, stream, &ignored);
        hr_device_leave(table->room->device, &visit);
    }
}
