/*
 * The facts that the kernels of pack.cu get about a piece: some values of a tensor, and their place in a buffer, where
 * they are as they travel. Read by compilers of C and of CUDA alike, so it includes nothing.
 */
#ifndef HR_DEVICE_PACK_PIECE_H
#define HR_DEVICE_PACK_PIECE_H

enum {
    HR_PACK_THREADS = 256,         /* of a block */
    HR_PACK_BLOCK_ELEMENTS = 4096, /* that a block takes of one piece */
};

/* As enum horo_dtype. */
enum hr_pack_dtype {
    HR_PACK_UINT8 = 0, HR_PACK_INT8 = 1, HR_PACK_INT16 = 2, HR_PACK_INT32 = 3, HR_PACK_INT64 = 4,
    HR_PACK_FLOAT16 = 5, HR_PACK_BFLOAT16 = 6, HR_PACK_FLOAT32 = 7, HR_PACK_FLOAT64 = 8, HR_PACK_BOOL = 9,
};

/*
 * The pairs of dtypes: any with itself; FLOAT32 and FLOAT64 with 16-bit floats on the way; INT16 with INT32; BOOL with
 * UINT8.
 */
struct hr_pack_piece {
    unsigned long long memory, wire; /* addresses: of the tensor's values, and of those in the buffer */
    unsigned long long count;
    double factor;      /* of values */
    double partial;     /* pack: values of 16 bits are rounded, multiplied by this and rounded again */
    int divisor;        /* of integers, besides; 1 for all else */
    int dtype;          /* in memory */
    int wire_dtype;
    unsigned first_block; /* of those that take the piece; they ascend from piece to piece, from 0 on */
};

#endif
