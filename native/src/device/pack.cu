/*
 * Kernels that convert and scale what a batch sends by NCCL: all pieces of a batch in one launch, into a buffer and out
 * of it (see packer.h). Values become what kernel/kernel.h says, to the bit but for the payload of a NaN: nothing here
 * may be contracted to a fused multiply-add.
 *
 * In CUDA's C without its headers, so that a compiler of C takes it as well: the double of the driver runs it on the
 * host. What is loaded on a GPU is pack.ptx, which native/make_ptx.py makes of this file.
 */
#include "device/pack_piece.h"

#ifndef HR_PACK_ON_HOST
#define HR_PACK_KERNEL extern "C" __global__ void
#define HR_PACK_INLINE static __device__ __forceinline__
#define HR_PACK_REACH(address, bytes) (address)
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

/* ---- Floats of 16 bits, as kernel/element.h has them ---- */

union float_bits {
    float value;
    u32 bits;
};

HR_PACK_INLINE float from_bits(u32 bits) {
    union float_bits both;
    both.bits = bits;
    return both.value;
}

HR_PACK_INLINE u32 to_bits(float value) {
    union float_bits both;
    both.value = value;
    return both.bits;
}

HR_PACK_INLINE float widen_float16(u16 half) {
    const u32 sign = (u32)(half & 0x8000) << 16;
    const u32 exponent = (u32)(half >> 10) & 0x1f;
    const u32 mantissa = half & 0x3ff;
    if (exponent == 0x1f) {
        return from_bits(sign | (mantissa == 0 ? 0x7f800000u : 0x7fc00000u | mantissa << 13));
    }
    if (exponent == 0) {
        return from_bits(sign | to_bits((float)mantissa * 5.9604644775390625e-8f)); /* 2^-24 */
    }
    return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

HR_PACK_INLINE u16 narrow_float16(float value) {
    const u32 bits = to_bits(value);
    const u32 sign = (bits >> 16) & 0x8000;
    const u32 size = bits & 0x7fffffff;
    if (size > 0x7f800000u) {
        return (u16)(sign | 0x7e00 | ((size >> 13) & 0x3ff));
    }
    if (size >= 0x477ff000u) { /* 65520, halfway between the largest half and the next power of two */
        return (u16)(sign | 0x7c00);
    }
    if (size >= 0x38800000u) { /* 2^-14, the smallest normal half */
        return (u16)(sign | (size - 0x38000000u + 0xfff + ((size >> 13) & 1)) >> 13);
    }
    if (size <= 0x33000000u) { /* 2^-25, half of the smallest half: ties to zero */
        return (u16)sign;
    }
    const u32 mantissa = (size & 0x7fffff) | 0x800000;
    const u32 shift = 126 - (size >> 23); /* to units of 2^-24 */
    const u32 kept = mantissa >> shift;
    const u32 lost = mantissa & ((1u << shift) - 1);
    const u32 tie = 1u << (shift - 1);
    return (u16)(sign | (kept + (lost > tie || (lost == tie && (kept & 1) != 0))));
}

HR_PACK_INLINE u16 narrow_bfloat16(float value) {
    const u32 bits = to_bits(value);
    if (value != value) {
        return (u16)(bits >> 16 | 0x40); /* rounding could carry a NaN into infinity */
    }
    return (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

HR_PACK_INLINE float widen(int dtype, u16 half) {
    return dtype == HR_PACK_FLOAT16 ? widen_float16(half) : from_bits((u32)half << 16);
}

HR_PACK_INLINE u16 narrow(int dtype, float value) {
    return dtype == HR_PACK_FLOAT16 ? narrow_float16(value) : narrow_bfloat16(value);
}

/* ---- Elements ---- */

HR_PACK_INLINE float load_float(int dtype, u64 at, u64 i) {
    return dtype == HR_PACK_FLOAT32 ? ((const float *)at)[i] : widen(dtype, ((const u16 *)at)[i]);
}

HR_PACK_INLINE void store_float(int dtype, u64 at, u64 i, float value) {
    if (dtype == HR_PACK_FLOAT32) {
        ((float *)at)[i] = value;
    } else {
        ((u16 *)at)[i] = narrow(dtype, value);
    }
}

HR_PACK_INLINE i64 load_integer(int dtype, u64 at, u64 i) {
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
HR_PACK_INLINE void store_integer(int dtype, u64 at, u64 i, i64 value) {
    switch (dtype) {
    case HR_PACK_INT16: ((short *)at)[i] = (short)value; break;
    case HR_PACK_INT32: ((int *)at)[i] = (int)value; break;
    case HR_PACK_INT64: ((i64 *)at)[i] = value; break;
    default: ((u8 *)at)[i] = (u8)value;
    }
}

HR_PACK_INLINE i64 highest(int dtype) {
    switch (dtype) {
    case HR_PACK_UINT8: return 0xff;
    case HR_PACK_INT8: return 0x7f;
    case HR_PACK_INT16: return 0x7fff;
    case HR_PACK_INT32: return 0x7fffffff;
    default: return 0x7fffffffffffffffll;
    }
}

HR_PACK_INLINE i64 scale_integer(const struct hr_pack_piece *piece, i64 value) {
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

HR_PACK_INLINE const struct hr_pack_piece *piece_of(const struct hr_pack_piece *pieces, u32 count, u32 block) {
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

HR_PACK_INLINE u32 width_of(int dtype) {
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

/* What this block takes: elements [0, count) at both addresses. */
struct part {
    u64 memory, wire, count;
};

HR_PACK_INLINE struct part part_of(const struct hr_pack_piece *piece, u32 block) {
    struct part part;
    const u64 begin = (u64)(block - piece->first_block) * HR_PACK_BLOCK_ELEMENTS;
    const u64 left = piece->count - begin;
    part.count = left < HR_PACK_BLOCK_ELEMENTS ? left : (u64)HR_PACK_BLOCK_ELEMENTS;
    const u32 width = width_of(piece->dtype);
    const u32 wire_width = width_of(piece->wire_dtype);
    part.memory = HR_PACK_REACH(piece->memory + begin * width, part.count * width);
    part.wire = HR_PACK_REACH(piece->wire + begin * wire_width, part.count * wire_width);
    return part;
}

HR_PACK_INLINE int is_float(int dtype) {
    return dtype >= HR_PACK_FLOAT16 && dtype <= HR_PACK_FLOAT64;
}

HR_PACK_INLINE float scale_float(const struct hr_pack_piece *piece, float value) {
    return piece->factor == 1.0 ? value : value * (float)piece->factor;
}

HR_PACK_INLINE void pack_float(const struct hr_pack_piece *piece, const struct part *part, u64 i) {
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
HR_PACK_INLINE void unpack_float(const struct hr_pack_piece *piece, const struct part *part, u64 i) {
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

HR_PACK_KERNEL hr_pack(const struct hr_pack_piece *pieces, u32 count) {
    const struct hr_pack_piece *table =
        (const struct hr_pack_piece *)HR_PACK_REACH((u64)pieces, (u64)count * sizeof *pieces);
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
HR_PACK_INLINE i64 wrap(int dtype, i64 value) {
    return dtype == HR_PACK_INT16 ? (short)value : value;
}

HR_PACK_KERNEL hr_unpack(const struct hr_pack_piece *pieces, u32 count) {
    const struct hr_pack_piece *table =
        (const struct hr_pack_piece *)HR_PACK_REACH((u64)pieces, (u64)count * sizeof *pieces);
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
