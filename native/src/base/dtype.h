/* The names and sizes of the dtypes, and what can be done with them. */
#ifndef HR_BASE_DTYPE_H
#define HR_BASE_DTYPE_H

#include <stddef.h>

#include "horo.h"

enum { HR_REDUCED_DTYPE_COUNT = HORO_COMPLEX128 + 1 }; /* of tables of what is reduced; some rows stay empty */

/* Bytes per element, 0 for an unknown dtype. */
size_t hr_dtype_bytes(int dtype);
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
