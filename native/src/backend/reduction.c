#include "backend/reduction.h"

#include "kernel/kernel.h"

enum { SUM, MIN, MAX, PRODUCT };

static int index_of(int reduce_op) {
    switch (reduce_op) {
    case HORO_MIN: return MIN;
    case HORO_MAX: return MAX;
    case HORO_PRODUCT: return PRODUCT;
    default: return SUM;
    }
}

/* MPI hands nothing over but the operands, so each combination has a function of its own. */
static void reduce(int dtype, int reduce_op, const void *in, void *inout, const int *count) {
    const void *const operands[2] = {in, inout};
    hr_kernel_best()->reduce(dtype, reduce_op, inout, NULL, operands, 2, (size_t)*count, hr_scale_by(1.0),
                             HR_STORE_ORDINARY);
}

#define REDUCER(name, dtype, reduce_op)                                                                                \
    static void name(void *in, void *inout, int *count, void *type) {                                                  \
        (void)type;                                                                                                    \
        reduce(dtype, reduce_op, in, inout, count);                                                                    \
    }

REDUCER(float16_sum, HORO_FLOAT16, HORO_SUM)
REDUCER(float16_min, HORO_FLOAT16, HORO_MIN)
REDUCER(float16_max, HORO_FLOAT16, HORO_MAX)
REDUCER(float16_product, HORO_FLOAT16, HORO_PRODUCT)
REDUCER(bfloat16_sum, HORO_BFLOAT16, HORO_SUM)
REDUCER(bfloat16_min, HORO_BFLOAT16, HORO_MIN)
REDUCER(bfloat16_max, HORO_BFLOAT16, HORO_MAX)
REDUCER(bfloat16_product, HORO_BFLOAT16, HORO_PRODUCT)
REDUCER(float32_min, HORO_FLOAT32, HORO_MIN)
REDUCER(float32_max, HORO_FLOAT32, HORO_MAX)
REDUCER(float64_min, HORO_FLOAT64, HORO_MIN)
REDUCER(float64_max, HORO_FLOAT64, HORO_MAX)
REDUCER(complex32_product, HORO_COMPLEX32, HORO_PRODUCT)
REDUCER(complex64_product, HORO_COMPLEX64, HORO_PRODUCT)
REDUCER(complex128_product, HORO_COMPLEX128, HORO_PRODUCT)

static hr_mpi_reducer *const reducers[HR_REDUCED_DTYPE_COUNT][HR_REDUCTION_OPS] = {
    [HORO_FLOAT16] = {float16_sum, float16_min, float16_max, float16_product},
    [HORO_BFLOAT16] = {bfloat16_sum, bfloat16_min, bfloat16_max, bfloat16_product},
    [HORO_FLOAT32] = {[MIN] = float32_min, [MAX] = float32_max},
    [HORO_FLOAT64] = {[MIN] = float64_min, [MAX] = float64_max},
    [HORO_COMPLEX32] = {[PRODUCT] = complex32_product},
    [HORO_COMPLEX64] = {[PRODUCT] = complex64_product},
    [HORO_COMPLEX128] = {[PRODUCT] = complex128_product},
};

/* MPI's own types: of sums and products, and of minimum and maximum. */
static const int types[HORO_DTYPE_COUNT][2] = {
    [HORO_UINT8] = {HORO_MPI_UINT8_T, HORO_MPI_UINT8_T},   [HORO_INT8] = {HORO_MPI_UINT8_T, HORO_MPI_INT8_T},
    [HORO_INT16] = {HORO_MPI_UINT16_T, HORO_MPI_INT16_T},  [HORO_INT32] = {HORO_MPI_UINT32_T, HORO_MPI_INT32_T},
    [HORO_INT64] = {HORO_MPI_UINT64_T, HORO_MPI_INT64_T},  [HORO_FLOAT32] = {HORO_MPI_FLOAT, HORO_MPI_FLOAT},
    [HORO_FLOAT64] = {HORO_MPI_DOUBLE, HORO_MPI_DOUBLE},   [HORO_BOOL] = {HORO_MPI_UINT8_T, HORO_MPI_UINT8_T},
};

static const int ops[HR_REDUCTION_OPS] = {HORO_MPI_SUM, HORO_MPI_MIN, HORO_MPI_MAX, HORO_MPI_PROD};
static const int bool_ops[HR_REDUCTION_OPS] = {HORO_MPI_LOR, HORO_MPI_LAND, HORO_MPI_LOR, HORO_MPI_LAND};

int hr_reductions_init(struct hr_reductions *reductions, const struct hr_mpi *mpi) {
    *reductions = (struct hr_reductions){0};
    int code = 0;
    for (int width = 0; width < HR_REDUCTION_WIDTHS && code == 0; width++) {
        code = mpi->ops->type_create(mpi, 2 << width, &reductions->types[width]);
        reductions->type_count += code == 0;
    }
    for (int dtype = 0; dtype < HR_REDUCED_DTYPE_COUNT; dtype++) {
        for (int op = 0; op < HR_REDUCTION_OPS && code == 0; op++) {
            if (reducers[dtype][op] != NULL) {
                code = mpi->ops->op_create(mpi, reducers[dtype][op], op == SUM || op == PRODUCT,
                                           &reductions->ops[dtype][op]);
                reductions->made[dtype][op] = code == 0;
            }
        }
    }
    return code;
}

void hr_reductions_fini(struct hr_reductions *reductions, const struct hr_mpi *mpi) {
    for (int dtype = 0; dtype < HR_REDUCED_DTYPE_COUNT; dtype++) {
        for (int op = 0; op < HR_REDUCTION_OPS; op++) {
            if (reductions->made[dtype][op]) {
                (void)mpi->ops->op_free(mpi, &reductions->ops[dtype][op]);
            }
        }
    }
    for (int width = 0; width < reductions->type_count; width++) {
        (void)mpi->ops->type_free(mpi, &reductions->types[width]);
    }
}

/* Of a dtype that MPI does not reduce itself; -1: it does. */
static int width_of(int dtype) {
    switch (dtype) {
    case HORO_FLOAT16:
    case HORO_BFLOAT16: return 0;
    case HORO_COMPLEX32: return 1;
    case HORO_COMPLEX64: return 2;
    case HORO_COMPLEX128: return 3;
    default: return -1;
    }
}

struct hr_reduction hr_reductions_find(const struct hr_reductions *reductions, const struct hr_mpi *mpi, int dtype,
                                       int reduce_op) {
    const int op = index_of(reduce_op);
    const int width = width_of(dtype);
    const int own = dtype == HORO_BOOL ? bool_ops[op] : ops[op];
    return (struct hr_reduction){
        .type = width >= 0 ? reductions->types[width] : mpi->calls.handles[types[dtype][op == MIN || op == MAX]],
        .op = reductions->made[dtype][op] ? reductions->ops[dtype][op] : mpi->calls.handles[own],
    };
}
