#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "arena/arena.h"
#include "base/cut.h"

enum {
    SEGMENT_UNIT = 4096,
    PAGES = 1 << 16, /* a multiple of the pages of every kernel, which have 4, 16 or 64 KiB */
};

_Static_assert(HR_TEAMS_MAX == 64, "a bit per team in a word");

/*
 * Offsets of the parts of a partition, and of the end of its words; the last one is the size. It is whole pages, and so
 * is what stands before the rings: partitions are mapped by themselves, and pages from the rings on given back.
 */
struct layout {
    size_t blocks, words_end, request_rings, log_ring, slots, bytes;
};

static struct layout lay_out(int local_size, size_t segment_bytes) {
    const size_t ranks = (size_t)local_size;
    struct layout layout;
    layout.blocks = hr_round_up(sizeof(struct hr_partition_header), HR_LINE);
    layout.words_end = layout.blocks + ranks * sizeof(struct hr_partition_block);
    layout.request_rings = hr_round_up(layout.words_end, PAGES);
    layout.log_ring = layout.request_rings + ranks * HR_REQUEST_RING_BYTES;
    layout.slots = hr_round_up(layout.log_ring + HR_LOG_RING_BYTES, SEGMENT_UNIT);
    layout.bytes = hr_round_up(layout.slots + ranks * 2 * segment_bytes, PAGES);
    return layout;
}

/* The bytes before the rings of pairs. */
static size_t common_bytes(int local_size) {
    const size_t blocks = hr_round_up(sizeof(struct hr_arena_header), HR_LINE);
    return hr_round_up(blocks + (size_t)local_size * sizeof(struct hr_arena_block), PAGES);
}

static size_t pair_head_bytes(int local_size) {
    const size_t ranks = (size_t)local_size;
    return hr_round_up(ranks * ranks * sizeof(struct hr_pair_head), SEGMENT_UNIT);
}

static size_t pair_bytes(int local_size) {
    const size_t ranks = (size_t)local_size;
    return hr_round_up(pair_head_bytes(local_size) + ranks * ranks * HR_PAIR_RING_BYTES, PAGES);
}

/* The place of the first partition. */
static size_t host_bytes(int local_size) {
    return common_bytes(local_size) + pair_bytes(local_size);
}

uint64_t hr_arena_layout_bytes(int local_size, size_t segment_bytes, int partitions) {
    if (local_size < 1 || partitions < 1 || partitions > HR_TEAMS_MAX) {
        return 0;
    }
    return host_bytes(local_size) + (size_t)partitions * lay_out(local_size, segment_bytes).bytes;
}

/* Memory for a part of the arena: of the caller's, or mapped. */
static hr_status map_part(const struct hr_arena *arena, size_t offset, size_t bytes, char **part,
                          struct hr_error *error) {
    if (arena->fd < 0) {
        *part = arena->base + offset;
        return HORO_OK;
    }
    void *mapping = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, arena->fd, (off_t)offset);
    if (mapping == MAP_FAILED) {
        return hr_fail(error, HORO_ERR_RESOURCE, "cannot map %zu bytes of the arena: %s", bytes, strerror(errno));
    }
    *part = mapping;
    return HORO_OK;
}

hr_status hr_arena_map(struct hr_arena *arena, void *memory, size_t memory_bytes, int fd, int local_rank,
                       int local_size, size_t segment_bytes, struct hr_error *error) {
    if (segment_bytes == 0 || segment_bytes % SEGMENT_UNIT != 0) {
        return hr_fail(error, HORO_ERR_USAGE, "segment size %zu is not a positive multiple of %d bytes", segment_bytes,
                       SEGMENT_UNIT);
    }
    struct hr_arena mapped = {
        .base = memory,
        .fd = memory == NULL ? fd : -1,
        .memory_bytes = memory_bytes,
        .local_rank = local_rank,
        .local_size = local_size,
        .segment_bytes = segment_bytes,
    };
    struct stat status = {.st_size = (off_t)memory_bytes};
    if (memory == NULL && fstat(fd, &status) != 0) {
        return hr_fail(error, HORO_ERR_USAGE, "arena descriptor %d: %s", fd, strerror(errno));
    }
    const uint64_t bytes = hr_arena_layout_bytes(local_size, segment_bytes, 1);
    if ((uint64_t)status.st_size < bytes) {
        return hr_fail(error, HORO_ERR_USAGE, "arena of %lld bytes is too small: %d ranks need %llu",
                       (long long)status.st_size, local_size, (unsigned long long)bytes);
    }
    HR_TRY(map_part(&mapped, 0, common_bytes(local_size), &mapped.base, error));
    mapped.header = (struct hr_arena_header *)(void *)mapped.base;
    mapped.blocks =
        (struct hr_arena_block *)(void *)(mapped.base + hr_round_up(sizeof(struct hr_arena_header), HR_LINE));
    *arena = mapped;
    return HORO_OK;
}

void hr_arena_unmap(struct hr_arena *arena) {
    if (arena->base != NULL && arena->fd >= 0) {
        (void)munmap(arena->base, common_bytes(arena->local_size));
    }
    *arena = (struct hr_arena){.fd = -1};
}

/* ---- Pairs ---- */

hr_status hr_pair_rings_map(const struct hr_arena *arena, struct hr_pair_rings *rings, struct hr_error *error) {
    char *base = NULL;
    HR_TRY(map_part(arena, common_bytes(arena->local_size), pair_bytes(arena->local_size), &base, error));
    rings->heads = (struct hr_pair_head *)(void *)base;
    rings->rings = base + pair_head_bytes(arena->local_size);
    return HORO_OK;
}

void hr_pair_rings_unmap(const struct hr_arena *arena, struct hr_pair_rings *rings) {
    if (rings->heads != NULL && arena->fd >= 0) {
        (void)munmap(rings->heads, pair_bytes(arena->local_size));
    }
    *rings = (struct hr_pair_rings){0};
}

/* ---- Partitions ---- */

/* By an allocation at its end, which never makes the file shorter, whoever is first. */
static hr_status grow(const struct hr_arena *arena, size_t bytes, struct hr_error *error) {
    struct stat status;
    if (arena->fd < 0) {
        return bytes <= arena->memory_bytes
                   ? HORO_OK
                   : hr_fail(error, HORO_ERR_RESOURCE, "arena memory of %zu bytes has no room for another process set",
                             arena->memory_bytes);
    }
    if (fstat(arena->fd, &status) == 0 && (uint64_t)status.st_size >= bytes) {
        return HORO_OK;
    }
    const int failed = posix_fallocate(arena->fd, (off_t)bytes - 1, 1);
    return failed == 0
               ? HORO_OK
               : hr_fail(error, HORO_ERR_RESOURCE, "cannot make the arena %zu bytes long: %s", bytes, strerror(failed));
}

hr_status hr_partition_map(const struct hr_arena *arena, int team, struct hr_partition *partition,
                           struct hr_error *error) {
    const struct layout layout = lay_out(arena->local_size, arena->segment_bytes);
    const size_t offset = host_bytes(arena->local_size) + (size_t)team * layout.bytes;
    char *base = NULL;
    HR_TRY(grow(arena, offset + layout.bytes, error));
    HR_TRY(map_part(arena, offset, layout.bytes, &base, error));
    *partition = (struct hr_partition){
        .base = base,
        .segment_bytes = arena->segment_bytes,
        .header = (struct hr_partition_header *)(void *)base,
        .blocks = (struct hr_partition_block *)(void *)(base + layout.blocks),
        .request_rings = base + layout.request_rings,
        .log_ring = base + layout.log_ring,
        .slots = base + layout.slots,
    };
    return HORO_OK;
}

void hr_partition_unmap(const struct hr_arena *arena, struct hr_partition *partition) {
    if (partition->base != NULL && arena->fd >= 0) {
        (void)munmap(partition->base, lay_out(arena->local_size, partition->segment_bytes).bytes);
    }
    *partition = (struct hr_partition){0};
}

void hr_partition_enter(const struct hr_arena *arena, int team) {
    atomic_store(&arena->blocks[arena->local_rank].log_executed[team], 0);
    (void)atomic_fetch_add(&arena->header->users[team], 1);
}

int hr_partition_leave(const struct hr_arena *arena, int team, const struct hr_partition *partition) {
    if (atomic_fetch_sub(&arena->header->users[team], 1) != 1) {
        return 0;
    }
    const struct layout layout = lay_out(arena->local_size, partition->segment_bytes);
    memset(partition->base, 0, layout.words_end);
    (void)madvise(partition->base + layout.request_rings, layout.bytes - layout.request_rings, MADV_REMOVE);
    atomic_store(&arena->header->stall_report_ns[team], 0);
    (void)atomic_fetch_add(&arena->header->cleanings[team], 1); /* partner: add in sets.c */
    return 1;
}

int hr_arena_has_closed(const struct hr_arena *arena, int local_rank) {
    const uint64_t leave_at = atomic_load(&arena->header->leave_at);
    /* partner: end_record */
    return leave_at != 0 && atomic_load(&arena->blocks[local_rank].log_executed[0]) + 1 >= leave_at;
}

/* The negative code in 8 bits, the reason in 8, rank + 1 and by + 1 in 24 each; 0 means whole. */
void hr_arena_end_once(_Atomic uint64_t *end_word, struct hr_abort end) {
    uint64_t expected = 0;
    const uint64_t value = (uint64_t)(uint8_t)-end.code << 56 | (uint64_t)end.reason << 48 |
                           (uint64_t)(uint32_t)(end.rank + 1) << 24 | (uint32_t)(end.by + 1);
    (void)atomic_compare_exchange_strong(end_word, &expected, value);
}

struct hr_abort hr_arena_end_of(const _Atomic uint64_t *end_word) {
    const uint64_t word = atomic_load(end_word);
    return (struct hr_abort){
        .code = -(int)(word >> 56),
        .reason = (enum hr_abort_reason)(word >> 48 & 0xff),
        .rank = (int)(word >> 24 & 0xffffff) - 1,
        .by = (int)(word & 0xffffff) - 1,
    };
}

struct hr_abort hr_arena_aborted(const struct hr_arena *arena) {
    return hr_arena_end_of(&arena->header->abort_word);
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

/* ---- Last words ---- */

void hr_arena_keep_last_words(struct hr_arena *arena, int rank, const char *words, size_t bytes) {
    struct hr_arena_block *block = &arena->blocks[arena->local_rank];
    if (atomic_exchange_explicit(&block->words_claimed, 1, memory_order_relaxed) != 0) {
        return; /* another thread of this process was first */
    }
    const size_t kept = bytes < HR_LAST_WORDS_MAX ? bytes : HR_LAST_WORDS_MAX;
    if (kept > 0) {
        memcpy(block->words, words, kept);
    }
    block->words[kept] = '\0';
    /* partner: hr_arena_last_words */
    atomic_store_explicit(&block->words_of_rank, (uint32_t)rank + 1, memory_order_release);
}

const char *hr_arena_last_words(const struct hr_arena *arena, int rank) {
    for (int i = 0; i < arena->local_size && rank >= 0; i++) {
        /* partner: hr_arena_keep_last_words */
        if (atomic_load_explicit(&arena->blocks[i].words_of_rank, memory_order_acquire) == (uint32_t)rank + 1) {
            return arena->blocks[i].words;
        }
    }
    return NULL;
}

/* ---- Sleeping on a word ---- */

void hr_word_wake(_Atomic uint32_t *word) {
    (void)syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

int hr_word_sleep(_Atomic uint32_t *word, uint32_t value, const struct timespec *timeout) {
    if (syscall(SYS_futex, word, FUTEX_WAIT, value, timeout, NULL, 0) == 0 || errno == EAGAIN) {
        return 1;
    }
    return errno == ETIMEDOUT ? 0 : -1;
}
