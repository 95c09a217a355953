/* The level that is always there, the tail of all others, the definition of all results: plain loops, in order. */
#include "kernel/level.h"

/* A macro, since float and double want the same text. NaN wins, from either side; of equal values the earlier. */
#define REDUCE_FLOAT(op, a, b)                                                                                         \
    ((op) == HORO_SUM       ? (a) + (b)                                                                                \
     : (op) == HORO_PRODUCT ? (a) * (b)                                                                                \
     : (op) == HORO_MIN     ? ((b) < (a) || (b) != (b) ? (b) : (a))                                                    \
                                 : ((b) > (a) || (b) != (b) ? (b) : (a)))

/* Of one source `to` may be another dtype than `from`. */
HR_INLINE void run_float(int to, int from, int op, const struct hr_span *span, int src_count) {
    for (size_t i = span->begin; i < span->end; i++) {
        const size_t at = i * element_bytes(from);
        float value = load_float(from, (const uint8_t *)span->src[0] + at);
        for (int s = 1; s < src_count; s++) {
            const float next = load_float(from, (const uint8_t *)span->src[s] + at);
            value = REDUCE_FLOAT(op, value, next);
        }
        if (span->scale != 1.0) {
            value *= (float)span->scale;
        }
        if (span->dst != NULL) {
            store_float(to, span->dst + i * element_bytes(to), value);
        }
        if (span->copy != NULL) {
            store_float(to, span->copy + i * element_bytes(to), value);
        }
    }
}

HR_INLINE void run_double(int op, const struct hr_span *span, int src_count) {
    for (size_t i = span->begin; i < span->end; i++) {
        double value = load_double((const uint8_t *)span->src[0] + i * sizeof value);
        for (int s = 1; s < src_count; s++) {
            const double next = load_double((const uint8_t *)span->src[s] + i * sizeof next);
            value = REDUCE_FLOAT(op, value, next);
        }
        if (span->scale != 1.0) {
            value *= span->scale;
        }
        if (span->dst != NULL) {
            memcpy(span->dst + i * sizeof value, &value, sizeof value);
        }
        if (span->copy != NULL) {
            memcpy(span->copy + i * sizeof value, &value, sizeof value);
        }
    }
}

/* Multiplies the complex number (real, imaginary) by (x, y). */
#define MULTIPLY_COMPLEX(type, real, imaginary, x, y)                                                                  \
    do {                                                                                                               \
        const type product = (real) * (x) - (imaginary) * (y);                                                         \
        (imaginary) = (real) * (y) + (imaginary) * (x);                                                                \
        (real) = product;                                                                                              \
    } while (0)

/* `part` is float16 or float32. */
HR_INLINE void multiply_floats(int part, const struct hr_span *span) {
    const size_t bytes = element_bytes(part);
    const float scale = (float)span->scale;
    for (size_t i = 2 * span->begin; i < 2 * span->end; i += 2) {
        float real = load_float(part, (const uint8_t *)span->src[0] + i * bytes);
        float imaginary = load_float(part, (const uint8_t *)span->src[0] + (i + 1) * bytes);
        for (int s = 1; s < span->src_count; s++) {
            const float x = load_float(part, (const uint8_t *)span->src[s] + i * bytes);
            const float y = load_float(part, (const uint8_t *)span->src[s] + (i + 1) * bytes);
            MULTIPLY_COMPLEX(float, real, imaginary, x, y);
        }
        if (span->scale != 1.0) {
            real *= scale;
            imaginary *= scale;
        }
        if (span->dst != NULL) {
            store_float(part, span->dst + i * bytes, real);
            store_float(part, span->dst + (i + 1) * bytes, imaginary);
        }
        if (span->copy != NULL) {
            store_float(part, span->copy + i * bytes, real);
            store_float(part, span->copy + (i + 1) * bytes, imaginary);
        }
    }
}

void hr_complex32_product(const struct hr_span *span) {
    multiply_floats(HORO_FLOAT16, span);
}

void hr_complex64_product(const struct hr_span *span) {
    multiply_floats(HORO_FLOAT32, span);
}

void hr_complex128_product(const struct hr_span *span) {
    double value[2];
    double next[2];
    const size_t bytes = sizeof value;
    for (size_t i = span->begin; i < span->end; i++) {
        memcpy(value, (const uint8_t *)span->src[0] + i * bytes, bytes);
        for (int s = 1; s < span->src_count; s++) {
            memcpy(next, (const uint8_t *)span->src[s] + i * bytes, bytes);
            MULTIPLY_COMPLEX(double, value[0], value[1], next[0], next[1]);
        }
        if (span->scale != 1.0) {
            value[0] *= span->scale;
            value[1] *= span->scale;
        }
        if (span->dst != NULL) {
            memcpy(span->dst + i * bytes, value, bytes);
        }
        if (span->copy != NULL) {
            memcpy(span->copy + i * bytes, value, bytes);
        }
    }
}

/* Modulo 2^64 and cut on storing is modulo the type's own range; the values of all but uint64 fit int64. */
HR_INLINE int64_t reduce_integer(int dtype, int op, int64_t a, int64_t b) {
    if (dtype == HORO_BOOL && op != HORO_BXOR) {
        return op == HORO_SUM || op == HORO_MAX ? a | b : a & b;
    }
    const int is_less = dtype == HORO_UINT64 ? (uint64_t)b < (uint64_t)a : b < a;
    switch (op) {
    case HORO_BAND: return a & b;
    case HORO_BOR: return a | b;
    case HORO_BXOR: return a ^ b;
    case HORO_SUM: return (int64_t)((uint64_t)a + (uint64_t)b);
    case HORO_PRODUCT: return (int64_t)((uint64_t)a * (uint64_t)b);
    case HORO_MIN: return is_less ? b : a;
    default: return is_less ? a : b;
    }
}

HR_INLINE void run_integer(int dtype, int op, const struct hr_span *span, int src_count) {
    const size_t bytes = element_bytes(dtype);
    for (size_t i = span->begin; i < span->end; i++) {
        int64_t value = load_integer(dtype, (const uint8_t *)span->src[0] + i * bytes);
        for (int s = 1; s < src_count; s++) {
            const int64_t next = load_integer(dtype, (const uint8_t *)span->src[s] + i * bytes);
            value = reduce_integer(dtype, op, value, next);
        }
        if (span->dst != NULL) {
            store_integer(dtype, span->dst + i * bytes, value);
        }
        if (span->copy != NULL) {
            store_integer(dtype, span->copy + i * bytes, value);
        }
    }
}

HR_INLINE void run(int dtype, int op, const struct hr_span *span) {
    switch (dtype) {
    case HORO_FLOAT16:
    case HORO_BFLOAT16:
    case HORO_FLOAT32: run_float(dtype, dtype, op, span, span->src_count); break;
    case HORO_FLOAT64: run_double(op, span, span->src_count); break;
    default: run_integer(dtype, op, span, span->src_count);
    }
}

HR_INLINE void convert(int to, int from, const struct hr_span *span) {
    run_float(to, from, HORO_SUM, span, 1);
}

HR_DEFINE_ALL_OPS
HR_DEFINE_CONVERSIONS

/* Nothing is stored past the cache: a machine without vectors gains nothing by that. */
static void level_copy(void *dst, const void *src, size_t bytes, enum hr_store store) {
    (void)store;
    memcpy(dst, src, bytes);
}

enum { EXCHANGE_BYTES = 256 }; /* a few lines at a time: what has been read is still at hand when it is written */

static void level_exchange(void *out, void *slot, const void *in, size_t bytes, enum hr_store slot_store) {
    for (size_t at = 0; at < bytes; at += EXCHANGE_BYTES) {
        const size_t part = bytes - at < EXCHANGE_BYTES ? bytes - at : EXCHANGE_BYTES;
        memcpy((uint8_t *)out + at, (uint8_t *)slot + at, part);
        level_copy((uint8_t *)slot + at, (const uint8_t *)in + at, part, slot_store);
    }
}

#include "kernel/pair_template.h"

HR_DEFINE_KERNEL(hr_kernel_scalar, "scalar")
