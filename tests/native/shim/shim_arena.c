#include "shim_arena.h"

#include <stdlib.h>
#include <string.h>

#include "arena/arena.h"
#include "base/map.h"

enum { SEGMENT_BYTES = 4096 };

struct shim_arena {
    struct hr_arena arena;
    void *memory;
};

shim_arena *shim_arena_create(void) {
    shim_arena *one = calloc(1, sizeof *one);
    const size_t bytes = ((size_t)hr_arena_layout_bytes(1, SEGMENT_BYTES, 1) + HR_LINE - 1) / HR_LINE * HR_LINE;
    struct hr_error error = {0};
    if (one == NULL || (one->memory = aligned_alloc(HR_LINE, bytes)) == NULL) {
        free(one);
        return NULL;
    }
    memset(one->memory, 0, bytes);
    if (hr_arena_map(&one->arena, one->memory, bytes, -1, 0, 1, SEGMENT_BYTES, &error) != HORO_OK) {
        shim_arena_destroy(one);
        return NULL;
    }
    return one;
}

void shim_arena_destroy(shim_arena *one) {
    hr_arena_unmap(&one->arena);
    free(one->memory);
    free(one);
}

static uint64_t hash(const char *name) {
    return hr_hash(name, strlen(name));
}

uint32_t shim_arena_pending_add(shim_arena *one, const char *name) {
    return hr_arena_pending_add(&one->arena, hash(name));
}

void shim_arena_pending_remove(shim_arena *one, uint32_t place) {
    hr_arena_pending_remove(&one->arena, place);
}

int shim_arena_pending_has(const shim_arena *one, const char *name) {
    return hr_arena_pending_has(&one->arena, 0, hash(name));
}

uint32_t shim_arena_places(void) {
    return HR_PENDING_MAX;
}

/* An arena that others use, as one of its ranks sees it. */
static int look_at(void *memory, int local_size, uint64_t segment_bytes, int local_rank, struct hr_arena *arena) {
    struct hr_error error = {0};
    return hr_arena_map(arena, memory, SIZE_MAX / 2, -1, local_rank, local_size, (size_t)segment_bytes, &error);
}

int shim_arena_clear_sleeping(void *memory, int local_size, uint64_t segment_bytes, int local_rank) {
    struct hr_arena arena;
    if (look_at(memory, local_size, segment_bytes, local_rank, &arena) != HORO_OK) {
        return -1;
    }
    return (int)atomic_exchange(&arena.blocks[local_rank].sleeping, 0);
}

uint64_t shim_arena_requests_written(void *memory, int local_size, uint64_t segment_bytes, int local_rank) {
    struct hr_arena arena;
    struct hr_partition partition;
    struct hr_error error = {0};
    if (look_at(memory, local_size, segment_bytes, local_rank, &arena) != HORO_OK ||
        hr_partition_map(&arena, 0, &partition, &error) != HORO_OK) {
        return 0;
    }
    const uint64_t written = atomic_load(&partition.blocks[local_rank].requests.written);
    hr_partition_unmap(&arena, &partition);
    return written;
}

uint64_t shim_arena_request_ring_bytes(void) {
    return HR_REQUEST_RING_BYTES;
}
