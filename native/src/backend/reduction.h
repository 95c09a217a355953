/*
 * The type and the operation by which MPI reduces what horo reduces: MPI's own where they mean the same, else ones made
 * here.
 *
 * Made here are all reductions of 16-bit floats, which MPI does not know, minimum and maximum of floats, for which MPI
 * does not say what becomes of NaN or of zeros of both signs, and the product of complex numbers, for which it does not
 * say whether both orders of two factors give the same bits. Minimum and maximum are told not to commute: then MPI
 * keeps to the order of ranks, and all ranks get the same bits. Sums and products of integers are those of unsigned
 * ones, which wrap.
 */
#ifndef HR_BACKEND_REDUCTION_H
#define HR_BACKEND_REDUCTION_H

#include "base/dtype.h"
#include "mpi/mpi.h"

enum {
    HR_REDUCTION_OPS = 4,   /* sum, min, max, product */
    HR_REDUCTION_WIDTHS = 4 /* 2, 4, 8 and 16 bytes: of both kinds of 16-bit floats, and of complex numbers */
};

struct hr_reductions {
    uint64_t types[HR_REDUCTION_WIDTHS]; /* of so many bytes */
    int type_count;                      /* made */
    uint64_t ops[HR_REDUCED_DTYPE_COUNT][HR_REDUCTION_OPS];
    int made[HR_REDUCED_DTYPE_COUNT][HR_REDUCTION_OPS];
};

struct hr_reduction {
    uint64_t type;
    uint64_t op;
};

/* 0, or an error code of MPI; fini is needed in any case. */
int hr_reductions_init(struct hr_reductions *reductions, const struct hr_mpi *mpi);
void hr_reductions_fini(struct hr_reductions *reductions, const struct hr_mpi *mpi);

/* For SUM, MIN, MAX or PRODUCT of any dtype. */
struct hr_reduction hr_reductions_find(const struct hr_reductions *reductions, const struct hr_mpi *mpi, int dtype,
                                       int reduce_op);

#endif
