#include "kernel/level.h"

#include <string.h>

#include "base/cut.h"
#include "kernel/element.h"

enum { BLOCK_BYTES = 4096 }; /* stays in the first-level cache between the steps of what takes several */

static enum hr_kernel_op kernel_op(int reduce_op) {
    switch (reduce_op) {
    case HORO_MIN: return HR_KERNEL_MIN;
    case HORO_MAX: return HR_KERNEL_MAX;
    case HORO_PRODUCT: return HR_KERNEL_PRODUCT;
    default: return HR_KERNEL_SUM;
    }
}

HR_INLINE int64_t scale_integer(int dtype, int64_t value, struct hr_scale scale, int64_t low, int64_t high) {
    if (scale.factor == 1.0) {
        /* In 32 bits where they hold the value: a division of 64 takes several times as long on many machines. */
        return dtype == HORO_INT64 ? value / scale.divisor : (int32_t)value / scale.divisor;
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
    case HORO_UINT8:
        scale_type(HORO_UINT8, dst, src, count, scale, 0, UINT8_MAX);
        break;
    case HORO_INT8:
        scale_type(HORO_INT8, dst, src, count, scale, INT8_MIN, INT8_MAX);
        break;
    case HORO_INT16:
        scale_type(HORO_INT16, dst, src, count, scale, INT16_MIN, INT16_MAX);
        break;
    case HORO_INT32:
        scale_type(HORO_INT32, dst, src, count, scale, INT32_MIN, INT32_MAX);
        break;
    default:
        scale_type(HORO_INT64, dst, src, count, scale, INT64_MIN, INT64_MAX);
    }
}

/* Scaling integers is rare and never vectorised by hand: reduce, scale and copy follow each other block by block. */
static void reduce_scaled_integers(const struct hr_level *level, int dtype, enum hr_kernel_op op, struct hr_span span,
                                   struct hr_scale scale) {
    const size_t bytes = hr_dtype_bytes(dtype);
    const size_t count = span.end;
    uint8_t *copy = span.copy;
    span.copy = NULL;
    span.scale = 1.0;
    for (size_t i = 0; i < count; i = span.end) {
        span.begin = i;
        span.end = i + hr_smaller(BLOCK_BYTES / bytes, count - i);
        level->reduce[dtype][op](&span);
        uint8_t *block = span.dst + i * bytes;
        scale_values(dtype, block, block, span.end - i, scale);
        if (copy != NULL) {
            level->copy(copy + i * bytes, block, (span.end - i) * bytes, span.copy_store);
        }
    }
}

void hr_level_reduce(const struct hr_level *level, int dtype, int reduce_op, void *dst, void *copy,
                     const void *const *src, int src_count, size_t count, struct hr_scale scale,
                     enum hr_store copy_store) {
    const struct hr_span span = {
        .dst = dst,
        .copy = copy,
        .src = src,
        .src_count = src_count,
        .copy_store = copy_store,
        .end = count,
        .scale = dtype == HORO_BOOL ? 1.0 : scale.factor,
    };
    if (hr_dtype_is_integer(dtype) && hr_scale_changes(scale)) {
        reduce_scaled_integers(level, dtype, kernel_op(reduce_op), span, scale);
    } else {
        level->reduce[dtype][kernel_op(reduce_op)](&span);
    }
}

static void scale_integers(const struct hr_level *level, int dtype, uint8_t *dst, const uint8_t *src, size_t count,
                           struct hr_scale scale, enum hr_store store) {
    if (store == HR_STORE_ORDINARY) {
        scale_values(dtype, dst, src, count, scale);
        return;
    }
    const size_t bytes = hr_dtype_bytes(dtype);
    uint8_t block[BLOCK_BYTES];
    size_t step;
    for (size_t i = 0; i < count; i += step) {
        step = hr_smaller(BLOCK_BYTES / bytes, count - i);
        scale_values(dtype, block, src + i * bytes, step, scale);
        level->copy(dst + i * bytes, block, step * bytes, store);
    }
}

void hr_level_scale(const struct hr_level *level, int dtype, void *dst, const void *src, size_t count,
                    struct hr_scale scale, enum hr_store store) {
    if (!hr_scale_changes(scale) || dtype == HORO_BOOL) {
        if (dst != src && count > 0) {
            level->copy(dst, src, count * hr_dtype_bytes(dtype), store);
        }
    } else if (hr_dtype_is_integer(dtype)) {
        scale_integers(level, dtype, dst, src, count, scale, store);
    } else {
        /* A reduction of one source. The result goes where the store policy applies. */
        const int part = hr_dtype_real(dtype);
        const struct hr_span span = {.copy = dst,
                                     .src = &src,
                                     .src_count = 1,
                                     .copy_store = store,
                                     .end = part == dtype ? count : 2 * count,
                                     .scale = scale.factor};
        level->reduce[part][HR_KERNEL_SUM](&span);
    }
}

/* float64 goes through float32, block by block. */
static void narrow_doubles(const struct hr_level *level, int dst_dtype, uint8_t *dst, const uint8_t *src, size_t count,
                           double scale, enum hr_store store) {
    float block[BLOCK_BYTES / sizeof(float)];
    const void *const source = block;
    size_t step;
    for (size_t i = 0; i < count; i += step) {
        step = hr_smaller(BLOCK_BYTES / sizeof *block, count - i);
        for (size_t j = 0; j < step; j++) {
            block[j] = (float)(load_double(src + (i + j) * sizeof(double)) * scale);
        }
        const struct hr_span span = {.copy = dst + i * element_bytes(dst_dtype),
                                     .src = &source,
                                     .src_count = 1,
                                     .copy_store = store,
                                     .end = step,
                                     .scale = 1.0};
        level->convert[dst_dtype][HORO_FLOAT32](&span);
    }
}

static void widen_to_doubles(const struct hr_level *level, uint8_t *dst, int src_dtype, const uint8_t *src,
                             size_t count, double scale, enum hr_store store) {
    float block[BLOCK_BYTES / sizeof(double)];
    double wide[BLOCK_BYTES / sizeof(double)];
    size_t step;
    for (size_t i = 0; i < count; i += step) {
        step = hr_smaller(BLOCK_BYTES / sizeof *wide, count - i);
        const void *const source = src + i * element_bytes(src_dtype);
        const struct hr_span span = {
            .copy = (uint8_t *)block, .src = &source, .src_count = 1, .end = step, .scale = 1.0};
        level->convert[HORO_FLOAT32][src_dtype](&span);
        for (size_t j = 0; j < step; j++) {
            wide[j] = (double)block[j] * scale;
        }
        level->copy(dst + i * sizeof *wide, wide, step * sizeof *wide, store);
    }
}

void hr_level_convert(const struct hr_level *level, int dst_dtype, void *dst, int src_dtype, const void *src,
                      size_t count, double scale, enum hr_store store) {
    if (src_dtype == HORO_FLOAT64) {
        narrow_doubles(level, dst_dtype, dst, src, count, scale, store);
    } else if (dst_dtype == HORO_FLOAT64) {
        widen_to_doubles(level, dst, src_dtype, src, count, scale, store);
    } else {
        const struct hr_span span = {
            .copy = dst, .src = &src, .src_count = 1, .copy_store = store, .end = count, .scale = scale};
        level->convert[dst_dtype][src_dtype](&span);
    }
}

static void widen_block(const struct hr_level *level, int dtype, const uint8_t *src, size_t count, float *block) {
    const void *const source = src;
    const struct hr_span span = {.copy = (uint8_t *)block, .src = &source, .src_count = 1, .end = count, .scale = 1.0};
    level->convert[HORO_FLOAT32][dtype](&span);
}

void hr_level_dots(const struct hr_level *level, int dtype, const void *a, const void *b, size_t count, double *sums) {
    if (element_bytes(dtype) > 2) {
        level->dots[dtype](a, b, count, sums);
        return;
    }
    float x[BLOCK_BYTES / sizeof(float)];
    float y[BLOCK_BYTES / sizeof(float)];
    size_t step;
    for (size_t i = 0; i < count; i += step) {
        step = hr_smaller(BLOCK_BYTES / sizeof *x, count - i);
        widen_block(level, dtype, (const uint8_t *)a + i * element_bytes(dtype), step, x);
        widen_block(level, dtype, (const uint8_t *)b + i * element_bytes(dtype), step, y);
        level->dots[HORO_FLOAT32]((const uint8_t *)x, (const uint8_t *)y, step, sums);
    }
}

void hr_level_combine(const struct hr_level *level, int dtype, void *a, const void *b, size_t count, double a_factor,
                      double b_factor) {
    if (element_bytes(dtype) > 2) {
        level->combine[dtype](a, b, count, a_factor, b_factor);
        return;
    }
    float x[BLOCK_BYTES / sizeof(float)];
    float y[BLOCK_BYTES / sizeof(float)];
    const void *const narrowed = x;
    size_t step;
    for (size_t i = 0; i < count; i += step) {
        step = hr_smaller(BLOCK_BYTES / sizeof *x, count - i);
        uint8_t *at = (uint8_t *)a + i * element_bytes(dtype);
        widen_block(level, dtype, at, step, x);
        widen_block(level, dtype, (const uint8_t *)b + i * element_bytes(dtype), step, y);
        level->combine[HORO_FLOAT32]((uint8_t *)x, (const uint8_t *)y, step, a_factor, b_factor);
        const struct hr_span span = {.copy = at, .src = &narrowed, .src_count = 1, .end = step, .scale = 1.0};
        level->convert[dtype][HORO_FLOAT32](&span);
    }
}
