/* 512-bit registers; needs AVX-512 F, BW, DQ and VL, which kernel.c has checked. */
#include "kernel/level.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "kernel/element.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl"))),                  \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif

#define VECTOR_BYTES 64
#include "kernel/vector_types.h"

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

HR_INLINE vector_float real_floats(vector_float a) {
    return (vector_float)_mm512_moveldup_ps((__m512)a);
}

HR_INLINE vector_float imaginary_floats(vector_float a) {
    return (vector_float)_mm512_movehdup_ps((__m512)a);
}

HR_INLINE vector_float turned_floats(vector_float a) {
    return (vector_float)_mm512_permute_ps((__m512)a, 0xb1);
}

HR_INLINE vector_float subtract_and_add_floats(vector_float a, vector_float b) {
    return (vector_float)_mm512_mask_sub_ps((__m512)(a + b), 0x5555, (__m512)a, (__m512)b);
}

HR_INLINE vector_double real_doubles(vector_double a) {
    return (vector_double)_mm512_movedup_pd((__m512d)a);
}

HR_INLINE vector_double imaginary_doubles(vector_double a) {
    return (vector_double)_mm512_permute_pd((__m512d)a, 0xff);
}

HR_INLINE vector_double turned_doubles(vector_double a) {
    return (vector_double)_mm512_permute_pd((__m512d)a, 0x55);
}

HR_INLINE vector_double subtract_and_add_doubles(vector_double a, vector_double b) {
    return (vector_double)_mm512_mask_sub_pd((__m512d)(a + b), 0x55, (__m512d)a, (__m512d)b);
}

#include "kernel/vector_template.h"

HR_DEFINE_KERNEL(hr_kernel_avx512, "avx512", level)

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
