/*
 * The facts that the kernels of adasum.cu get about a batch and its tensors. Read by compilers of C and of CUDA alike,
 * so it includes nothing.
 *
 * A rank has its share of the vectors of all ranks. In it lies a piece of each tensor, once for each rank, or none. The
 * kernels work on pairs of ranks that are `distance` apart in the tree: pair k is of ranks 2 k distance and
 * (2 k + 1) distance, and what comes of it takes the place of the lower one.
 */
#ifndef HR_DEVICE_ADASUM_PIECE_H
#define HR_DEVICE_ADASUM_PIECE_H

enum {
    HR_ADASUM_PRODUCTS = 3,           /* a.b, a.a, b.b */
    HR_ADASUM_THREAD_ELEMENTS = 64,   /* that a thread takes of a piece and pair at least, but for the last one; */
    HR_ADASUM_THREADS_MAX = 1 << 16,  /* more, where there would be more threads */
};

struct hr_adasum_piece {
    unsigned long long values; /* address of those of rank 0 */
    unsigned long long stride; /* bytes from there to those of the next rank */
    unsigned long long count;  /* 0: the share has none of this tensor */
    unsigned first_partial;    /* of the pair's partial sums: each thread has one */
    unsigned first_block;      /* of the pair's blocks; they ascend from piece to piece */
    unsigned threads;
    int dtype;                 /* enum hr_pack_dtype: a float */
};

struct hr_adasum_batch {
    unsigned long long pieces;   /* address: [count] */
    unsigned long long partials; /* address: double [pairs][partial_count][HR_ADASUM_PRODUCTS] */
    unsigned long long sums;     /* address: double [pairs][count][HR_ADASUM_PRODUCTS] */
    unsigned count;              /* of tensors */
    unsigned size;               /* of ranks */
    unsigned block_count;        /* of a pair, as partial_count */
    unsigned partial_count;
};

#endif
