/* Single elements as the scalar code sees them: any alignment, 16-bit floats as float, integers and bool as int64. */
#ifndef HR_KERNEL_ELEMENT_H
#define HR_KERNEL_ELEMENT_H

#include <string.h>

#include "kernel/level.h"

HR_INLINE uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

HR_INLINE float float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* As vcvtph2ps and FCVTL do it: exact, and a signaling NaN becomes a quiet one with the same payload. */
HR_INLINE float widen_float16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t exponent = (half >> 10) & 0x1f;
    const uint32_t mantissa = half & 0x3ff;
    if (exponent == 0x1f) {
        return float_from_bits(sign | (mantissa == 0 ? 0x7f800000 : 0x7fc00000 | mantissa << 13));
    }
    if (exponent == 0) {
        return float_from_bits(sign | float_bits((float)mantissa * 0x1p-24f));
    }
    return float_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

/*
 * As vcvtps2ph and FCVTN do it: to nearest even, overflow to infinity, gradual underflow, NaN quiet with its upper
 * payload.
 */
HR_INLINE uint16_t narrow_float16(float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000;
    const uint32_t size = bits & 0x7fffffff;
    if (size > 0x7f800000) {
        return (uint16_t)(sign | 0x7e00 | ((size >> 13) & 0x3ff));
    }
    if (size >= 0x477ff000) { /* 65520, halfway between the largest half and the next power of two */
        return (uint16_t)(sign | 0x7c00);
    }
    if (size >= 0x38800000) { /* 2^-14, the smallest normal half */
        return (uint16_t)(sign | (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13);
    }
    if (size <= 0x33000000) { /* 2^-25, half of the smallest half: ties to zero */
        return (uint16_t)sign;
    }
    const uint32_t mantissa = (size & 0x7fffff) | 0x800000;
    const uint32_t shift = 126 - (size >> 23); /* to units of 2^-24 */
    const uint32_t kept = mantissa >> shift;
    const uint32_t lost = mantissa & ((1u << shift) - 1);
    const uint32_t tie = 1u << (shift - 1);
    return (uint16_t)(sign | (kept + (lost > tie || (lost == tie && (kept & 1) != 0))));
}

HR_INLINE float widen_bfloat16(uint16_t half) {
    return float_from_bits((uint32_t)half << 16);
}

HR_INLINE uint16_t narrow_bfloat16(float value) {
    const uint32_t bits = float_bits(value);
    if (value != value) {
        return (uint16_t)(bits >> 16 | 0x40); /* rounding could carry a NaN into infinity */
    }
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

HR_INLINE float load_float(int dtype, const uint8_t *at) {
    if (dtype == HORO_FLOAT32) {
        float value;
        memcpy(&value, at, sizeof value);
        return value;
    }
    uint16_t half;
    memcpy(&half, at, sizeof half);
    return dtype == HORO_FLOAT16 ? widen_float16(half) : widen_bfloat16(half);
}

HR_INLINE void store_float(int dtype, uint8_t *at, float value) {
    if (dtype == HORO_FLOAT32) {
        memcpy(at, &value, sizeof value);
        return;
    }
    const uint16_t half = dtype == HORO_FLOAT16 ? narrow_float16(value) : narrow_bfloat16(value);
    memcpy(at, &half, sizeof half);
}

HR_INLINE double load_double(const uint8_t *at) {
    double value;
    memcpy(&value, at, sizeof value);
    return value;
}

HR_INLINE int64_t load_integer(int dtype, const uint8_t *at) {
    int16_t two;
    int32_t four;
    int64_t eight;
    switch (dtype) {
    case HORO_BOOL: return *at != 0; /* any byte but 0 is true */
    case HORO_INT8: return (int8_t)*at;
    case HORO_INT16: memcpy(&two, at, sizeof two); return two;
    case HORO_INT32: memcpy(&four, at, sizeof four); return four;
    case HORO_INT64: memcpy(&eight, at, sizeof eight); return eight;
    default: return *at;
    }
}

/* Keeps the low bytes: this is where integers wrap. */
HR_INLINE void store_integer(int dtype, uint8_t *at, int64_t value) {
    const int16_t two = (int16_t)value;
    const int32_t four = (int32_t)value;
    switch (dtype) {
    case HORO_INT16: memcpy(at, &two, sizeof two); break;
    case HORO_INT32: memcpy(at, &four, sizeof four); break;
    case HORO_INT64: memcpy(at, &value, sizeof value); break;
    default: *at = (uint8_t)value;
    }
}

HR_INLINE size_t element_bytes(int dtype) {
    switch (dtype) {
    case HORO_INT16:
    case HORO_FLOAT16:
    case HORO_BFLOAT16: return 2;
    case HORO_INT32:
    case HORO_FLOAT32:
    case HORO_COMPLEX32: return 4;
    case HORO_INT64:
    case HORO_FLOAT64:
    case HORO_COMPLEX64: return 8;
    case HORO_COMPLEX128: return 16;
    default: return 1;
    }
}

/* As hr_dtype_real, of a constant. */
HR_INLINE int part_of(int dtype) {
    switch (dtype) {
    case HORO_COMPLEX32: return HORO_FLOAT16;
    case HORO_COMPLEX64: return HORO_FLOAT32;
    case HORO_COMPLEX128: return HORO_FLOAT64;
    default: return dtype;
    }
}

#endif
