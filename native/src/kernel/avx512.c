/* 512-bit registers; needs AVX-512 F, BW, DQ and VL, which kernel.c has checked. */
#if defined(__x86_64__)
#include <immintrin.h>

#define VECTOR_BYTES 64
#include "kernel/level.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl"))),                  \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif

HR_INLINE vector_float widen_float16_lanes(vector_half half) {
    return (vector_float)_mm512_cvtph_ps((__m256i)half);
}

HR_INLINE vector_half narrow_float16_lanes(vector_float value) {
    return (vector_half)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

HR_INLINE vector_uint32 widen_lanes(vector_half half) {
    return (vector_uint32)_mm512_cvtepu16_epi32((__m256i)half);
}

HR_INLINE vector_uint32 pick_nan(vector_float value, vector_uint32 nan, vector_uint32 other) {
    const __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)value, (__m512)value, _CMP_UNORD_Q);
    return (vector_uint32)_mm512_mask_mov_epi32((__m512i)other, is_nan, (__m512i)nan);
}

HR_INLINE vector_uint8 upper_halves(vector_uint32 a, vector_uint32 b) {
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                         23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return (vector_uint8)_mm512_permutex2var_epi16((__m512i)a, odd, (__m512i)b);
}

HR_INLINE void stream_vector(uint8_t *at, vector_uint8 value) {
    _mm512_stream_si512((__m512i *)at, (__m512i)value);
}

HR_INLINE void stream_half(uint8_t *at, vector_half value) {
    _mm256_stream_si256((__m256i *)at, (__m256i)value);
}

HR_INLINE void stream_fence(void) {
    _mm_sfence();
}

#include "kernel/vector_template.h"

HR_DEFINE_KERNEL(hr_kernel_avx512, "avx512")

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
