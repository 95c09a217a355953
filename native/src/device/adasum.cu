/*
 * Kernels of Adasum (backend/nccl_adasum.h): the scalar products of a level of the tree, and what combines its pairs.
 *
 *     hr_adasum_multiply   block_count blocks for each pair: each thread adds up products of its elements
 *     hr_adasum_fold       a block for each pair and tensor: of more partial sums than a block has threads, so many
 *     hr_adasum_total      a thread for each pair, tensor and product: adds up what is left, which is what is sent
 *     hr_adasum_combine    as hr_adasum_multiply, by the sums of all ranks
 *
 * Thread t of n takes elements t, t + n, t + 2 n, ... of a piece: threads beside each other read side by side, and each
 * sum is made in one order, so that it has the same bits each time. Products are those of kernel/kernel.h: in double,
 * where those of two float32 are exact. What is combined is rounded once to float32, and from there to 16 bits.
 */
#include "device/adasum_piece.h"
#include "device/kernels.cuh"

/* ---- Where things are ---- */

HR_GPU_INLINE const struct hr_adasum_batch *batch_at(u64 address) {
    return (const struct hr_adasum_batch *)HR_GPU_REACH(address, sizeof(struct hr_adasum_batch));
}

HR_GPU_INLINE const struct hr_adasum_piece *pieces_of(const struct hr_adasum_batch *batch) {
    return (const struct hr_adasum_piece *)HR_GPU_REACH(batch->pieces,
                                                        (u64)batch->count * sizeof(struct hr_adasum_piece));
}

/* The partial sums of a piece, for one pair. */
HR_GPU_INLINE double *partials_of(const struct hr_adasum_batch *batch, const struct hr_adasum_piece *piece, u32 pair) {
    const u64 first = ((u64)pair * batch->partial_count + piece->first_partial) * HR_ADASUM_PRODUCTS;
    return (double *)HR_GPU_REACH(batch->partials + first * sizeof(double),
                                  (u64)piece->threads * HR_ADASUM_PRODUCTS * sizeof(double));
}

HR_GPU_INLINE double *sums_of(const struct hr_adasum_batch *batch, u32 pair, u32 tensor) {
    const u64 first = ((u64)pair * batch->count + tensor) * HR_ADASUM_PRODUCTS;
    return (double *)HR_GPU_REACH(batch->sums + first * sizeof(double), HR_ADASUM_PRODUCTS * sizeof(double));
}

HR_GPU_INLINE u64 width_of_float(int dtype) {
    return dtype == HR_PACK_FLOAT64 ? 8 : dtype == HR_PACK_FLOAT32 ? 4 : 2;
}

/* The tensor that a block of a pair works on: one that has blocks. */
HR_GPU_INLINE u32 tensor_of(const struct hr_adasum_piece *pieces, u32 count, u32 block) {
    u32 first = 0;
    for (u32 left = count; left > 1;) {
        const u32 half = left / 2;
        if (pieces[first + half].first_block <= block) {
            first += half;
            left -= half;
        } else {
            left = half;
        }
    }
    return first;
}

/* The work of a thread: every `step`th element of both vectors, from `first` on. */
struct pair_part {
    u64 a, b, first, step, count;
    u32 pair, tensor;
    int dtype;
};

/* Of a thread that has no work, no elements. */
HR_GPU_INLINE struct pair_part pair_part_of(const struct hr_adasum_batch *batch, u32 distance) {
    struct pair_part part;
    const u32 block = blockIdx.x % batch->block_count;
    const struct hr_adasum_piece *pieces = pieces_of(batch);
    part.pair = blockIdx.x / batch->block_count;
    part.tensor = tensor_of(pieces, batch->count, block);
    const struct hr_adasum_piece *piece = &pieces[part.tensor];
    const u64 bytes = piece->count * width_of_float(piece->dtype);
    const u64 a = piece->values + 2ull * part.pair * distance * piece->stride;
    part.dtype = piece->dtype;
    part.step = piece->threads;
    part.first = (u64)(block - piece->first_block) * HR_PACK_THREADS + threadIdx.x;
    part.count = part.first < part.step ? piece->count : 0;
    part.a = HR_GPU_REACH(a, bytes);
    part.b = HR_GPU_REACH(a + distance * piece->stride, bytes);
    return part;
}

HR_GPU_INLINE double load_wide(int dtype, u64 at, u64 i) {
    return dtype == HR_PACK_FLOAT64 ? ((const double *)at)[i] : (double)load_float(dtype, at, i);
}

/* ---- The sums ---- */

HR_GPU_KERNEL hr_adasum_multiply(u64 address, u32 distance) {
    const struct hr_adasum_batch *batch = batch_at(address);
    const struct pair_part part = pair_part_of(batch, distance);
    double ab = 0.0;
    double aa = 0.0;
    double bb = 0.0;
    for (u64 i = part.first; i < part.count; i += part.step) {
        const double x = load_wide(part.dtype, part.a, i);
        const double y = load_wide(part.dtype, part.b, i);
        ab += x * y;
        aa += x * x;
        bb += y * y;
    }
    if (part.count > 0) {
        double *partial = partials_of(batch, &pieces_of(batch)[part.tensor], part.pair) +
                          part.first * HR_ADASUM_PRODUCTS;
        partial[0] = ab;
        partial[1] = aa;
        partial[2] = bb;
    }
}

/* Only this thread reads what it writes. */
HR_GPU_KERNEL hr_adasum_fold(u64 address, u32 distance) {
    const struct hr_adasum_batch *batch = batch_at(address);
    const struct hr_adasum_piece *piece = &pieces_of(batch)[blockIdx.x % batch->count];
    (void)distance;
    if (piece->threads <= HR_PACK_THREADS) {
        return;
    }
    double *partials = partials_of(batch, piece, blockIdx.x / batch->count);
    double sums[HR_ADASUM_PRODUCTS] = {0.0, 0.0, 0.0};
    for (u32 t = threadIdx.x; t < piece->threads; t += HR_PACK_THREADS) {
        for (u32 k = 0; k < HR_ADASUM_PRODUCTS; k++) {
            sums[k] += partials[(u64)t * HR_ADASUM_PRODUCTS + k];
        }
    }
    for (u32 k = 0; k < HR_ADASUM_PRODUCTS; k++) {
        partials[threadIdx.x * HR_ADASUM_PRODUCTS + k] = sums[k];
    }
}

HR_GPU_KERNEL hr_adasum_total(u64 address, u32 distance) {
    const struct hr_adasum_batch *batch = batch_at(address);
    const u32 pairs = (batch->size - distance - 1) / (2 * distance) + 1;
    const u64 at = (u64)blockIdx.x * HR_PACK_THREADS + threadIdx.x;
    if (at >= (u64)pairs * batch->count * HR_ADASUM_PRODUCTS) {
        return;
    }
    const u32 product = (u32)(at % HR_ADASUM_PRODUCTS);
    const u32 tensor = (u32)(at / HR_ADASUM_PRODUCTS % batch->count);
    const u32 pair = (u32)(at / HR_ADASUM_PRODUCTS / batch->count);
    const struct hr_adasum_piece *piece = &pieces_of(batch)[tensor];
    const u32 left = piece->threads < HR_PACK_THREADS ? piece->threads : HR_PACK_THREADS;
    const double *partials = left == 0 ? (const double *)0 : partials_of(batch, piece, pair) + product;
    double sum = 0.0;
    for (u32 t = 0; t < left; t++) {
        sum += partials[t * HR_ADASUM_PRODUCTS];
    }
    sums_of(batch, pair, tensor)[product] = sum;
}

/* ---- What comes of a pair ---- */

/* A vector whose square is below the root of the smallest normal double counts as zero, which has no direction. */
HR_GPU_INLINE double factor_of(double product, double square) {
    return square >= 1.4916681462400413e-154 ? 1.0 - product / (2.0 * square) : 1.0; /* 2^-511 */
}

HR_GPU_KERNEL hr_adasum_combine(u64 address, u32 distance) {
    const struct hr_adasum_batch *batch = batch_at(address);
    const struct pair_part part = pair_part_of(batch, distance);
    const double *sums = sums_of(batch, part.pair, part.tensor);
    const double a_factor = factor_of(sums[0], sums[1]);
    const double b_factor = factor_of(sums[0], sums[2]);
    for (u64 i = part.first; i < part.count; i += part.step) {
        const double value = load_wide(part.dtype, part.a, i) * a_factor + load_wide(part.dtype, part.b, i) * b_factor;
        if (part.dtype == HR_PACK_FLOAT64) {
            ((double *)part.a)[i] = value;
        } else {
            store_float(part.dtype, part.a, i, (float)value);
        }
    }
}
