#include "base/traits.h"

#include <string.h>

#include "horo.h"

/* ---- Operations ---- */

enum {
    MOVES = HR_OP_WITH_TENSORS | HR_OP_MOVING_DATA,
    MOVES_AHEAD = MOVES | HR_OP_BEGUN_AHEAD,
    CHANGES_TEAMS = HR_OP_WITH_TENSORS | HR_OP_OF_TEAMS | HR_OP_BEGUN_AHEAD,
};

struct operation {
    const char *name;
    int traits;
};

static const struct operation operations[HORO_ANY_OP_COUNT] = {
    [HORO_ALLREDUCE] = {"allreduce", MOVES_AHEAD | HR_OP_REDUCTION},
    [HORO_ALLGATHER] = {"allgather", MOVES_AHEAD | HR_OP_TELLING_ROWS},
    [HORO_BROADCAST] = {"broadcast", MOVES_AHEAD | HR_OP_ROOTED},
    [HORO_BARRIER] = {"barrier", 0},
    [HORO_ADD_TEAM] = {"add_process_set", CHANGES_TEAMS},
    [HORO_REMOVE_TEAM] = {"remove_process_set", CHANGES_TEAMS},
    [HORO_REDUCESCATTER] = {"reducescatter", MOVES_AHEAD | HR_OP_REDUCTION},
    [HORO_ALLTOALL] = {"alltoall", MOVES_AHEAD | HR_OP_EXCHANGE | HR_OP_TELLING_ROWS},
    [HORO_JOIN] = {"join", HR_OP_LAST},
    [HORO_REDUCE] = {"reduce", MOVES_AHEAD | HR_OP_REDUCTION | HR_OP_ROOTED},
    [HORO_GATHER] = {"gather", MOVES_AHEAD | HR_OP_EXCHANGE | HR_OP_ROOTED},
    [HORO_SCATTER] = {"scatter", MOVES_AHEAD | HR_OP_EXCHANGE | HR_OP_ROOTED},
    [HORO_SEND] = {"send", MOVES_AHEAD | HR_OP_OF_PAIRS},
    [HORO_RECEIVE] = {"receive", MOVES_AHEAD | HR_OP_OF_PAIRS},
};

static int is_operation(int op) {
    return op >= 0 && op < HORO_ANY_OP_COUNT;
}

int hr_op_is(int op, enum hr_op_trait trait) {
    return is_operation(op) && (operations[op].traits & (int)trait) != 0;
}

const char *hr_op_name(int op) {
    return is_operation(op) ? operations[op].name : "unknown operation";
}

size_t hr_name_call(uint64_t number, char *name) {
    char digits[HR_CALL_NAME_BYTES];
    size_t count = 0;
    do {
        digits[count++] = (char)('0' + number % 10);
    } while ((number /= 10) > 0);
    memcpy(name, "call ", 5);
    for (size_t i = 0; i < count; i++) {
        name[5 + i] = digits[count - 1 - i];
    }
    name[5 + count] = '\0';
    return 5 + count;
}

/* ---- Dtypes ---- */

struct dtype {
    const char *name;
    size_t bytes;
};

static const struct dtype dtypes[HORO_ANY_DTYPE_COUNT] = {
    [HORO_UINT8] = {"uint8", 1},       [HORO_INT8] = {"int8", 1},       [HORO_INT16] = {"int16", 2},
    [HORO_INT32] = {"int32", 4},       [HORO_INT64] = {"int64", 8},     [HORO_FLOAT16] = {"float16", 2},
    [HORO_BFLOAT16] = {"bfloat16", 2}, [HORO_FLOAT32] = {"float32", 4}, [HORO_FLOAT64] = {"float64", 8},
    [HORO_BOOL] = {"bool", 1},
    [HORO_UINT16] = {"uint16", 2}, [HORO_UINT32] = {"uint32", 4},
    [HORO_UINT64] = {"uint64", 8}, [HORO_COMPLEX32] = {"complex32", 4},
    [HORO_COMPLEX64] = {"complex64", 8}, [HORO_COMPLEX128] = {"complex128", 16},
    [HORO_FLOAT8_E4M3FN] = {"float8_e4m3fn", 1}, [HORO_FLOAT8_E5M2] = {"float8_e5m2", 1},
    [HORO_FLOAT8_E4M3FNUZ] = {"float8_e4m3fnuz", 1}, [HORO_FLOAT8_E5M2FNUZ] = {"float8_e5m2fnuz", 1},
    [HORO_FLOAT8_E8M0FNU] = {"float8_e8m0fnu", 1}, [HORO_FLOAT4_E2M1FN_X2] = {"float4_e2m1fn_x2", 1},
    [HORO_BITS8] = {"bits8", 1}, [HORO_BITS16] = {"bits16", 2},
    [HORO_BITS1X8] = {"bits1x8", 1}, [HORO_BITS2X4] = {"bits2x4", 1},
    [HORO_BITS4X2] = {"bits4x2", 1},
};

static int is_known(int dtype) {
    return dtype >= 0 && dtype < HORO_ANY_DTYPE_COUNT;
}

size_t hr_dtype_bytes(int dtype) {
    return is_known(dtype) ? dtypes[dtype].bytes : 0;
}

hr_status hr_shape_bytes(const int64_t *shape, int ndim, int dtype, int64_t *bytes) {
    int64_t product = (int64_t)hr_dtype_bytes(dtype);
    int is_empty = 0;
    int overflows = 0;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] < 0) {
            return HORO_ERR_INTERNAL;
        }
        is_empty |= shape[i] == 0;
        overflows |= __builtin_mul_overflow(product, shape[i], &product);
    }
    if (overflows && !is_empty) {
        return HORO_ERR_INTERNAL;
    }
    *bytes = is_empty ? 0 : product;
    return HORO_OK;
}

size_t hr_tensor_bytes(const horo_tensor *tensor) {
    int64_t bytes = 0;
    (void)hr_shape_bytes(tensor->shape, tensor->ndim, tensor->dtype, &bytes);
    return (size_t)bytes;
}

const char *hr_dtype_name(int dtype) {
    return is_known(dtype) ? dtypes[dtype].name : "unknown";
}

int hr_dtype_is_integer(int dtype) {
    return (dtype >= HORO_UINT8 && dtype <= HORO_INT64) || (dtype >= HORO_UINT16 && dtype <= HORO_UINT64);
}

int hr_dtype_is_complex(int dtype) {
    return dtype >= HORO_COMPLEX32 && dtype <= HORO_COMPLEX128;
}

int hr_dtype_real(int dtype) {
    switch (dtype) {
    case HORO_COMPLEX32: return HORO_FLOAT16;
    case HORO_COMPLEX64: return HORO_FLOAT32;
    case HORO_COMPLEX128: return HORO_FLOAT64;
    default: return dtype;
    }
}

int hr_dtype_worked_on(int dtype, int reduce_op) {
    return reduce_op == HORO_PRODUCT ? dtype : hr_dtype_real(dtype);
}

int hr_dtype_reducible(int dtype, int reduce_op) {
    if (hr_dtype_is_complex(dtype)) {
        return reduce_op == HORO_SUM || reduce_op == HORO_AVERAGE || reduce_op == HORO_PRODUCT;
    }
    if (dtype < 0 || (dtype >= HORO_DTYPE_COUNT && !hr_dtype_is_integer(dtype))) {
        return 0;
    }
    switch (reduce_op) {
    case HORO_AVERAGE: return dtype != HORO_BOOL;
    case HORO_ADASUM: return !hr_dtype_is_integer(dtype) && dtype != HORO_BOOL;
    case HORO_SUM:
    case HORO_MIN:
    case HORO_MAX:
    case HORO_PRODUCT: return 1;
    case HORO_BAND:
    case HORO_BOR:
    case HORO_BXOR: return hr_dtype_is_integer(dtype) || dtype == HORO_BOOL;
    default: return 0;
    }
}

int hr_dtype_narrows(int dtype, int wire_dtype) {
    return (dtype == HORO_FLOAT32 || dtype == HORO_FLOAT64) &&
           (wire_dtype == HORO_FLOAT16 || wire_dtype == HORO_BFLOAT16);
}

HORO_API size_t horo_dtype_bytes(int dtype) {
    return hr_dtype_bytes(dtype);
}
