/*
 * 128-bit registers of the base architecture. It has no store past the cache that C can name: streaming stores are
 * ordinary.
 */
#include "kernel/level.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <string.h>

#include "kernel/element.h"

#define VECTOR_BYTES 16
#include "kernel/vector_types.h"

HR_INLINE vector_float widen_float16_lanes(vector_half half) {
    return (vector_float)vcvt_f32_f16((float16x4_t)half);
}

HR_INLINE vector_half narrow_float16_lanes(vector_float value) {
    return (vector_half)vcvt_f16_f32((float32x4_t)value);
}

HR_INLINE vector_uint32 widen_lanes(vector_half half) {
    return (vector_uint32)vmovl_u16((uint16x4_t)half);
}

HR_INLINE vector_uint32 pick_nan(vector_float value, vector_uint32 nan, vector_uint32 other) {
    const uint32x4_t is_number = vceqq_f32((float32x4_t)value, (float32x4_t)value);
    return (vector_uint32)vbslq_u32(is_number, (uint32x4_t)other, (uint32x4_t)nan);
}

HR_INLINE vector_uint8 upper_halves(vector_uint32 a, vector_uint32 b) {
    return (vector_uint8)vuzp2q_u16((uint16x8_t)a, (uint16x8_t)b);
}

HR_INLINE void stream_vector(uint8_t *at, vector_uint8 value) {
    memcpy(at, &value, sizeof value);
}

HR_INLINE void stream_half(uint8_t *at, vector_half value) {
    memcpy(at, &value, sizeof value);
}

HR_INLINE void stream_fence(void) {
}

HR_INLINE vector_float real_floats(vector_float a) {
    return (vector_float)vtrn1q_f32((float32x4_t)a, (float32x4_t)a);
}

HR_INLINE vector_float imaginary_floats(vector_float a) {
    return (vector_float)vtrn2q_f32((float32x4_t)a, (float32x4_t)a);
}

HR_INLINE vector_float turned_floats(vector_float a) {
    return (vector_float)vrev64q_f32((float32x4_t)a);
}

HR_INLINE vector_float subtract_and_add_floats(vector_float a, vector_float b) {
    const uint32x4_t is_real = {UINT32_MAX, 0, UINT32_MAX, 0};
    return (vector_float)vbslq_f32(is_real, (float32x4_t)(a - b), (float32x4_t)(a + b));
}

HR_INLINE vector_double real_doubles(vector_double a) {
    return (vector_double)vtrn1q_f64((float64x2_t)a, (float64x2_t)a);
}

HR_INLINE vector_double imaginary_doubles(vector_double a) {
    return (vector_double)vtrn2q_f64((float64x2_t)a, (float64x2_t)a);
}

HR_INLINE vector_double turned_doubles(vector_double a) {
    return (vector_double)vextq_f64((float64x2_t)a, (float64x2_t)a, 1);
}

HR_INLINE vector_double subtract_and_add_doubles(vector_double a, vector_double b) {
    const uint64x2_t is_real = {UINT64_MAX, 0};
    return (vector_double)vbslq_f64(is_real, (float64x2_t)(a - b), (float64x2_t)(a + b));
}

#include "kernel/vector_template.h"

HR_DEFINE_KERNEL(hr_kernel_neon, "neon", level)
#endif
