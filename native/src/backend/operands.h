/* What all backends do with the operands of a batch: see them as fused vectors, and make room for what is gathered. */
#ifndef HR_BACKEND_OPERANDS_H
#define HR_BACKEND_OPERANDS_H

#include "backend/backend.h"
#include "collective/fused.h"

/* Scratch, grows. */
struct hr_pieces {
    struct hr_piece *at;
    size_t capacity;
};

/* HORO_OK or HORO_ERR_RESOURCE, which changes nothing. */
int hr_pieces_reserve(struct hr_pieces *pieces, size_t count);
void hr_pieces_fini(struct hr_pieces *pieces);

/* Puts a piece behind those that `fused` has, unless it is empty. */
void hr_fuse_append(struct hr_fused *fused, struct hr_piece *pieces, const void *input, void *output, size_t bytes);

/* Operands of one kind, that is of equal dtype and wire dtype, are reduced as one vector. */
enum { HR_KIND_COUNT = 3 * HORO_DTYPE_COUNT };
/* Bit per kind that occurs. */
uint32_t hr_kinds_of(const struct hr_operand *operands, size_t count);
struct hr_fused hr_fuse_kind(struct hr_piece *pieces, const struct hr_operand *operands, size_t count, int kind);

/* All operands as bytes. */
struct hr_fused hr_fuse_bytes(struct hr_piece *pieces, const struct hr_operand *operands, size_t count);

/* table[r * count + i]: rows of rank r's operand i. HORO_OK or HORO_ERR_RESOURCE; what is allocated is the caller's in any case. */
int hr_gathered_allocate(int size, const int64_t *table, const size_t *row_bytes, size_t count, struct hr_gathered *results);

#endif
