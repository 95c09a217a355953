/* 128-bit registers of the base architecture. C can name no store past the cache: those are ordinary. */
#if defined(__aarch64__)
#include <arm_neon.h>

#define VECTOR_BYTES 16
#include "kernel/level.h"

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

#include "kernel/vector_template.h"

HR_DEFINE_KERNEL(hr_kernel_neon, "neon")
#endif
