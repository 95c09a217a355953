#include "int8_codec.h"

#include <math.h>
#include <string.h>

static const float MOST = 127.0f;

static void encode(uint8_t *block, const float *values, size_t count) {
    float largest = 0.0f;
    for (size_t i = 0; i < count; i++) {
        largest = fmaxf(largest, fabsf(values[i]));
    }
    const float scale = largest / MOST;
    memcpy(block, &scale, sizeof scale);
    for (size_t i = 0; i < count; i++) {
        const float level = scale == 0.0f ? 0.0f : rintf(values[i] / scale);
        block[sizeof scale + i] = (uint8_t)(int8_t)(level > MOST ? MOST : level > -MOST ? level : -MOST);
    }
}

static void decode(float *values, const uint8_t *block, size_t count) {
    float scale;
    memcpy(&scale, block, sizeof scale);
    for (size_t i = 0; i < count; i++) {
        values[i] = scale * (float)(int8_t)block[sizeof scale + i];
    }
}

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

static void pack(const struct hr_codec *codec, const struct hr_kernel *kernel, void *wire, const void *input,
                 size_t count, double factor, enum hr_store store) {
    (void)kernel;
    (void)store;
    const size_t whole = codec->block_elements;
    for (size_t at = 0; at < count; at += whole) {
        float values[INT8_CODEC_ELEMENTS_MAX] = {0};
        const size_t part = smaller(whole, count - at);
        memcpy(values, (const float *)input + at, part * sizeof *values);
        for (size_t i = 0; i < part; i++) {
            values[i] *= (float)factor;
        }
        encode((uint8_t *)wire + at / whole * codec->block_bytes, values, whole);
    }
}

static void unpack(const struct hr_codec *codec, const struct hr_kernel *kernel, void *output, const void *wire,
                   size_t count) {
    (void)kernel;
    const size_t whole = codec->block_elements;
    for (size_t at = 0; at < count; at += whole) {
        float values[INT8_CODEC_ELEMENTS_MAX];
        const size_t part = smaller(whole, count - at);
        decode(values, (const uint8_t *)wire + at / whole * codec->block_bytes, part);
        memcpy((float *)output + at, values, part * sizeof *values);
    }
}

static float combine(int reduce_op, float a, float b) {
    switch (reduce_op) {
    case HORO_MIN: return fminf(a, b);
    case HORO_MAX: return fmaxf(a, b);
    case HORO_PRODUCT: return a * b;
    default: return a + b;
    }
}

static void reduce(const struct hr_codec *codec, const struct hr_kernel *kernel, int reduce_op, void *dst, void *copy,
                   const void *const *src, int src_count, size_t block_count, struct hr_scale scale,
                   enum hr_store copy_store) {
    (void)kernel;
    (void)copy_store;
    const size_t whole = codec->block_elements;
    for (size_t at = 0; at < block_count * codec->block_bytes; at += codec->block_bytes) {
        float result[INT8_CODEC_ELEMENTS_MAX];
        float values[INT8_CODEC_ELEMENTS_MAX];
        decode(result, (const uint8_t *)src[0] + at, whole);
        for (int s = 1; s < src_count; s++) {
            decode(values, (const uint8_t *)src[s] + at, whole);
            for (size_t i = 0; i < whole; i++) {
                result[i] = combine(reduce_op, result[i], values[i]);
            }
        }
        for (size_t i = 0; i < whole; i++) {
            result[i] *= (float)scale.factor;
        }
        encode((uint8_t *)dst + at, result, whole);
        if (copy != NULL) {
            memcpy((uint8_t *)copy + at, (uint8_t *)dst + at, codec->block_bytes);
        }
    }
}

static void scale_blocks(const struct hr_codec *codec, const struct hr_kernel *kernel, void *wire, size_t block_count,
                         struct hr_scale scale) {
    const void *const source = wire;
    reduce(codec, kernel, HORO_SUM, wire, NULL, &source, 1, block_count, scale, HR_STORE_ORDINARY);
}

struct hr_codec int8_codec(size_t block_elements) {
    return (struct hr_codec){
        .dtype = HORO_FLOAT32,
        .wire_dtype = HR_CODEC_OPAQUE,
        .element_bytes = sizeof(float),
        .block_elements = block_elements,
        .block_bytes = sizeof(float) + block_elements,
        .pack = pack,
        .unpack = unpack,
        .reduce = reduce,
        .scale = scale_blocks,
    };
}
