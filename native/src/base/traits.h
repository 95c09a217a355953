/* The numbers of operations and dtypes: their names, and what they have or can do. */
#ifndef HR_BASE_TRAITS_H
#define HR_BASE_TRAITS_H

#include <stddef.h>

#include "base/status.h"

/* ---- Operations ---- */

/* Traits of operations, as bits; traits.c has those of each. */
enum hr_op_trait {
    HR_OP_REDUCTION = 1 << 0, /* it combines values, so that it has a reduction, factors, and dtypes to travel as */
    HR_OP_ROOTED = 1 << 1,    /* one rank gives to all, or gets of all */
    /* each rank has something else for each: an alltoall, or one in which only the root has or gets something */
    HR_OP_EXCHANGE = 1 << 2,
    /* each rank tells all others of rows, which may differ by rank and time, and gets results of their size */
    HR_OP_TELLING_ROWS = 1 << 3,
    /* it moves data, or says which teams there are; else all that there is to it is that all have submitted it */
    HR_OP_WITH_TENSORS = 1 << 4,
    HR_OP_MOVING_DATA = 1 << 5,
    HR_OP_BEGUN_AHEAD = 1 << 6, /* before it is agreed on: not without data */
    HR_OP_OF_TEAMS = 1 << 7,    /* it changes which teams there are */
    HR_OP_LAST = 1 << 8,        /* a rank that submits it has nothing more to submit until all have done so */
    HR_OP_OF_PAIRS = 1 << 9,    /* between two ranks alone, outside all agreement */
};
/* Whether it has this trait; no operation that is unknown has any. */
int hr_op_is(int op, enum hr_op_trait trait);

/* "allreduce"; "unknown operation" for an unknown one. */
const char *hr_op_name(int op);

/* The names of the requests to join, and of those that change which teams there are. */
#define HR_JOIN_NAME "join.noname"
#define HR_CHANGE_NAME "add_process_set or remove_process_set"

/* The name of an ordered call here, by its number: "call 17". Returns its bytes without the terminator. */
enum { HR_CALL_NAME_BYTES = 32 };
size_t hr_name_call(uint64_t number, char *name);

/* ---- Dtypes ---- */

enum { HR_REDUCED_DTYPE_COUNT = HORO_COMPLEX128 + 1 }; /* of tables of what is reduced; some rows stay empty */

/* Bytes per element, 0 for an unknown dtype. */
size_t hr_dtype_bytes(int dtype);
/* Bytes of these extents: 0 if one is 0, however large the others. HORO_ERR_INTERNAL: negative, or beyond int64. */
hr_status hr_shape_bytes(const int64_t *shape, int ndim, int dtype, int64_t *bytes);
/* The same of a tensor that has been checked. */
size_t hr_tensor_bytes(const horo_tensor *tensor);
/* "float32"; "unknown" for an unknown one. */
const char *hr_dtype_name(int dtype);
/* bool is none. */
int hr_dtype_is_integer(int dtype);
int hr_dtype_is_complex(int dtype);
/* The dtype of the two parts of a complex number; any other dtype is its own. */
int hr_dtype_real(int dtype);
/*
 * The dtype of the values that an operation works on: of complex numbers their parts, but for a PRODUCT, which takes
 * them whole. `reduce_op` of what reduces nothing: SUM.
 */
int hr_dtype_worked_on(int dtype, int reduce_op);
/* Whether reductions offer this combination; bool has no AVERAGE, complex numbers have SUM, AVERAGE and PRODUCT. */
int hr_dtype_reducible(int dtype, int reduce_op);
/* Whether reductions can send values of `dtype` as `wire_dtype`: a 16-bit float for a wider one. */
int hr_dtype_narrows(int dtype, int wire_dtype);

#endif
