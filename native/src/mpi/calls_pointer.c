/* Handles as Open MPI and the ABI of MPI 5 have them. */
#define HANDLE void *
#define TO_HANDLE(value) ((void *)(uintptr_t)(value))
#define TO_VALUE(handle) ((uint64_t)(uintptr_t)(handle))
#define TABLE hr_mpi_pointer_ops
#include "mpi/calls_template.h"
