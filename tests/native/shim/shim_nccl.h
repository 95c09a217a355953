/* A communicator of NCCL by itself, without an engine around it. */
#ifndef SHIM_NCCL_H
#define SHIM_NCCL_H

#include <stddef.h>
#include <stdint.h>

typedef struct shim_nccl shim_nccl;

/*
 * Rank `rank` of `size` on the device of that number, with the driver and NCCL of these paths; it connects. `id` has
 * SHIM_NCCL_ID_BYTES, which rank 0 writes and the others read. NULL: it could not be made.
 */
enum { SHIM_NCCL_ID_BYTES = 128 };
shim_nccl *shim_nccl_connect(const char *cuda, const char *nccl, int size, int rank, char *id);
/* enum hr_nccl_state after a look. */
int shim_nccl_poll(shim_nccl *made);
/* Sums a byte at this address of the device. HORO_OK or a status. */
int shim_nccl_launch(shim_nccl *made, uint64_t address);
int shim_nccl_is_in_flight(const shim_nccl *made);
void shim_nccl_end(shim_nccl *made);
/* Takes so many pieces of pinned memory and gives them back; how many it got. */
enum { SHIM_NCCL_BLOCKS_MAX = 8 };
int shim_nccl_use_pinned(shim_nccl *made, int count, size_t bytes);
void shim_nccl_trim_pinned(shim_nccl *made);
/* How it has failed. */
const char *shim_nccl_failure(const shim_nccl *made);
/* Aborts what has not ended. */
void shim_nccl_destroy(shim_nccl *made);

#endif
