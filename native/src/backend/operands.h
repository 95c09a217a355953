/* The work of all backends on the operands of a batch: see them as fused vectors, make room for what is gathered. */
#ifndef HR_BACKEND_OPERANDS_H
#define HR_BACKEND_OPERANDS_H

#include "backend/backend.h"
#include "local/fused.h"

/* Scratch, grows. */
struct hr_pieces {
    struct hr_piece *at;
    size_t capacity;
};

/* HORO_OK or HORO_ERR_RESOURCE, which changes nothing. */
hr_status hr_pieces_reserve(struct hr_pieces *pieces, size_t count);
void hr_pieces_fini(struct hr_pieces *pieces);

/* Puts a piece of `count` values behind those that `fused`, whose codec is set, has, unless it is empty. */
void hr_fuse_append(struct hr_fused *fused, struct hr_piece *pieces, const void *input, void *output, size_t count);

/*
 * The operands of a reduction kind by kind: those of equal dtype and wire dtype are one vector. Zeroed, then the first
 * two set, and all for hr_kinds_next_rows.
 */
struct hr_kinds {
    const struct hr_operand *operands;
    size_t count;
    int rank, size;
    int next; /* private */
};
/*
 * The next kind that occurs, in `pieces`, which has room for all operands and held the kind before: 1, or 0 behind the
 * last one.
 */
int hr_kinds_next(struct hr_kinds *kinds, struct hr_piece *pieces, struct hr_fused *fused);
/*
 * The same for a reduce-scatter: by_rank[size] are the rows that fall to each rank, of which those of `rank` have
 * outputs. `pieces` has room for all operands of each.
 */
int hr_kinds_next_rows(struct hr_kinds *kinds, struct hr_piece *pieces, struct hr_fused *by_rank);

/* AVERAGE is a sum and a factor. */
static inline int hr_operation_of(int reduce_op) {
    return reduce_op == HORO_AVERAGE ? HORO_SUM : reduce_op;
}
/* The scale for the sum of `dtype` over `size` ranks, where the user asked for work->postscale besides. */
static inline struct hr_scale hr_postscale_of(const struct hr_work *work, int dtype, int size) {
    if (work->reduce_op != HORO_AVERAGE) {
        return hr_scale_by(work->postscale);
    }
    return hr_dtype_is_integer(dtype) ? (struct hr_scale){work->postscale, size} : hr_scale_by(work->postscale / size);
}

/* Memory for a result whose bytes are known. HORO_OK or HORO_ERR_RESOURCE. */
hr_status hr_gathered_allocate(struct hr_gathered *result);

#endif
