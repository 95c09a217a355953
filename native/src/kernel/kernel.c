#include "kernel/kernel.h"

#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "base/cut.h"
#include "kernel/level.h"

/* ---- The levels ---- */

const struct hr_kernel *hr_kernel_find(const char *name) {
#if defined(__x86_64__)
    /* Not every compiler's __builtin_cpu_supports knows "f16c". That of avx2 has checked the operating system. */
    unsigned a, b, c = 0, d;
    const int has_f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
    const int has_avx2 = __builtin_cpu_supports("avx2") && has_f16c;
    const int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if ((name == NULL || strcmp(name, "avx512") == 0) && has_avx512) {
        return &hr_kernel_avx512;
    }
    if ((name == NULL || strcmp(name, "avx2") == 0) && has_avx2) {
        return &hr_kernel_avx2;
    }
#elif defined(__aarch64__)
    if (name == NULL || strcmp(name, "neon") == 0) {
        return &hr_kernel_neon; /* part of the base architecture */
    }
#endif
    return name == NULL || strcmp(name, "scalar") == 0 ? &hr_kernel_scalar : NULL;
}

HORO_API const char *horo_simd_name(void) {
    return hr_kernel_find(NULL)->name;
}

/* ---- Arithmetic ---- */

enum { BLOCK_BYTES = 4096 }; /* stays in the first-level cache between the steps of what takes several */

/* The value of an uint64 is in the bits of an int64. */
HR_INLINE int64_t scale_integer(int dtype, int64_t value, struct hr_scale scale, int64_t low, int64_t high) {
    if (dtype == HORO_UINT64 && scale.factor == 1.0) {
        return (int64_t)((uint64_t)value / (uint64_t)scale.divisor);
    }
    if (dtype == HORO_UINT64) {
        const double result = (double)(uint64_t)value * scale.factor / scale.divisor;
        return result >= 0x1p64 ? -1 : result > 0 ? (int64_t)(uint64_t)result : 0;
    }
    if (scale.factor == 1.0) {
        /* In 32 bits where they hold the value: a division of 64 takes several times as long on many machines. */
        return dtype == HORO_INT64 || dtype == HORO_UINT32 ? value / scale.divisor : (int32_t)value / scale.divisor;
    }
    const double result = (double)value * scale.factor / scale.divisor;
    if (result >= (double)high) { /* INT64_MAX rounds up to 2^63, the first double that does not fit */
        return high;
    }
    if (result <= (double)low) {
        return low;
    }
    return result == result ? (int64_t)result : 0;
}

HR_INLINE void scale_type(int dtype, uint8_t *dst, const uint8_t *src, size_t count, struct hr_scale scale, int64_t low,
                          int64_t high) {
    const size_t bytes = element_bytes(dtype);
    for (size_t i = 0; i < count; i++) {
        const int64_t value = load_integer(dtype, src + i * bytes);
        store_integer(dtype, dst + i * bytes, scale_integer(dtype, value, scale, low, high));
    }
}

static void scale_values(int dtype, void *dst, const void *src, size_t count, struct hr_scale scale) {
    switch (dtype) {
    case HORO_UINT8: scale_type(HORO_UINT8, dst, src, count, scale, 0, UINT8_MAX); break;
    case HORO_INT8: scale_type(HORO_INT8, dst, src, count, scale, INT8_MIN, INT8_MAX); break;
    case HORO_INT16: scale_type(HORO_INT16, dst, src, count, scale, INT16_MIN, INT16_MAX); break;
    case HORO_INT32: scale_type(HORO_INT32, dst, src, count, scale, INT32_MIN, INT32_MAX); break;
    case HORO_UINT16: scale_type(HORO_UINT16, dst, src, count, scale, 0, UINT16_MAX); break;
    case HORO_UINT32: scale_type(HORO_UINT32, dst, src, count, scale, 0, UINT32_MAX); break;
    case HORO_UINT64: scale_type(HORO_UINT64, dst, src, count, scale, 0, 0); break;
    default: scale_type(HORO_INT64, dst, src, count, scale, INT64_MIN, INT64_MAX);
    }
}

void hr_kernel_reduce(const struct hr_kernel *kernel, int dtype, int reduce_op, void *dst, void *copy,
                     const void *const *src, int src_count, size_t count, struct hr_scale scale,
                     enum hr_store copy_store) {
    if (reduce_op >= HORO_BAND && dtype != HORO_BOOL) { /* bits have no order: bytes will do */
        count *= hr_dtype_bytes(dtype);
        dtype = HORO_UINT8;
    }
    struct hr_span span = {
        .dst = dst,
        .copy = copy,
        .src = src,
        .src_count = src_count,
        .copy_store = copy_store,
        .end = count,
        .scale = dtype == HORO_BOOL ? 1.0 : scale.factor,
    };
    if (!hr_dtype_is_integer(dtype) || !hr_scale_changes(scale)) {
        kernel->reduce[dtype][reduce_op](&span);
        return;
    }
    /* Scaling integers is rare and not vectorised by hand: reduce, scale and copy follow each other block by block. */
    const size_t bytes = hr_dtype_bytes(dtype);
    span.copy = NULL;
    span.scale = 1.0;
    for (; span.begin < count; span.begin = span.end) {
        span.end = span.begin + hr_smaller(BLOCK_BYTES / bytes, count - span.begin);
        kernel->reduce[dtype][reduce_op](&span);
        uint8_t *block = span.dst + span.begin * bytes;
        scale_values(dtype, block, block, span.end - span.begin, scale);
        if (copy != NULL) {
            kernel->copy((uint8_t *)copy + span.begin * bytes, block, (span.end - span.begin) * bytes, copy_store);
        }
    }
}

void hr_kernel_scale(const struct hr_kernel *kernel, int dtype, void *dst, const void *src, size_t count,
                    struct hr_scale scale, enum hr_store store) {
    if (!hr_scale_changes(scale) || dtype == HORO_BOOL) {
        if (dst != src && count > 0) {
            kernel->copy(dst, src, count * hr_dtype_bytes(dtype), store);
        }
    } else if (hr_dtype_is_integer(dtype)) {
        scale_values(dtype, dst, src, count, scale); /* too rare to be stored past the cache */
    } else {
        /* A reduction of one source. The result goes where the store policy applies. */
        const int part = hr_dtype_real(dtype);
        const size_t end = part == dtype ? count : 2 * count;
        const struct hr_span span = {
            .copy = dst, .src = &src, .src_count = 1, .copy_store = store, .end = end, .scale = scale.factor};
        kernel->reduce[part][HORO_SUM](&span);
    }
}

void hr_kernel_convert(const struct hr_kernel *kernel, int dst_dtype, void *dst, int src_dtype, const void *src,
                      size_t count, double scale, enum hr_store store) {
    if (src_dtype != HORO_FLOAT64 && dst_dtype != HORO_FLOAT64) {
        const struct hr_span span = {
            .copy = dst, .src = &src, .src_count = 1, .copy_store = store, .end = count, .scale = scale};
        kernel->convert[dst_dtype][src_dtype](&span);
        return;
    }
    /* float64 goes through float32, block by block. */
    float block[BLOCK_BYTES / sizeof(float)];
    double wide[BLOCK_BYTES / sizeof(float)];
    size_t step;
    for (size_t i = 0; i < count; i += step) {
        const uint8_t *from = (const uint8_t *)src + i * element_bytes(src_dtype);
        uint8_t *to = (uint8_t *)dst + i * element_bytes(dst_dtype);
        step = hr_smaller(BLOCK_BYTES / sizeof *block, count - i);
        if (src_dtype == HORO_FLOAT64) {
            for (size_t j = 0; j < step; j++) {
                block[j] = (float)(load_double(from + j * sizeof(double)) * scale);
            }
            hr_kernel_convert(kernel, dst_dtype, to, HORO_FLOAT32, block, step, 1.0, store);
        } else {
            hr_kernel_convert(kernel, HORO_FLOAT32, block, src_dtype, from, step, 1.0, HR_STORE_ORDINARY);
            for (size_t j = 0; j < step; j++) {
                wide[j] = (double)block[j] * scale;
            }
            kernel->copy(to, wide, step * sizeof *wide, store);
        }
    }
}

void hr_kernel_dots(const struct hr_kernel *kernel, int dtype, const void *a, const void *b, size_t count,
                    double *sums) {
    if (element_bytes(dtype) > 2) {
        kernel->dots[dtype](a, b, count, sums);
        return;
    }
    float x[BLOCK_BYTES / sizeof(float)];
    float y[BLOCK_BYTES / sizeof(float)];
    size_t step;
    for (size_t i = 0; i < count; i += step) {
        step = hr_smaller(BLOCK_BYTES / sizeof *x, count - i);
        const size_t at = i * element_bytes(dtype);
        hr_kernel_convert(kernel, HORO_FLOAT32, x, dtype, (const char *)a + at, step, 1.0, HR_STORE_ORDINARY);
        hr_kernel_convert(kernel, HORO_FLOAT32, y, dtype, (const char *)b + at, step, 1.0, HR_STORE_ORDINARY);
        kernel->dots[HORO_FLOAT32]((const uint8_t *)x, (const uint8_t *)y, step, sums);
    }
}

void hr_kernel_combine(const struct hr_kernel *kernel, int dtype, void *a, const void *b, size_t count, double a_factor,
                      double b_factor) {
    if (element_bytes(dtype) > 2) {
        kernel->combine[dtype](a, b, count, a_factor, b_factor);
        return;
    }
    float x[BLOCK_BYTES / sizeof(float)];
    float y[BLOCK_BYTES / sizeof(float)];
    size_t step;
    for (size_t i = 0; i < count; i += step) {
        step = hr_smaller(BLOCK_BYTES / sizeof *x, count - i);
        const size_t at = i * element_bytes(dtype);
        hr_kernel_convert(kernel, HORO_FLOAT32, x, dtype, (char *)a + at, step, 1.0, HR_STORE_ORDINARY);
        hr_kernel_convert(kernel, HORO_FLOAT32, y, dtype, (const char *)b + at, step, 1.0, HR_STORE_ORDINARY);
        kernel->combine[HORO_FLOAT32]((uint8_t *)x, (const uint8_t *)y, step, a_factor, b_factor);
        hr_kernel_convert(kernel, dtype, (char *)a + at, HORO_FLOAT32, x, step, 1.0, HR_STORE_ORDINARY);
    }
}

/* ---- The form of values while they travel ---- */

#define PLAIN(of, bytes) [of] = {of, of, 1, bytes, bytes}

static const struct hr_codec plain[HR_REDUCED_DTYPE_COUNT] = {
    PLAIN(HORO_UINT8, 1),   PLAIN(HORO_INT8, 1),    PLAIN(HORO_INT16, 2),    PLAIN(HORO_INT32, 4),
    PLAIN(HORO_INT64, 8),   PLAIN(HORO_FLOAT16, 2), PLAIN(HORO_BFLOAT16, 2), PLAIN(HORO_FLOAT32, 4),
    PLAIN(HORO_FLOAT64, 8), PLAIN(HORO_BOOL, 1),
    PLAIN(HORO_UINT16, 2), PLAIN(HORO_UINT32, 4), PLAIN(HORO_UINT64, 8),
    PLAIN(HORO_COMPLEX32, 4), PLAIN(HORO_COMPLEX64, 8), PLAIN(HORO_COMPLEX128, 16), /* to be multiplied */
};

static const struct hr_codec narrowing[2][2] = {
    {{HORO_FLOAT32, HORO_FLOAT16, 0, 4, 2}, {HORO_FLOAT32, HORO_BFLOAT16, 0, 4, 2}},
    {{HORO_FLOAT64, HORO_FLOAT16, 0, 8, 2}, {HORO_FLOAT64, HORO_BFLOAT16, 0, 8, 2}},
};

const struct hr_codec *hr_codec_find(int dtype, int wire_dtype) {
    if (wire_dtype == 0) {
        const int has_one = dtype >= 0 && dtype < HR_REDUCED_DTYPE_COUNT && plain[dtype].wire_bytes > 0;
        return has_one ? &plain[dtype] : NULL;
    }
    return hr_dtype_narrows(dtype, wire_dtype) ? &narrowing[dtype == HORO_FLOAT64][wire_dtype == HORO_BFLOAT16] : NULL;
}

void hr_codec_pack(const struct hr_codec *codec, const struct hr_kernel *kernel, void *wire, const void *input,
                   size_t count, double factor, enum hr_store store) {
    if (!codec->is_plain) {
        hr_kernel_convert(kernel, codec->wire_dtype, wire, codec->dtype, input, count, factor, store);
    } else {
        hr_kernel_scale(kernel, codec->dtype, wire, input, count, hr_scale_by(factor), store);
    }
}

void hr_codec_unpack(const struct hr_codec *codec, const struct hr_kernel *kernel, void *output, const void *wire,
                     size_t count, enum hr_store store) {
    if (codec->is_plain) {
        kernel->copy(output, wire, count * codec->element_bytes, store);
    } else {
        hr_kernel_convert(kernel, codec->dtype, output, codec->wire_dtype, wire, count, 1.0, store);
    }
}
