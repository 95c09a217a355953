/* Handles as the MPICH family has them: MPICH, Intel MPI, MVAPICH. */
#define HANDLE int
#define TO_HANDLE(value) ((int)(uint32_t)(value))
#define TO_VALUE(handle) ((uint64_t)(uint32_t)(handle))
#define TABLE hr_mpi_int_ops
#include "mpi/calls_template.h"
