/* Several tensors seen as one vector: how a batch looks to the algorithms. */
#ifndef HR_LOCAL_FUSED_H
#define HR_LOCAL_FUSED_H

#include <stddef.h>

#include "kernel/codec.h"

/* One tensor: bytes [offset, offset + bytes) of the vector, as they travel; bytes > 0. */
struct hr_piece {
    const char *input;
    char *output;
    size_t offset;
    size_t bytes;
    size_t count; /* of its values */
};

/* All offsets and bytes are those of what travels, and lie between two blocks of the codec. */
struct hr_fused {
    const struct hr_piece *pieces; /* in order of offset, without gaps */
    size_t count;
    size_t bytes;
    const struct hr_codec *codec;
};

/* The piece that holds byte `offset` (< fused->bytes). */
size_t hr_fused_find(const struct hr_fused *fused, size_t offset);

/* target[0..bytes) = scale * inputs[offset..offset + bytes), packed. */
void hr_fused_pack(const struct hr_fused *fused, size_t offset, size_t bytes, char *target,
                   const struct hr_kernel *kernel, double scale, enum hr_store store);

/* outputs[offset..offset + bytes) = source[0..bytes), unpacked. */
void hr_fused_unpack(const struct hr_fused *fused, size_t offset, size_t bytes, const char *source,
                     const struct hr_kernel *kernel);

/*
 * The same of a plain codec, where `store` rules the stores; NULL: from the inputs, where they are not the same memory.
 */
void hr_fused_put(const struct hr_fused *fused, size_t offset, size_t bytes, const char *source,
                  const struct hr_kernel *kernel, enum hr_store store);

/*
 * As unpack of [out_offset, + bytes) from the slot, then pack of [in_offset, + bytes) into it, in one pass; the two
 * ranges do not overlap, and the codec is plain.
 */
void hr_fused_exchange(const struct hr_fused *fused, size_t out_offset, size_t in_offset, size_t bytes, char *slot,
                       const struct hr_kernel *kernel, enum hr_store store);

#endif
