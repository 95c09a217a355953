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

/* Reduces one vector over all ranks with SUM, MIN, MAX or PRODUCT. */
typedef int hr_reduce_fused(void *arg, const struct hr_fused *fused, int reduce_op, double prescale,
                            struct hr_scale postscale);
/*
 * An allreduce of all operands over `size` ranks; reduce_op may be AVERAGE. Operands of one kind, that is of equal dtype and wire dtype,
 * are reduced as one vector. HORO_OK, HORO_ERR_RESOURCE before anything has begun, or what `reduce` returned.
 */
int hr_reduce_kinds(struct hr_pieces *pieces, const struct hr_operand *operands, size_t count, int size, int reduce_op,
                    double prescale, double postscale, hr_reduce_fused *reduce, void *arg);

/* All operands as bytes. */
struct hr_fused hr_fuse_bytes(struct hr_piece *pieces, const struct hr_operand *operands, size_t count);

/* table[r * count + i]: rows of rank r's operand i. HORO_OK or HORO_ERR_RESOURCE; what is allocated is the caller's in any case. */
int hr_gathered_allocate(int size, const int64_t *table, const size_t *row_bytes, size_t count, struct hr_gathered *results);
/* Leaves the data to nobody: MPI may still write there, and it is better lost than somebody else's when that happens. */
void hr_gathered_disown(struct hr_gathered *results, size_t count);

#endif
