/* The numbers of operations and dtypes: their names, and what they have or can do. */
#ifndef HR_BASE_TRAITS_H
#define HR_BASE_TRAITS_H

#include <stddef.h>

#include "base/status.h"

/* ---- Operations ---- */

/* The names of the operations in messages. */

/* "allreduce"; "unknown operation" for an unknown one. */
const char *hr_op_name(int op);

/* Whether it combines values, so that it has a reduction, factors, and dtypes to travel as. */
int hr_op_reduces(int op);

/* Whether one rank gives to all, or gets of all. */
int hr_op_has_root(int op);

/* Whether each rank has something else for each: an alltoall, or one in which only the root has or gets something. */
int hr_op_exchanges(int op);

/*
 * Whether each rank tells all others of rows, which may differ by rank and time, and gets results whose size comes of
 * them.
 */
int hr_op_tells_rows(int op);

/* Whether it moves data, or says which teams there are; else all that there is to it is that all have submitted it. */
int hr_op_has_tensors(int op);

/* Whether who submits it has nothing more to submit until all have done so; and the name of the requests for it. */
#define HR_JOIN_NAME "join.noname"
int hr_op_is_last(int op);

/* Whether it changes which teams there are, and moves no data; and the name of the requests for it. */
#define HR_CHANGE_NAME "add_process_set or remove_process_set"
int hr_op_is_of_teams(int op);

/* Whether its batch is begun before it is agreed on: not without data, or with sizes of other ranks. */
int hr_op_is_begun_ahead(int op);

/* Whether it is between two ranks alone, outside all agreement. */
int hr_op_is_of_pairs(int op);

/* Whether it moves data. */
int hr_op_moves_data(int op);

/* The name of an ordered call here, by its number: "call 17". Returns its bytes without the terminator. */
enum { HR_CALL_NAME_BYTES = 32 };
size_t hr_name_call(uint64_t number, char *name);

/* ---- Dtypes ---- */

/* The names and sizes of the dtypes, and what can be done with them. */

enum { HR_REDUCED_DTYPE_COUNT = HORO_COMPLEX128 + 1 }; /* of tables of what is reduced; some rows stay empty */

/* Bytes per element, 0 for an unknown dtype. */
size_t hr_dtype_bytes(int dtype);
/*
 * The bytes of elements with these extents: 0 where any extent is 0, however large the others are. HORO_ERR_INTERNAL
 * for a negative extent, and for more bytes than int64 holds.
 */
hr_status hr_shape_bytes(const int64_t *shape, int ndim, int dtype, int64_t *bytes);
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
