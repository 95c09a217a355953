/* The agreement for tests: one node with plain arguments; messages go in and come out as bytes. */
#ifndef SHIM_AGREE_H
#define SHIM_AGREE_H

/* cffi: skip */
#include <stddef.h>
#include <stdint.h>
/* cffi: end */

typedef struct shim_agree shim_agree;

shim_agree *shim_agree_create(int is_root, int member_count, int local_count, const int32_t *rank_of_member,
                              const int32_t *ranks_of_member, int rank_count, uint32_t capacity, uint64_t evict_after,
                              uint64_t fusion_bytes);
void shim_agree_destroy(shim_agree *node);

int shim_agree_announce_id(shim_agree *node, int member, uint32_t id, int64_t now_ns);
/* One allreduce (op 0) of a float32 vector, announced in full by `rank` through `member`. */
int shim_agree_announce(shim_agree *node, int member, int32_t rank, const char *name, int64_t extent, int transient,
                        int64_t now_ns);
/* A message as a child or parent sent it (without its length). */
int shim_agree_receive(shim_agree *node, int member, const void *message, size_t bytes, int64_t now_ns);
int shim_agree_apply(shim_agree *node, const void *message, size_t bytes);

/* Frames out: *data stays valid until the next call on the node. */
int shim_agree_collect(shim_agree *node, const void **data, size_t *bytes);
int shim_agree_form_batch(shim_agree *node, const void **data, size_t *bytes);

/* Announcements that are not yet answered; the first tensor that waits, since when,
   and the bits of who has announced it. */
uint32_t shim_agree_active(const shim_agree *node);
int shim_agree_describe(const shim_agree *node, int64_t now_ns, int64_t age_ns, char *out, size_t out_bytes);

/* The refs of a BATCH: up to `capacity` ids and names (room for 64 bytes each); the count, or -1 if it is no BATCH. */
int shim_agree_read_batch(const void *message, size_t bytes, uint32_t *ids, char *names, int capacity);
/* The name of a FAIL (room for 64 bytes): its status, or 0 if it is no FAIL. */
int shim_agree_read_fail(const void *message, size_t bytes, char *name, char *text, size_t text_bytes);

#endif
