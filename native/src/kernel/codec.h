/*
 * The form of values while they travel: in the slots of the arena and on the links between hosts. What travels is a row
 * of blocks of one size, and everything that cuts it, into segments, shares, parts or pieces, cuts between two blocks.
 * A tensor begins with a block of its own; its last block may stand for fewer values than the others, and is as long as
 * they are. So what becomes of a tensor does not depend on what it travels with.
 *
 * Everybody unpacks the same blocks, whoever has reduced them: all ranks get the same bits, whatever a codec loses.
 */
#ifndef HR_KERNEL_CODEC_H
#define HR_KERNEL_CODEC_H

#include "base/cut.h"
#include "kernel/kernel.h"

enum {
    HR_CODEC_BLOCK_BYTES_MAX = 4096, /* fits the smallest slot */
    HR_CODEC_OPAQUE = -1,            /* in place of a wire dtype */
};

/*
 * Wire memory has any alignment. The functions compute with the caller's kernel, keep nothing and never fail; what they
 * write depends on nothing but what they read, so that it is equal on all ranks.
 */
struct hr_codec {
    int dtype;             /* of the values in memory */
    int wire_dtype;        /* a block is one element of this dtype; HR_CODEC_OPAQUE: it is none */
    size_t element_bytes;  /* in memory */
    size_t block_elements; /* values that a block stands for */
    size_t block_bytes;    /* on the way; at most HR_CODEC_BLOCK_BYTES_MAX */

    /* wire = factor * input: `count` values into as many blocks as they need, of which the last is filled up. */
    void (*pack)(const struct hr_codec *codec, const struct hr_kernel *kernel, void *wire, const void *input,
                 size_t count, double factor, enum hr_store store);

    /* output = the first `count` values in wire. */
    void (*unpack)(const struct hr_codec *codec, const struct hr_kernel *kernel, void *output, const void *wire,
                   size_t count);

    /* As kernel->reduce, of whole blocks: dst and copy may each equal any src exactly. */
    void (*reduce)(const struct hr_codec *codec, const struct hr_kernel *kernel, int reduce_op, void *dst, void *copy,
                   const void *const *src, int src_count, size_t block_count, struct hr_scale scale,
                   enum hr_store copy_store);

    /* wire = scale * wire: a reduction of one, which kernels do in one pass also where reduce takes two. */
    void (*scale)(const struct hr_codec *codec, const struct hr_kernel *kernel, void *wire, size_t block_count,
                  struct hr_scale scale);
};

/* For values of `dtype` that travel as `wire_dtype`, 0: as they are. NULL for what allreduce does not offer. */
const struct hr_codec *hr_codec_find(int dtype, int wire_dtype);

/* Whether what travels is what is in memory, to the byte, so that the caller's memory may stand in for a slot. */
static inline int hr_codec_is_plain(const struct hr_codec *codec) {
    return codec->dtype == codec->wire_dtype;
}

/* ---- Sizes: bytes on the way, blocks, values. They are converted here and nowhere else. ---- */

/* The bytes that `count` values take on the way. */
static inline size_t hr_codec_bytes(const struct hr_codec *codec, size_t count) {
    return hr_divide_up(count, codec->block_elements) * codec->block_bytes;
}

/* The number of blocks that `bytes` on the way are. */
static inline size_t hr_codec_blocks(const struct hr_codec *codec, size_t bytes) {
    return bytes / codec->block_bytes;
}

/* The number of values that `bytes` on the way stand for, if the last block is full. */
static inline size_t hr_codec_elements(const struct hr_codec *codec, size_t bytes) {
    return hr_codec_blocks(codec, bytes) * codec->block_elements;
}

#endif
