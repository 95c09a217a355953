/*
 * Arithmetic on contiguous memory: reduce, scale, copy. SIMD is chosen at run time; the scalar code is always there and
 * gives bit-equal results (no reassociation, no fused multiply-add: each element is computed in the same order
 * everywhere).
 *
 * 16-bit floats are widened to float32, reduced and scaled there and rounded once (to nearest even) at the end; a
 * float32 NaN becomes a NaN. Except for float64, a factor is rounded to float32 before floats are multiplied by it.
 * Integers wrap. With a factor of 1 they are divided as integers, truncating toward zero, so that an average is exact.
 * Any other factor is applied in double: value * factor / divisor, truncated toward zero once, saturating at the type's
 * ends (NaN becomes 0); an int64 beyond 2^53 is rounded there. bool: sum and max are OR, product and min are AND;
 * neither factor nor divisor may be other than 1; any byte but 0 is true and results are 0 or 1. float16 and bfloat16
 * also stand for wider floats while they travel: convert rounds to nearest even, and a NaN stays one. From and to
 * float64 it goes through float32, as torch's own conversions do. float min and max give NaN if any source is NaN.
 *
 * Complex numbers have PRODUCT and scale, and are pairs of floats to all else. (a + bi)(c + di) is (ac - bd) +
 * (ad + bc)i, also where that is NaN, each of the four products rounded; either order of two factors gives the same
 * bits.
 *
 * When a sum or product adds or multiplies two NaN, which of them it carries on is not said: there, and nowhere else,
 * levels may differ, in the payload of a NaN.
 */
#ifndef HR_KERNEL_KERNEL_H
#define HR_KERNEL_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#include "base/traits.h"
#include "horo.h"

enum hr_store {
    HR_STORE_ORDINARY = 0,
    HR_STORE_STREAM = 1, /* past the cache where the machine can, fenced before the function returns */
};

/*
 * The factor and the divisor of a result. Two numbers, since the inverse of a divisor is no double: 49 * (1.0 / 49) is
 * below 1. The divisor is at least 1, and 1 for floats (they are multiplied by the inverse, as ever) and bool.
 */
struct hr_scale {
    double factor;
    int divisor;
};

static inline struct hr_scale hr_scale_by(double factor) {
    return (struct hr_scale){factor, 1};
}

static inline int hr_scale_changes(struct hr_scale scale) {
    return scale.factor != 1.0 || scale.divisor != 1;
}

struct hr_span;

/* The loops of one SIMD level, exhaustive over the dtypes that they name. Those with dtypes are for kernel.c. */
struct hr_kernel {
    const char *name;

    /* memcpy; dst and src do not overlap. */
    void (*copy)(void *dst, const void *src, size_t bytes, enum hr_store store);

    /*
     * out = slot, then slot = in; no two of them overlap. In one pass, line by line: a line that another core has
     * written last and that is read and written at once makes one trip between the cores; read now and written later it
     * makes two.
     */
    void (*exchange)(void *out, void *slot, const void *in, size_t bytes, enum hr_store slot_store);

    /* By reduce_op; of complex numbers the product only, bits of integers by the functions of uint8. */
    void (*reduce[HR_REDUCED_DTYPE_COUNT][HORO_BXOR + 1])(const struct hr_span *span);
    /* [to][from]: the one source of the span into its copy; between float32 and 16-bit floats only. */
    void (*convert[HORO_DTYPE_COUNT][HORO_DTYPE_COUNT])(const struct hr_span *span);
    /* Of float32 and float64 only; made of pair_template.h. */
    void (*dots[HORO_DTYPE_COUNT])(const uint8_t *a, const uint8_t *b, size_t count, double *sums);
    void (*combine[HORO_DTYPE_COUNT])(uint8_t *a, const uint8_t *b, size_t count, double a_factor, double b_factor);
};

/*
 * dst[i] = scale * (src[0][i] op src[1][i] op ... op src[src_count - 1][i]); the same into copy unless it is NULL.
 * `copy_store` rules the stores to copy only. src_count >= 1. dst and copy may each equal any src exactly; partial
 * overlap is not allowed.
 * reduce_op is SUM, MIN, MAX, PRODUCT, or, with a scale that changes nothing, BAND, BOR or BXOR (the caller turns
 * AVERAGE into SUM and a scale); of complex numbers it is PRODUCT.
 */
void hr_kernel_reduce(const struct hr_kernel *kernel, int dtype, int reduce_op, void *dst, void *copy,
                      const void *const *src, int src_count, size_t count, struct hr_scale scale,
                      enum hr_store copy_store);

/* dst[i] = scale * src[i]; dst may equal src. */
void hr_kernel_scale(const struct hr_kernel *kernel, int dtype, void *dst, const void *src, size_t count,
                     struct hr_scale scale, enum hr_store store);

/* dst[i] = factor * src[i] from a 16-bit float to a wider one or back, multiplied in the wider one; no overlap. */
void hr_kernel_convert(const struct hr_kernel *kernel, int dst_dtype, void *dst, int src_dtype, const void *src,
                       size_t count, double factor, enum hr_store store);

/*
 * Of floats: adds a.b, a.a and b.b to sums[0], [1] and [2], in double. Each product of two float32 is exact there.
 * Eight running sums take the elements in turn, and are added up in their order at the end of a block (of 1024
 * elements of 16 bits, of all of the wider ones): equal bits on every level.
 */
void hr_kernel_dots(const struct hr_kernel *kernel, int dtype, const void *a, const void *b, size_t count,
                    double *sums);

/* Of floats: a[i] = a_factor * a[i] + b_factor * b[i], in double, rounded to float32, then to 16 bits; no overlap. */
void hr_kernel_combine(const struct hr_kernel *kernel, int dtype, void *a, const void *b, size_t count,
                       double a_factor, double b_factor);

/*
 * The table "scalar", "avx2", "avx512" or "neon", NULL where this build or this machine lacks it; of NULL the best one
 * that there is. The same pointer every time. Cheap, but not free: keep it where many small calls follow.
 */
const struct hr_kernel *hr_kernel_find(const char *name);

/*
 * ---- The form of values while they travel ----
 *
 * In the slots of the arena and on the links between hosts, values are as they are in memory, or floats are narrower.
 * Everybody unpacks the same values, whoever has reduced them: all ranks get the same bits, whatever is lost.
 */
struct hr_codec {
    int dtype;            /* of the values in memory */
    int wire_dtype;       /* on the way */
    int is_plain;         /* the two are one, so that the caller's memory may stand in for a slot */
    size_t element_bytes; /* in memory */
    size_t wire_bytes;    /* on the way */
};

/* For values of `dtype` that travel as `wire_dtype`, 0: as they are. NULL for what allreduce does not offer. */
const struct hr_codec *hr_codec_find(int dtype, int wire_dtype);

/* wire = factor * input, and output = wire, of so many values. Wire memory has any alignment. */
void hr_codec_pack(const struct hr_codec *codec, const struct hr_kernel *kernel, void *wire, const void *input,
                   size_t count, double factor, enum hr_store store);
void hr_codec_unpack(const struct hr_codec *codec, const struct hr_kernel *kernel, void *output, const void *wire,
                     size_t count, enum hr_store store);

#endif
