/*
 * The codecs whose blocks are single elements of a dtype, so that the kernels can do all the work: values as they are,
 * and floats as narrower ones.
 */
#include "kernel/codec.h"

static void plain_pack(const struct hr_codec *codec, const struct hr_kernel *kernel, void *wire, const void *input,
                       size_t count, double factor, enum hr_store store) {
    if (factor == 1.0) {
        kernel->copy(wire, input, count * codec->element_bytes, store);
    } else {
        kernel->scale(codec->dtype, wire, input, count, hr_scale_by(factor), store);
    }
}

static void plain_unpack(const struct hr_codec *codec, const struct hr_kernel *kernel, void *output, const void *wire,
                         size_t count) {
    kernel->copy(output, wire, count * codec->element_bytes, HR_STORE_ORDINARY);
}

static void narrowing_pack(const struct hr_codec *codec, const struct hr_kernel *kernel, void *wire, const void *input,
                           size_t count, double factor, enum hr_store store) {
    kernel->convert(codec->wire_dtype, wire, codec->dtype, input, count, factor, store);
}

static void narrowing_unpack(const struct hr_codec *codec, const struct hr_kernel *kernel, void *output,
                             const void *wire, size_t count) {
    kernel->convert(codec->dtype, output, codec->wire_dtype, wire, count, 1.0, HR_STORE_ORDINARY);
}

static void element_reduce(const struct hr_codec *codec, const struct hr_kernel *kernel, int reduce_op, void *dst,
                           void *copy, const void *const *src, int src_count, size_t block_count,
                           struct hr_scale scale, enum hr_store copy_store) {
    kernel->reduce(codec->wire_dtype, reduce_op, dst, copy, src, src_count, block_count, scale, copy_store);
}

static void element_scale(const struct hr_codec *codec, const struct hr_kernel *kernel, void *wire, size_t block_count,
                          struct hr_scale scale) {
    kernel->scale(codec->wire_dtype, wire, wire, block_count, scale, HR_STORE_ORDINARY);
}

#define PLAIN(of, bytes)                                                                                               \
    [of] = {of, of, bytes, 1, bytes, plain_pack, plain_unpack, element_reduce, element_scale}

static const struct hr_codec plain[HR_REDUCED_DTYPE_COUNT] = {
    PLAIN(HORO_UINT8, 1),   PLAIN(HORO_INT8, 1),    PLAIN(HORO_INT16, 2),    PLAIN(HORO_INT32, 4),
    PLAIN(HORO_INT64, 8),   PLAIN(HORO_FLOAT16, 2), PLAIN(HORO_BFLOAT16, 2), PLAIN(HORO_FLOAT32, 4),
    PLAIN(HORO_FLOAT64, 8), PLAIN(HORO_BOOL, 1),
    PLAIN(HORO_COMPLEX32, 4), PLAIN(HORO_COMPLEX64, 8), PLAIN(HORO_COMPLEX128, 16), /* to be multiplied */
};

#define NARROWING(from, bytes, to)                                                                                     \
    {from, to, bytes, 1, 2, narrowing_pack, narrowing_unpack, element_reduce, element_scale}

static const struct hr_codec narrowing[2][2] = {
    {NARROWING(HORO_FLOAT32, 4, HORO_FLOAT16), NARROWING(HORO_FLOAT32, 4, HORO_BFLOAT16)},
    {NARROWING(HORO_FLOAT64, 8, HORO_FLOAT16), NARROWING(HORO_FLOAT64, 8, HORO_BFLOAT16)},
};

const struct hr_codec *hr_codec_find(int dtype, int wire_dtype) {
    if (wire_dtype == 0) {
        const int has_one = dtype >= 0 && dtype < HR_REDUCED_DTYPE_COUNT && plain[dtype].block_bytes > 0;
        return has_one ? &plain[dtype] : NULL;
    }
    return hr_dtype_narrows(dtype, wire_dtype) ? &narrowing[dtype == HORO_FLOAT64][wire_dtype == HORO_BFLOAT16] : NULL;
}
