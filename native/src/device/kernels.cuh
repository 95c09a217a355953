/*
 * The common parts of the kernels for GPUs (pack.cu, adasum.cu): their dialect, and floats of 16 bits. They are in
 * CUDA's C without its headers, so that a compiler of C takes them as well: the double of the driver runs them on the
 * host. The text that is loaded on a GPU is kernels.ptx, which native/make_ptx.py makes of all of them. They calculate
 * as the host does, to the bit: nothing here may be contracted to a fused multiply-add.
 */
#ifndef HR_DEVICE_KERNELS_CUH
#define HR_DEVICE_KERNELS_CUH

#include "device/pack_piece.h"

#ifndef HR_GPU_ON_HOST
#define HR_GPU_KERNEL extern "C" __global__ void
#define HR_GPU_INLINE static __device__ __forceinline__
#define HR_GPU_REACH(address, bytes) (address)
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

HR_GPU_INLINE float from_bits(u32 bits) {
    union float_bits both;
    both.bits = bits;
    return both.value;
}

HR_GPU_INLINE u32 to_bits(float value) {
    union float_bits both;
    both.value = value;
    return both.bits;
}

HR_GPU_INLINE float widen_float16(u16 half) {
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

HR_GPU_INLINE u16 narrow_float16(float value) {
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

HR_GPU_INLINE u16 narrow_bfloat16(float value) {
    const u32 bits = to_bits(value);
    if (value != value) {
        return (u16)(bits >> 16 | 0x40); /* rounding could carry a NaN into infinity */
    }
    return (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

HR_GPU_INLINE float widen(int dtype, u16 half) {
    return dtype == HR_PACK_FLOAT16 ? widen_float16(half) : from_bits((u32)half << 16);
}

HR_GPU_INLINE u16 narrow(int dtype, float value) {
    return dtype == HR_PACK_FLOAT16 ? narrow_float16(value) : narrow_bfloat16(value);
}

/* ---- Elements, by enum hr_pack_dtype: floats of up to 32 bits ---- */

HR_GPU_INLINE float load_float(int dtype, u64 at, u64 i) {
    return dtype == HR_PACK_FLOAT32 ? ((const float *)at)[i] : widen(dtype, ((const u16 *)at)[i]);
}

HR_GPU_INLINE void store_float(int dtype, u64 at, u64 i, float value) {
    if (dtype == HR_PACK_FLOAT32) {
        ((float *)at)[i] = value;
    } else {
        ((u16 *)at)[i] = narrow(dtype, value);
    }
}

#endif
