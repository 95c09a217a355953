/*
 * Inside of the kernels: one level = one table of range functions, made of vector_template.h (or, for the scalar level,
 * of plain loops), and the driver in level.c that all levels share.
 */
#ifndef HR_KERNEL_LEVEL_H
#define HR_KERNEL_LEVEL_H

#include "kernel/kernel.h"

enum hr_kernel_op {
    HR_KERNEL_SUM = 0,
    HR_KERNEL_MIN = 1,
    HR_KERNEL_MAX = 2,
    HR_KERNEL_PRODUCT = 3,
    HR_KERNEL_OP_COUNT = 4,
};

/* Elements begin .. end of one reduction. dst or copy may be NULL. */
struct hr_span {
    uint8_t *dst;
    uint8_t *copy;
    const void *const *src;
    int src_count;
    enum hr_store copy_store;
    size_t begin;
    size_t end;
    double scale; /* the factor; 1 for integers and bool: level.c scales those */
};

struct hr_level {
    /* Of complex numbers the product only. */
    void (*reduce[HR_REDUCED_DTYPE_COUNT][HR_KERNEL_OP_COUNT])(const struct hr_span *span);
    /* [to][from]: the one source of the span into its copy; between float32 and 16-bit floats only. */
    void (*convert[HORO_DTYPE_COUNT][HORO_DTYPE_COUNT])(const struct hr_span *span);
    void (*copy)(void *dst, const void *src, size_t bytes, enum hr_store store);
    /* Of float32 and float64 only; made of pair_template.h. */
    void (*dots[HORO_DTYPE_COUNT])(const uint8_t *a, const uint8_t *b, size_t count, double *sums);
    void (*combine[HORO_DTYPE_COUNT])(uint8_t *a, const uint8_t *b, size_t count, double a_factor, double b_factor);
};

extern const struct hr_level hr_level_scalar;

/* The kernels that are the same on every level; struct hr_kernel has the contracts. */
void hr_level_reduce(const struct hr_level *level, int dtype, int reduce_op, void *dst, void *copy,
                     const void *const *src, int src_count, size_t count, struct hr_scale scale,
                     enum hr_store copy_store);
void hr_level_scale(const struct hr_level *level, int dtype, void *dst, const void *src, size_t count,
                    struct hr_scale scale, enum hr_store store);

void hr_level_convert(const struct hr_level *level, int dst_dtype, void *dst, int src_dtype, const void *src,
                      size_t count, double scale, enum hr_store store);

void hr_level_dots(const struct hr_level *level, int dtype, const void *a, const void *b, size_t count, double *sums);
void hr_level_combine(const struct hr_level *level, int dtype, void *a, const void *b, size_t count, double a_factor,
                      double b_factor);

extern const struct hr_kernel hr_kernel_scalar;
#if defined(__x86_64__)
extern const struct hr_kernel hr_kernel_avx2;
extern const struct hr_kernel hr_kernel_avx512;
#elif defined(__aarch64__)
extern const struct hr_kernel hr_kernel_neon;
#endif

/*
 * With dtype and op as constants each use becomes straight code: the loops are written once and compiled per
 * combination.
 */
#define HR_INLINE static inline __attribute__((always_inline))

/* NAME_sum, NAME_min, ... for one dtype from `run(dtype, op, span)`, and their row in the table of a level. */
#define HR_DEFINE_OPS(name, dtype)                                                                                     \
    static void name##_sum(const struct hr_span *span) { run(dtype, HR_KERNEL_SUM, span); }                            \
    static void name##_min(const struct hr_span *span) { run(dtype, HR_KERNEL_MIN, span); }                            \
    static void name##_max(const struct hr_span *span) { run(dtype, HR_KERNEL_MAX, span); }                            \
    static void name##_product(const struct hr_span *span) { run(dtype, HR_KERNEL_PRODUCT, span); }

#define HR_DEFINE_PRODUCT(name, dtype)                                                                                 \
    static void name##_product(const struct hr_span *span) { run(dtype, HR_KERNEL_PRODUCT, span); }

#define HR_DEFINE_ALL_OPS                                                                                              \
    HR_DEFINE_OPS(uint8, HORO_UINT8)                                                                                   \
    HR_DEFINE_OPS(int8, HORO_INT8)                                                                                     \
    HR_DEFINE_OPS(int16, HORO_INT16)                                                                                   \
    HR_DEFINE_OPS(int32, HORO_INT32)                                                                                   \
    HR_DEFINE_OPS(int64, HORO_INT64)                                                                                   \
    HR_DEFINE_OPS(float16, HORO_FLOAT16)                                                                               \
    HR_DEFINE_OPS(bfloat16, HORO_BFLOAT16)                                                                             \
    HR_DEFINE_OPS(float32, HORO_FLOAT32)                                                                               \
    HR_DEFINE_OPS(float64, HORO_FLOAT64)                                                                               \
    HR_DEFINE_OPS(bool, HORO_BOOL)                                                                                     \
    HR_DEFINE_PRODUCT(complex32, HORO_COMPLEX32)                                                                       \
    HR_DEFINE_PRODUCT(complex64, HORO_COMPLEX64)                                                                       \
    HR_DEFINE_PRODUCT(complex128, HORO_COMPLEX128)

#define HR_OPS_ROW(name) {name##_sum, name##_min, name##_max, name##_product}
#define HR_PRODUCT_ROW(name) {[HR_KERNEL_PRODUCT] = name##_product}

#define HR_ALL_OPS_TABLE                                                                                               \
    {                                                                                                                  \
        [HORO_UINT8] = HR_OPS_ROW(uint8), [HORO_INT8] = HR_OPS_ROW(int8), [HORO_INT16] = HR_OPS_ROW(int16),            \
        [HORO_INT32] = HR_OPS_ROW(int32), [HORO_INT64] = HR_OPS_ROW(int64), [HORO_FLOAT16] = HR_OPS_ROW(float16),      \
        [HORO_BFLOAT16] = HR_OPS_ROW(bfloat16), [HORO_FLOAT32] = HR_OPS_ROW(float32),                                  \
        [HORO_FLOAT64] = HR_OPS_ROW(float64), [HORO_BOOL] = HR_OPS_ROW(bool),                                          \
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

/* The functions of struct hr_kernel for one level, and the table itself. */
#define HR_DEFINE_KERNEL(symbol, level_name, level)                                                                    \
    static void level_reduce(int dtype, int reduce_op, void *dst, void *copy, const void *const *src, int src_count,   \
                             size_t count, struct hr_scale scale, enum hr_store copy_store) {                          \
        hr_level_reduce(&level, dtype, reduce_op, dst, copy, src, src_count, count, scale, copy_store);                \
    }                                                                                                                  \
    static void level_scale(int dtype, void *dst, const void *src, size_t count, struct hr_scale scale,                \
                            enum hr_store store) {                                                                     \
        hr_level_scale(&level, dtype, dst, src, count, scale, store);                                                  \
    }                                                                                                                  \
    static void level_convert(int dst_dtype, void *dst, int src_dtype, const void *src, size_t count, double scale,    \
                              enum hr_store store) {                                                                   \
        hr_level_convert(&level, dst_dtype, dst, src_dtype, src, count, scale, store);                                 \
    }                                                                                                                  \
    static void level_dots(int dtype, const void *a, const void *b, size_t count, double *sums) {                      \
        hr_level_dots(&level, dtype, a, b, count, sums);                                                               \
    }                                                                                                                  \
    static void level_combine(int dtype, void *a, const void *b, size_t count, double a_factor, double b_factor) {     \
        hr_level_combine(&level, dtype, a, b, count, a_factor, b_factor);                                              \
    }                                                                                                                  \
    const struct hr_kernel symbol = {level_name, level_reduce,  level_scale, level_convert,                            \
                                     level_dots, level_combine, level_copy,  level_exchange};

#endif
