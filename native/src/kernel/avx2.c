/* 256-bit registers; needs AVX2 and F16C, which kernel.c has checked. */
#if defined(__x86_64__)
#include <immintrin.h>

#define VECTOR_BYTES 32
#include "kernel/level.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

HR_INLINE vector_float widen_float16_lanes(vector_half half) {
    return (vector_float)_mm256_cvtph_ps((__m128i)half);
}

HR_INLINE vector_half narrow_float16_lanes(vector_float value) {
    return (vector_half)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

HR_INLINE vector_uint32 widen_lanes(vector_half half) {
    return (vector_uint32)_mm256_cvtepu16_epi32((__m128i)half);
}

HR_INLINE vector_uint32 pick_nan(vector_float value, vector_uint32 nan, vector_uint32 other) {
    const __m256 is_nan = _mm256_cmp_ps((__m256)value, (__m256)value, _CMP_UNORD_Q);
    return (vector_uint32)_mm256_blendv_ps((__m256)other, (__m256)nan, is_nan);
}

HR_INLINE vector_uint8 upper_halves(vector_uint32 a, vector_uint32 b) {
    /* within each half of the register */
    const __m256i mixed = _mm256_packus_epi32((__m256i)(a >> 16), (__m256i)(b >> 16));
    return (vector_uint8)_mm256_permute4x64_epi64(mixed, 0xd8);
}

HR_INLINE void stream_vector(uint8_t *at, vector_uint8 value) {
    _mm256_stream_si256((__m256i *)at, (__m256i)value);
}

HR_INLINE void stream_half(uint8_t *at, vector_half value) {
    _mm_stream_si128((__m128i *)at, (__m128i)value);
}

HR_INLINE void stream_fence(void) {
    _mm_sfence();
}

#include "kernel/vector_template.h"

HR_DEFINE_KERNEL(hr_kernel_avx2, "avx2")

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
