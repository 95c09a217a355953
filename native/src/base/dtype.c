#include "base/dtype.h"

struct dtype {
    const char *name;
    size_t bytes;
};

static const struct dtype dtypes[HORO_DTYPE_COUNT] = {
    [HORO_UINT8] = {"uint8", 1},       [HORO_INT8] = {"int8", 1},       [HORO_INT16] = {"int16", 2},
    [HORO_INT32] = {"int32", 4},       [HORO_INT64] = {"int64", 8},     [HORO_FLOAT16] = {"float16", 2},
    [HORO_BFLOAT16] = {"bfloat16", 2}, [HORO_FLOAT32] = {"float32", 4}, [HORO_FLOAT64] = {"float64", 8},
    [HORO_BOOL] = {"bool", 1},
};

static int is_known(int dtype) {
    return dtype >= 0 && dtype < HORO_DTYPE_COUNT;
}

size_t hr_dtype_bytes(int dtype) {
    return is_known(dtype) ? dtypes[dtype].bytes : 0;
}

const char *hr_dtype_name(int dtype) {
    return is_known(dtype) ? dtypes[dtype].name : "unknown";
}

int hr_dtype_is_integer(int dtype) {
    return dtype >= HORO_UINT8 && dtype <= HORO_INT64;
}

int hr_dtype_reducible(int dtype, int reduce_op) {
    if (!is_known(dtype)) {
        return 0;
    }
    switch (reduce_op) {
    case HORO_AVERAGE: return dtype != HORO_BOOL;
    case HORO_ADASUM: return !hr_dtype_is_integer(dtype) && dtype != HORO_BOOL;
    case HORO_SUM:
    case HORO_MIN:
    case HORO_MAX:
    case HORO_PRODUCT: return 1;
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
