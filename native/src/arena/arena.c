#include "arena/arena.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/cut.h"

enum { PAGE = 4096 };

/* Offsets of the parts; the last one is the size. */
struct layout {
    size_t blocks, request_rings, log_ring, slots, bytes;
};

static struct layout lay_out(int local_size, size_t segment_bytes) {
    const size_t ranks = (size_t)local_size;
    struct layout layout;
    layout.blocks = hr_round_up(sizeof(struct hr_arena_header), HR_LINE);
    layout.request_rings = hr_round_up(layout.blocks + ranks * sizeof(struct hr_arena_block), PAGE);
    layout.log_ring = layout.request_rings + ranks * HR_REQUEST_RING_BYTES;
    layout.slots = hr_round_up(layout.log_ring + HR_LOG_RING_BYTES, PAGE);
    layout.bytes = layout.slots + ranks * 2 * segment_bytes;
    return layout;
}

uint64_t hr_arena_layout_bytes(int local_size, size_t segment_bytes) {
    return local_size < 1 ? 0 : lay_out(local_size, segment_bytes).bytes;
}

static int map_fd(int fd, size_t bytes, int local_size, char **base, struct hr_error *error) {
    struct stat status;
    if (fstat(fd, &status) != 0) {
        return hr_fail(error, HORO_ERR_USAGE, "arena descriptor %d: %s", fd, strerror(errno));
    }
    if ((uint64_t)status.st_size < bytes) {
        return hr_fail(error, HORO_ERR_USAGE, "arena of %lld bytes is too small: %d ranks need %zu",
                       (long long)status.st_size, local_size, bytes);
    }
    void *mapping = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapping == MAP_FAILED) {
        return hr_fail(error, HORO_ERR_RESOURCE, "cannot map the arena of %zu bytes: %s", bytes, strerror(errno));
    }
    *base = mapping;
    return HORO_OK;
}

int hr_arena_map(struct hr_arena *arena, void *memory, int fd, int local_rank, int local_size, size_t segment_bytes,
                 struct hr_error *error) {
    if (segment_bytes < PAGE || segment_bytes % PAGE != 0) {
        return hr_fail(error, HORO_ERR_USAGE, "segment size %zu is not a positive multiple of %d bytes", segment_bytes,
                       PAGE);
    }
    const struct layout layout = lay_out(local_size, segment_bytes);
    char *base = memory;
    if (base == NULL) {
        HR_TRY(map_fd(fd, layout.bytes, local_size, &base, error));
    }
    *arena = (struct hr_arena){
        .base = base,
        .mapped_bytes = memory == NULL ? layout.bytes : 0,
        .local_rank = local_rank,
        .local_size = local_size,
        .segment_bytes = segment_bytes,
        .header = (struct hr_arena_header *)(void *)base,
        .blocks = (struct hr_arena_block *)(void *)(base + layout.blocks),
        .request_rings = base + layout.request_rings,
        .log_ring = base + layout.log_ring,
        .slots = base + layout.slots,
    };
    return HORO_OK;
}

void hr_arena_unmap(struct hr_arena *arena) {
    if (arena->mapped_bytes > 0) {
        (void)munmap(arena->base, arena->mapped_bytes);
    }
    *arena = (struct hr_arena){0};
}

int hr_arena_has_closed(const struct hr_arena *arena, int local_rank) {
    const uint64_t leave_at = atomic_load(&arena->header->leave_at);
    return leave_at != 0 && atomic_load(&arena->blocks[local_rank].log_executed) + 1 >= leave_at; /* partner: end_record */
}

/* Code in the upper half, reason in 8 bits, rank + 1 in 24; 0 means whole. */
int hr_arena_abort(struct hr_arena *arena, int code, int rank, enum hr_abort_reason reason) {
    uint64_t expected = 0;
    const uint64_t word = (uint64_t)(uint32_t)code << 32 | (uint64_t)reason << 24 | (uint32_t)(rank + 1);
    return atomic_compare_exchange_strong(&arena->header->abort_word, &expected, word);
}

struct hr_abort hr_arena_aborted(const struct hr_arena *arena) {
    const uint64_t word = atomic_load(&arena->header->abort_word);
    return (struct hr_abort){
        .code = (int)(int32_t)(uint32_t)(word >> 32),
        .reason = (enum hr_abort_reason)(word >> 24 & 0xff),
        .rank = (int)(word & 0xffffff) - 1,
    };
}

size_t hr_ring_write(struct hr_ring_head *head, char *ring, size_t ring_bytes, uint64_t slowest_read, const void *data,
                     size_t bytes) {
    const uint64_t written = atomic_load_explicit(&head->written, memory_order_relaxed); /* ours alone */
    const size_t space = ring_bytes - (size_t)(written - slowest_read);
    const size_t count = bytes < space ? bytes : space;
    const size_t at = (size_t)written & (ring_bytes - 1);
    const size_t first = count < ring_bytes - at ? count : ring_bytes - at;
    memcpy(ring + at, data, first);
    memcpy(ring, (const char *)data + first, count - first);
    /* seq_cst, not release alone: a sleeping reader re-reads it after saying that it sleeps (hr_node_wait). */
    atomic_store(&head->written, written + count);
    return count;
}

size_t hr_ring_read(const struct hr_ring_head *head, const char *ring, size_t ring_bytes, uint64_t *read, void *data,
                    size_t bytes) {
    const uint64_t written = atomic_load(&head->written); /* partner: hr_ring_write */
    const size_t available = (size_t)(written - *read);
    const size_t count = bytes < available ? bytes : available;
    const size_t at = (size_t)*read & (ring_bytes - 1);
    const size_t first = count < ring_bytes - at ? count : ring_bytes - at;
    memcpy(data, ring + at, first);
    memcpy((char *)data + first, ring, count - first);
    *read += count;
    return count;
}

static uint32_t first_place(uint64_t name_hash) {
    return (uint32_t)(name_hash % (HR_PENDING_MAX / HR_PENDING_WAYS)) * HR_PENDING_WAYS;
}

uint32_t hr_arena_pending_add(struct hr_arena *arena, uint64_t name_hash) {
    struct hr_arena_block *block = &arena->blocks[arena->local_rank];
    const uint32_t first = first_place(name_hash);
    for (uint32_t place = first; place < first + HR_PENDING_WAYS; place++) {
        if (atomic_load_explicit(&block->pending[place], memory_order_relaxed) == 0) {
            atomic_store_explicit(&block->pending[place], name_hash, memory_order_relaxed);
            return place;
        }
    }
    atomic_fetch_add_explicit(&block->pending_hidden, 1, memory_order_relaxed);
    return HR_PENDING_MAX;
}

void hr_arena_pending_remove(struct hr_arena *arena, uint32_t place) {
    struct hr_arena_block *block = &arena->blocks[arena->local_rank];
    if (place < HR_PENDING_MAX) {
        atomic_store_explicit(&block->pending[place], 0, memory_order_relaxed);
    } else {
        atomic_fetch_sub_explicit(&block->pending_hidden, 1, memory_order_relaxed);
    }
}

int hr_arena_pending_has(const struct hr_arena *arena, int local_rank, uint64_t name_hash) {
    const struct hr_arena_block *block = &arena->blocks[local_rank];
    const uint32_t first = first_place(name_hash);
    for (uint32_t place = first; place < first + HR_PENDING_WAYS; place++) {
        if (atomic_load_explicit(&block->pending[place], memory_order_relaxed) == name_hash) {
            return 1;
        }
    }
    return atomic_load_explicit(&block->pending_hidden, memory_order_relaxed) != 0 ? -1 : 0;
}
