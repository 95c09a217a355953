/* Several tensors seen as one vector: how a batch looks to the algorithms. */
#ifndef HR_COLLECTIVE_FUSED_H
#define HR_COLLECTIVE_FUSED_H

#include <stddef.h>

#include "kernel/kernel.h"

/* Bytes [offset, offset + bytes) of the vector; bytes > 0. */
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
    int dtype;
};

/* The piece that holds byte `offset` (< fused->bytes). */
size_t hr_fused_find(const struct hr_fused *fused, size_t offset);

/* target[0..bytes) = scale * inputs[offset..offset + bytes). */
void hr_fused_pack(const struct hr_fused *fused, size_t offset, size_t bytes, char *target, const struct hr_kernel *kernel,
                   double scale, enum hr_store store);

/* outputs[offset..offset + bytes) = source[0..bytes). */
void hr_fused_unpack(const struct hr_fused *fused, size_t offset, size_t bytes, const char *source,
                     const struct hr_kernel *kernel);

#endif
