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

/* The room into which MPI writes a status; nothing of it is looked at. */
struct status {
    _Alignas(16) char bytes[HORO_MPI_STATUS_MAX];
};

typedef int issend_function(const void *, int, HANDLE, int, int, HANDLE, HANDLE *);

static int call_issend(const struct hr_mpi *mpi, const void *data, size_t bytes, int rank, int tag, uint64_t *request) {
    HANDLE handle = TO_HANDLE(0);
    const int code = FUNCTION(mpi, HORO_MPI_ISSEND, issend_function)(
        data, (int)bytes, TO_HANDLE(mpi->calls.byte), rank, tag, TO_HANDLE(mpi->calls.communicator), &handle);
    *request = TO_VALUE(handle);
    return code;
}

typedef int irecv_function(void *, int, HANDLE, int, int, HANDLE, HANDLE *);

static int call_irecv(const struct hr_mpi *mpi, void *data, size_t bytes, int rank, int tag, uint64_t *request) {
    HANDLE handle = TO_HANDLE(0);
    const int code = FUNCTION(mpi, HORO_MPI_IRECV, irecv_function)(
        data, (int)bytes, TO_HANDLE(mpi->calls.byte), rank, tag, TO_HANDLE(mpi->calls.communicator), &handle);
    *request = TO_VALUE(handle);
    return code;
}

typedef int test_function(HANDLE *, int *, void *);

static int call_test(const struct hr_mpi *mpi, uint64_t *request, int *done) {
    HANDLE handle = TO_HANDLE(*request);
    struct status status;
    *done = 0;
    const int code = FUNCTION(mpi, HORO_MPI_TEST, test_function)(&handle, done, status.bytes);
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
    .issend = call_issend,
    .irecv = call_irecv,
    .test = call_test,
    .change = call_change,
};
