/* Words of the arena for tests. */
#ifndef SHIM_ARENA_H
#define SHIM_ARENA_H

/* cffi: skip */
#include <stdint.h>
/* cffi: end */

/*
 * What a waker does first: clears the mark by which a rank says that it sleeps. Returns what it was; -1: no such arena.
 */
int shim_arena_clear_sleeping(void *memory, int local_size, uint64_t segment_bytes, int local_rank);

/* What a rank has written into its request ring for the first team so far, in bytes, and the bytes of that ring. */
uint64_t shim_arena_requests_written(void *memory, int local_size, uint64_t segment_bytes, int local_rank);
uint64_t shim_arena_request_ring_bytes(void);

#endif
