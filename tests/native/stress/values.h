/*
 * What goes into the tensors of an operation and, by arithmetic, what must come out: small integers, so that results
 * are exact.
 */
#ifndef STRESS_VALUES_H
#define STRESS_VALUES_H

#include "schedule.h"

/* Elements that a rank hands over in a tensor; for an allgather rows * columns. */
int64_t values_count(const struct operation *operation, int tensor, int rank);
int64_t values_rows(const struct operation *operation, int rank);

/* The input of a rank. */
void values_fill(const struct operation *operation, int tensor, int rank, int dtype, int64_t count, void *memory);

/*
 * 1 if the result of a tensor on a rank is right, else 0 with *at, *got and *wanted. All elements of small tensors are
 * looked at, of large ones the first, the last and some.
 */
int values_check(const struct operation *operation, const struct team *team, int tensor, int rank, const void *memory,
                 int64_t *at, double *got, double *wanted);
/* The same for an allgather: the part of one rank. */
int values_check_part(const struct operation *operation, int rank, const void *memory, int64_t *at, double *got,
                      double *wanted);

#endif
