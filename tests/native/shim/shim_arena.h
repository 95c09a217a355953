/* The arena's pending table for tests: that of the one rank of a host. */
#ifndef SHIM_ARENA_H
#define SHIM_ARENA_H

/* cffi: skip */
#include <stdint.h>
/* cffi: end */

typedef struct shim_arena shim_arena;

shim_arena *shim_arena_create(void);
void shim_arena_destroy(shim_arena *one);

/* The place of a name, for remove; as many places as shim_arena_places, which itself stands for none. */
uint32_t shim_arena_pending_add(shim_arena *one, const char *name);
void shim_arena_pending_remove(shim_arena *one, uint32_t place);
/* 1: submitted, 0: not, -1: cannot be told. */
int shim_arena_pending_has(const shim_arena *one, const char *name);
uint32_t shim_arena_places(void);

/*
 * What a waker does first: clears the mark by which a rank says that it sleeps. Returns what it was; -1: no such arena.
 */
int shim_arena_clear_sleeping(void *memory, int local_size, uint64_t segment_bytes, int local_rank);

/* What a rank has written into its request ring for the first team so far, in bytes, and the bytes of that ring. */
uint64_t shim_arena_requests_written(void *memory, int local_size, uint64_t segment_bytes, int local_rank);
uint64_t shim_arena_request_ring_bytes(void);

#endif
