#include "shim.h"

#include <string.h>

#include "arena/arena.h"

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

int shim_arena_cause_of_two(void) {
    _Atomic uint64_t end_word = 0;
    for (int rank = 1; rank <= 2; rank++) {
        hr_arena_end_once(&end_word, (struct hr_abort){.code = HORO_ERR_PEER_LOST, .rank = rank, .by = 0});
    }
    return hr_arena_end_of(&end_word).rank;
}
