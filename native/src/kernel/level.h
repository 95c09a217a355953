/*
 * Inside of the kernels: single elements as the scalar code sees them (any alignment, 16-bit floats as float, integers
 * and bool as int64), and the functions of a level, made of vector_template.h or, for the scalar level, plain loops.
 */
#ifndef HR_KERNEL_LEVEL_H
#define HR_KERNEL_LEVEL_H

#include <string.h>

#include "kernel/kernel.h"

/* Elements begin .. end of one reduction. dst or copy may be NULL. */
struct hr_span {
    uint8_t *dst;
    uint8_t *copy;
    const void *const *src;
    int src_count;
    enum hr_store copy_store;
    size_t begin;
    size_t end;
    double scale; /* the factor; 1 for integers and bool: kernel.c scales those */
};

extern const struct hr_kernel hr_kernel_scalar;
#if defined(__x86_64__)
extern const struct hr_kernel hr_kernel_avx2;
extern const struct hr_kernel hr_kernel_avx512;
#elif defined(__aarch64__)
extern const struct hr_kernel hr_kernel_neon;
#endif

/* With dtype and op as constants each use becomes straight code: loops are written once, and compiled for each. */
#define HR_INLINE static inline __attribute__((always_inline))

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

/* As vcvtps2ph and FCVTN: to nearest even, overflow to infinity, gradual underflow, NaN quiet, upper payload. */
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
    return dtype == HORO_FLOAT16 ? widen_float16(half) : float_from_bits((uint32_t)half << 16);
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
    case HORO_UINT16: memcpy(&two, at, sizeof two); return (uint16_t)two;
    case HORO_UINT32: memcpy(&four, at, sizeof four); return (uint32_t)four;
    case HORO_UINT64: /* its bits */
    case HORO_INT64: memcpy(&eight, at, sizeof eight); return eight;
    default: return *at;
    }
}

/* Keeps the low bytes: this is where integers wrap. */
HR_INLINE void store_integer(int dtype, uint8_t *at, int64_t value) {
    const int16_t two = (int16_t)value;
    const int32_t four = (int32_t)value;
    switch (dtype) {
    case HORO_INT16:
    case HORO_UINT16: memcpy(at, &two, sizeof two); break;
    case HORO_INT32:
    case HORO_UINT32: memcpy(at, &four, sizeof four); break;
    case HORO_INT64:
    case HORO_UINT64: memcpy(at, &value, sizeof value); break;
    default: *at = (uint8_t)value;
    }
}

HR_INLINE size_t element_bytes(int dtype) {
    switch (dtype) {
    case HORO_INT16:
    case HORO_UINT16:
    case HORO_FLOAT16:
    case HORO_BFLOAT16: return 2;
    case HORO_INT32:
    case HORO_UINT32:
    case HORO_FLOAT32:
    case HORO_COMPLEX32: return 4;
    case HORO_INT64:
    case HORO_UINT64:
    case HORO_FLOAT64:
    case HORO_COMPLEX64: return 8;
    case HORO_COMPLEX128: return 16;
    default: return 1;
    }
}

/* The products of complex numbers, on every level: scalar.c. */
void hr_complex32_product(const struct hr_span *span);
void hr_complex64_product(const struct hr_span *span);
void hr_complex128_product(const struct hr_span *span);

/* NAME_sum, NAME_min, ... for one dtype from `run(dtype, op, span)`, and their row in the table of a level. */
#define HR_DEFINE_OPS(name, dtype)                                                                                     \
    static void name##_sum(const struct hr_span *span) { run(dtype, HORO_SUM, span); }                                 \
    static void name##_min(const struct hr_span *span) { run(dtype, HORO_MIN, span); }                                 \
    static void name##_max(const struct hr_span *span) { run(dtype, HORO_MAX, span); }                                 \
    static void name##_product(const struct hr_span *span) { run(dtype, HORO_PRODUCT, span); }

/* The rest of the rows for bits, and of unsigned integers what is not as of signed ones. */
#define HR_DEFINE_BITS(name, dtype, op) static void name(const struct hr_span *span) { run(dtype, op, span); }
#define HR_DEFINE_ORDER(name, dtype)                                                                                   \
    static void name##_min(const struct hr_span *span) { run(dtype, HORO_MIN, span); }                                 \
    static void name##_max(const struct hr_span *span) { run(dtype, HORO_MAX, span); }

#define HR_DEFINE_ALL_OPS                                                                                              \
    HR_DEFINE_BITS(uint8_and, HORO_UINT8, HORO_BAND)                                                                   \
    HR_DEFINE_BITS(uint8_or, HORO_UINT8, HORO_BOR)                                                                     \
    HR_DEFINE_BITS(uint8_xor, HORO_UINT8, HORO_BXOR)                                                                   \
    HR_DEFINE_BITS(bool_xor, HORO_BOOL, HORO_BXOR)                                                                     \
    HR_DEFINE_ORDER(uint16, HORO_UINT16)                                                                               \
    HR_DEFINE_ORDER(uint32, HORO_UINT32)                                                                               \
    HR_DEFINE_ORDER(uint64, HORO_UINT64)                                                                               \
    HR_DEFINE_OPS(uint8, HORO_UINT8)                                                                                   \
    HR_DEFINE_OPS(int8, HORO_INT8)                                                                                     \
    HR_DEFINE_OPS(int16, HORO_INT16)                                                                                   \
    HR_DEFINE_OPS(int32, HORO_INT32)                                                                                   \
    HR_DEFINE_OPS(int64, HORO_INT64)                                                                                   \
    HR_DEFINE_OPS(float16, HORO_FLOAT16)                                                                               \
    HR_DEFINE_OPS(bfloat16, HORO_BFLOAT16)                                                                             \
    HR_DEFINE_OPS(float32, HORO_FLOAT32)                                                                               \
    HR_DEFINE_OPS(float64, HORO_FLOAT64)                                                                               \
    HR_DEFINE_OPS(bool, HORO_BOOL)

#define HR_OPS(name, ordered)                                                                                          \
    [HORO_SUM] = name##_sum, [HORO_MIN] = ordered##_min, [HORO_MAX] = ordered##_max, [HORO_PRODUCT] = name##_product
#define HR_BIT_OPS(and, or, xor) [HORO_BAND] = and, [HORO_BOR] = or, [HORO_BXOR] = xor
#define HR_PRODUCT_ROW(name) {[HORO_PRODUCT] = hr_##name##_product}

#define HR_ALL_OPS_TABLE                                                                                               \
    {                                                                                                                  \
        [HORO_UINT8] = {HR_OPS(uint8, uint8), HR_BIT_OPS(uint8_and, uint8_or, uint8_xor)},                             \
        [HORO_BOOL] = {HR_OPS(bool, bool), HR_BIT_OPS(bool_min, bool_max, bool_xor)},                                  \
        [HORO_UINT16] = {HR_OPS(int16, uint16)}, [HORO_UINT32] = {HR_OPS(int32, uint32)},                              \
        [HORO_UINT64] = {HR_OPS(int64, uint64)}, [HORO_INT8] = {HR_OPS(int8, int8)},                                   \
        [HORO_INT16] = {HR_OPS(int16, int16)}, [HORO_INT32] = {HR_OPS(int32, int32)},                                  \
        [HORO_INT64] = {HR_OPS(int64, int64)}, [HORO_FLOAT16] = {HR_OPS(float16, float16)},                            \
        [HORO_BFLOAT16] = {HR_OPS(bfloat16, bfloat16)}, [HORO_FLOAT32] = {HR_OPS(float32, float32)},                   \
        [HORO_FLOAT64] = {HR_OPS(float64, float64)},                                                                   \
        [HORO_COMPLEX32] = HR_PRODUCT_ROW(complex32), [HORO_COMPLEX64] = HR_PRODUCT_ROW(complex64),                    \
        [HORO_COMPLEX128] = HR_PRODUCT_ROW(complex128),                                                                \
    }

/* The conversions of a level from `convert(to, from, span)`, and their table. */
#define HR_DEFINE_CONVERSIONS                                                                                          \
    static void narrow_to_float16(const struct hr_span *span) { convert(HORO_FLOAT16, HORO_FLOAT32, span); }           \
    static void narrow_to_bfloat16(const struct hr_span *span) { convert(HORO_BFLOAT16, HORO_FLOAT32, span); }         \
    static void widen_from_float16(const struct hr_span *span) { convert(HORO_FLOAT32, HORO_FLOAT16, span); }          \
    static void widen_from_bfloat16(const struct hr_span *span) { convert(HORO_FLOAT32, HORO_BFLOAT16, span); }

#define HR_CONVERSIONS_TABLE                                                                                           \
    {                                                                                                                  \
        [HORO_FLOAT16] = {[HORO_FLOAT32] = narrow_to_float16},                                                         \
        [HORO_BFLOAT16] = {[HORO_FLOAT32] = narrow_to_bfloat16},                                                       \
        [HORO_FLOAT32] = {[HORO_FLOAT16] = widen_from_float16, [HORO_BFLOAT16] = widen_from_bfloat16},                 \
    }

/* The table of a level. */
#define HR_DEFINE_KERNEL(symbol, level_name)                                                                           \
    const struct hr_kernel symbol = {.name = level_name,                                                               \
                                     .copy = level_copy,                                                               \
                                     .exchange = level_exchange,                                                       \
                                     .reduce = HR_ALL_OPS_TABLE,                                                       \
                                     .convert = HR_CONVERSIONS_TABLE,                                                  \
                                     .dots = HR_DOTS_TABLE,                                                            \
                                     .combine = HR_COMBINE_TABLE};

/* The vector types of a level that has defined VECTOR_BYTES. */
#if defined(VECTOR_BYTES)
#define VECTOR_OF(type) type __attribute__((vector_size(VECTOR_BYTES)))
typedef VECTOR_OF(uint8_t) vector_uint8;
typedef VECTOR_OF(uint16_t) vector_uint16;
typedef VECTOR_OF(uint32_t) vector_uint32;
typedef VECTOR_OF(uint64_t) vector_uint64;
typedef VECTOR_OF(int8_t) vector_int8;
typedef VECTOR_OF(int16_t) vector_int16;
typedef VECTOR_OF(int32_t) vector_int32;
typedef VECTOR_OF(int64_t) vector_int64;
typedef VECTOR_OF(float) vector_float;
typedef VECTOR_OF(double) vector_double;
typedef uint16_t vector_half __attribute__((vector_size(VECTOR_BYTES / 2)));
#endif

#endif
