/*
 * Kernels that convert and scale what a batch sends by NCCL: all pieces of a batch in one launch, into a buffer and out
 * of it (see packer.h). Values become what kernel/kernel.h says, to the bit but for the payload of a NaN.
 */
#include "device/kernels.cuh"
#include "device/pack_piece.h"

/* ---- Integers ---- */

HR_GPU_INLINE i64 load_integer(int dtype, u64 at, u64 i) {
    switch (dtype) {
    case HR_PACK_BOOL: return ((const u8 *)at)[i] != 0; /* any byte but 0 is true */
    case HR_PACK_INT8: return ((const signed char *)at)[i];
    case HR_PACK_INT16: return ((const short *)at)[i];
    case HR_PACK_INT32: return ((const int *)at)[i];
    case HR_PACK_INT64: return ((const i64 *)at)[i];
    default: return ((const u8 *)at)[i];
    }
}

/* Keeps the low bytes: this is where integers wrap. */
HR_GPU_INLINE void store_integer(int dtype, u64 at, u64 i, i64 value) {
    switch (dtype) {
    case HR_PACK_INT16: ((short *)at)[i] = (short)value; break;
    case HR_PACK_INT32: ((int *)at)[i] = (int)value; break;
    case HR_PACK_INT64: ((i64 *)at)[i] = value; break;
    default: ((u8 *)at)[i] = (u8)value;
    }
}

HR_GPU_INLINE i64 highest(int dtype) {
    switch (dtype) {
    case HR_PACK_UINT8: return 0xff;
    case HR_PACK_INT8: return 0x7f;
    case HR_PACK_INT16: return 0x7fff;
    case HR_PACK_INT32: return 0x7fffffff;
    default: return 0x7fffffffffffffffll;
    }
}

HR_GPU_INLINE i64 scale_integer(const struct hr_pack_piece *piece, i64 value) {
    const i64 high = highest(piece->dtype);
    const i64 low = piece->dtype == HR_PACK_UINT8 ? 0 : -high - 1;
    if (piece->factor == 1.0) {
        return piece->divisor == 1 ? value : value / piece->divisor;
    }
    const double result = (double)value * piece->factor / piece->divisor;
    if (result >= (double)high) { /* the highest of 64 bits rounds up to 2^63, the first double that does not fit */
        return high;
    }
    if (result <= (double)low) {
        return low;
    }
    return result == result ? (i64)result : 0;
}

/* ---- Kernels: block b takes HR_PACK_BLOCK_ELEMENTS of a piece, or those that are left of it ---- */

HR_GPU_INLINE const struct hr_pack_piece *piece_of(const struct hr_pack_piece *pieces, u32 count, u32 block) {
    u32 first = 0;
    for (u32 left = count; left > 1;) {
        const u32 half = left / 2;
        if (pieces[first + half].first_block <= block) {
            first += half;
            left -= half;
        } else {
            left = half;
        }
    }
    return &pieces[first];
}

HR_GPU_INLINE u32 width_of(int dtype) {
    switch (dtype) {
    case HR_PACK_INT16:
    case HR_PACK_FLOAT16:
    case HR_PACK_BFLOAT16: return 2;
    case HR_PACK_INT32:
    case HR_PACK_FLOAT32: return 4;
    case HR_PACK_INT64:
    case HR_PACK_FLOAT64: return 8;
    default: return 1;
    }
}

/* The work of this block: elements [0, count) at both addresses. */
struct part {
    u64 memory, wire, count;
};

HR_GPU_INLINE struct part part_of(const struct hr_pack_piece *piece, u32 block) {
    struct part part;
    const u64 begin = (u64)(block - piece->first_block) * HR_PACK_BLOCK_ELEMENTS;
    const u64 left = piece->count - begin;
    part.count = left < HR_PACK_BLOCK_ELEMENTS ? left : (u64)HR_PACK_BLOCK_ELEMENTS;
    const u32 width = width_of(piece->dtype);
    const u32 wire_width = width_of(piece->wire_dtype);
    part.memory = HR_GPU_REACH(piece->memory + begin * width, part.count * width);
    part.wire = HR_GPU_REACH(piece->wire + begin * wire_width, part.count * wire_width);
    return part;
}

HR_GPU_INLINE int is_float(int dtype) {
    return dtype >= HR_PACK_FLOAT16 && dtype <= HR_PACK_FLOAT64;
}

HR_GPU_INLINE float scale_float(const struct hr_pack_piece *piece, float value) {
    return piece->factor == 1.0 ? value : value * (float)piece->factor;
}

HR_GPU_INLINE void pack_float(const struct hr_pack_piece *piece, const struct part *part, u64 i) {
    float value;
    if (piece->dtype == HR_PACK_FLOAT64) {
        double wide = ((const double *)part->memory)[i];
        wide = piece->factor == 1.0 ? wide : wide * piece->factor;
        if (piece->wire_dtype == HR_PACK_FLOAT64) {
            ((double *)part->wire)[i] = wide;
            return;
        }
        value = (float)wide;
    } else {
        value = scale_float(piece, load_float(piece->dtype, part->memory, i));
    }
    if (piece->partial != 1.0) {
        value = widen(piece->wire_dtype, narrow(piece->wire_dtype, value)) * (float)piece->partial;
    }
    store_float(piece->wire_dtype, part->wire, i, value);
}

/* Values of 16 bits are rounded once more before they are widened: all ranks have what a 16-bit result would be. */
HR_GPU_INLINE void unpack_float(const struct hr_pack_piece *piece, const struct part *part, u64 i) {
    if (piece->wire_dtype == HR_PACK_FLOAT64) {
        const double wide = ((const double *)part->wire)[i];
        ((double *)part->memory)[i] = piece->factor == 1.0 ? wide : wide * piece->factor;
        return;
    }
    float value = scale_float(piece, load_float(piece->wire_dtype, part->wire, i));
    if (piece->wire_dtype != HR_PACK_FLOAT32 && piece->wire_dtype != piece->dtype) {
        value = widen(piece->wire_dtype, narrow(piece->wire_dtype, value));
    }
    if (piece->dtype == HR_PACK_FLOAT64) {
        ((double *)part->memory)[i] = (double)value;
    } else {
        store_float(piece->dtype, part->memory, i, value);
    }
}

HR_GPU_KERNEL hr_pack(const struct hr_pack_piece *pieces, u32 count) {
    const struct hr_pack_piece *table =
        (const struct hr_pack_piece *)HR_GPU_REACH((u64)pieces, (u64)count * sizeof *pieces);
    const struct hr_pack_piece piece = *piece_of(table, count, blockIdx.x);
    const struct part part = part_of(&piece, blockIdx.x);
    if (is_float(piece.dtype)) {
        for (u64 i = threadIdx.x; i < part.count; i += HR_PACK_THREADS) {
            pack_float(&piece, &part, i);
        }
        return;
    }
    for (u64 i = threadIdx.x; i < part.count; i += HR_PACK_THREADS) {
        const i64 value = load_integer(piece.dtype, part.memory, i);
        store_integer(piece.wire_dtype, part.wire, i, scale_integer(&piece, value));
    }
}

/* A sum of more bits than the values have wraps before it is scaled. */
HR_GPU_INLINE i64 wrap(int dtype, i64 value) {
    return dtype == HR_PACK_INT16 ? (short)value : value;
}

HR_GPU_KERNEL hr_unpack(const struct hr_pack_piece *pieces, u32 count) {
    const struct hr_pack_piece *table =
        (const struct hr_pack_piece *)HR_GPU_REACH((u64)pieces, (u64)count * sizeof *pieces);
    const struct hr_pack_piece piece = *piece_of(table, count, blockIdx.x);
    const struct part part = part_of(&piece, blockIdx.x);
    if (is_float(piece.dtype)) {
        for (u64 i = threadIdx.x; i < part.count; i += HR_PACK_THREADS) {
            unpack_float(&piece, &part, i);
        }
        return;
    }
    for (u64 i = threadIdx.x; i < part.count; i += HR_PACK_THREADS) {
        const i64 value = wrap(piece.dtype, load_integer(piece.wire_dtype, part.wire, i));
        store_integer(piece.dtype, part.memory, i, scale_integer(&piece, value));
    }
}
