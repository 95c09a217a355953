/*
 * What goes into the tensors of an operation and, by arithmetic, what must come out: small integers, so that results
 * are exact.
 */
#ifndef STRESS_VALUES_H
#define STRESS_VALUES_H

#include "schedule.h"

/*
 * Rows of an allgather or alltoall that a rank has, and of those that it has for another one; for all, of an allgather.
 */
int64_t values_rows(const struct operation *operation, const struct team *team, int rank);
int64_t values_rows_for(const struct operation *operation, int rank, int other);

/* The input of a rank. */
void values_fill(const struct operation *operation, int tensor, int rank, int dtype, int64_t count, void *memory);

/*
 * 1 if the result of a tensor on a rank is right, else 0 with *at, *got and *wanted. `team`: those that have taken
 * part, of `everyone`, by whose number an average divides. All elements of small tensors are looked at, of large ones
 * the first, the last and some.
 */
int values_check(const struct operation *operation, const struct team *team, int everyone, int tensor, int rank,
                 const void *memory, int64_t *at, double *got, double *wanted);
/* The same for an allgather or alltoall: what comes from one rank for another. */
int values_check_part(const struct operation *operation, const struct team *team, int rank, int other,
                      const void *memory, int64_t *at, double *got, double *wanted);

#endif
