/*
 * Memory for many small things that are kept for long, such as what is known of each name, outside of malloc's heap.
 *
 * Programs have large tensors on that heap. A piece of it that is taken while a tensor stands at its end, and is kept,
 * stays behind the tensor: then what the tensor leaves is a gap that malloc finds too small for the next one of the
 * same size, since it asks for a little more to align it (glibc before 2.38), and the heap grows by a tensor.
 *
 * One thread at a time. Under the address sanitizer pieces are malloc's, so that it sees wrong uses of them.
 */
#ifndef HR_BASE_POOL_H
#define HR_BASE_POOL_H

#include <stddef.h>
#include <stdint.h>

enum { HR_POOL_UNIT = 64, HR_POOL_CLASSES = 32 }; /* up to 2 KiB; what is larger has pages of its own */

struct hr_pool_piece {
    struct hr_pool_piece *next;
};

struct hr_pool {
    struct hr_pool_piece *given_back[HR_POOL_CLASSES]; /* by size, in units, less one */
    struct hr_pool_piece *chunks;
    uint8_t *fresh; /* of the newest chunk, what nobody has had */
    size_t fresh_bytes;
};

/* Zeros, aligned to HR_POOL_UNIT; NULL where there is no memory. An empty pool is all zeros. */
void *hr_pool_take(struct hr_pool *pool, size_t bytes);
/* `bytes` as it was taken. NULL is nothing. */
void hr_pool_give(struct hr_pool *pool, void *piece, size_t bytes);
/* All pieces have been given back. */
void hr_pool_fini(struct hr_pool *pool);

#endif
