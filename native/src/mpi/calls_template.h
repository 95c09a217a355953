/*
 * The calls, with their true types. No include guard: calls_int.c and calls_pointer.c include it once each, after
 * defining
 *   HANDLE             the C type of every handle
 *   TO_HANDLE(value)   a handle from its uint64_t
 *   TO_VALUE(handle)   and back
 *   TABLE              the name of the table
 */
#include "mpi/mpi.h"

/* Casts an address to a pointer to a function of `type`. */
#define FUNCTION(mpi, index, type) ((type *)(uintptr_t)(mpi)->calls.functions[index])

typedef int issend_function(const void *, int, HANDLE, int, int, HANDLE, HANDLE *);
typedef int irecv_function(void *, int, HANDLE, int, int, HANDLE, HANDLE *);

static int call_start(const struct hr_mpi *mpi, enum horo_mpi_function function, void *data, size_t bytes, int rank,
                      int tag, uint64_t *request) {
    HANDLE handle = TO_HANDLE(0);
    HANDLE byte = TO_HANDLE(mpi->calls.byte);
    HANDLE ranks = TO_HANDLE(mpi->calls.communicator);
    const int code =
        function == HORO_MPI_ISSEND
            ? FUNCTION(mpi, function, issend_function)(data, (int)bytes, byte, rank, tag, ranks, &handle)
            : FUNCTION(mpi, function, irecv_function)(data, (int)bytes, byte, rank, tag, ranks, &handle);
    *request = TO_VALUE(handle);
    return code;
}

typedef int test_function(HANDLE *, int *, void *);

static int call_test(const struct hr_mpi *mpi, uint64_t *request, int *done) {
    HANDLE handle = TO_HANDLE(*request);
    _Alignas(16) char status[HORO_MPI_STATUS_MAX]; /* nothing of it is looked at */
    *done = 0;
    const int code = FUNCTION(mpi, HORO_MPI_TEST, test_function)(&handle, done, status);
    *request = TO_VALUE(handle);
    return code;
}

typedef int change_function(HANDLE *);

static int call_change(const struct hr_mpi *mpi, enum horo_mpi_function function, uint64_t *request) {
    HANDLE handle = TO_HANDLE(*request);
    const int code = FUNCTION(mpi, function, change_function)(&handle);
    *request = TO_VALUE(handle);
    return code;
}

const struct hr_mpi_ops TABLE = {
    .start = call_start,
    .test = call_test,
    .change = call_change,
};
