/* Several tensors seen as one vector: how a batch looks to the algorithms. */
#ifndef HR_LOCAL_FUSED_H
#define HR_LOCAL_FUSED_H

#include <stddef.h>

#include "kernel/kernel.h"

/* Bytes [offset, offset + bytes) of the vector, as they travel; bytes > 0. */
struct hr_piece {
    const char *input;
    char *output;
    size_t offset;
    size_t bytes;
};

struct hr_fused {
    const struct hr_piece *pieces; /* in order of offset, without gaps */
    size_t count;
    size_t bytes;
    int dtype;      /* of what travels: in the slots and on the links. All offsets and bytes here are of this dtype. */
    int wide_dtype; /* 0: inputs and outputs are of `dtype` too; else theirs, a float wider than it (see kernel->convert) */
};

/* What `bytes` of the vector take in an input or output. */
static inline size_t hr_fused_private_bytes(const struct hr_fused *fused, size_t bytes) {
    return fused->wide_dtype == 0 ? bytes : bytes / hr_dtype_bytes(fused->dtype) * hr_dtype_bytes(fused->wide_dtype);
}

/* The piece that holds byte `offset` (< fused->bytes). */
size_t hr_fused_find(const struct hr_fused *fused, size_t offset);

/* Both convert where the dtypes differ. target[0..bytes) = scale * inputs[offset..offset + bytes). */
void hr_fused_pack(const struct hr_fused *fused, size_t offset, size_t bytes, char *target, const struct hr_kernel *kernel,
                   double scale, enum hr_store store);

/* outputs[offset..offset + bytes) = source[0..bytes). */
void hr_fused_unpack(const struct hr_fused *fused, size_t offset, size_t bytes, const char *source,
                     const struct hr_kernel *kernel);

/* outputs = inputs, where they are not the same memory; for vectors that are not converted. */
void hr_fused_copy(const struct hr_fused *fused, const struct hr_kernel *kernel);

/*
 * As unpack of [out_offset, + bytes) from the slot, then pack of [in_offset, + bytes) into it, in one pass; the two ranges do not overlap,
 * and the dtypes are the same.
 */
void hr_fused_exchange(const struct hr_fused *fused, size_t out_offset, size_t in_offset, size_t bytes, char *slot,
                       const struct hr_kernel *kernel, enum hr_store store);

#endif
