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

static HANDLE known(const struct hr_mpi *mpi, enum horo_mpi_handle index) {
    return TO_HANDLE(mpi->calls.handles[index]);
}

static HANDLE communicator(const struct hr_mpi *mpi) {
    return TO_HANDLE(mpi->calls.communicator);
}

static void *in_place(const struct hr_mpi *mpi) {
    return (void *)(uintptr_t)mpi->calls.in_place;
}

/* Calls a function that changes one handle. */
static int change(uint64_t *value, int (*function)(HANDLE *)) {
    HANDLE handle = TO_HANDLE(*value);
    const int code = function(&handle);
    *value = TO_VALUE(handle);
    return code;
}

typedef int issend_function(const void *, int, HANDLE, int, int, HANDLE, HANDLE *);

static int call_issend(const struct hr_mpi *mpi, const void *data, size_t bytes, int rank, int tag, uint64_t *request) {
    HANDLE handle = TO_HANDLE(0);
    const int code = FUNCTION(mpi, HORO_MPI_ISSEND, issend_function)(data, (int)bytes, known(mpi, HORO_MPI_BYTE), rank,
                                                                     tag, communicator(mpi), &handle);
    *request = TO_VALUE(handle);
    return code;
}

typedef int irecv_function(void *, int, HANDLE, int, int, HANDLE, HANDLE *);

static int call_irecv(const struct hr_mpi *mpi, void *data, size_t bytes, int rank, int tag, uint64_t *request) {
    HANDLE handle = TO_HANDLE(0);
    const int code = FUNCTION(mpi, HORO_MPI_IRECV, irecv_function)(data, (int)bytes, known(mpi, HORO_MPI_BYTE), rank,
                                                                   tag, communicator(mpi), &handle);
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

static int call_cancel(const struct hr_mpi *mpi, uint64_t *request) {
    return change(request, FUNCTION(mpi, HORO_MPI_CANCEL, change_function));
}

static int call_request_free(const struct hr_mpi *mpi, uint64_t *request) {
    return change(request, FUNCTION(mpi, HORO_MPI_REQUEST_FREE, change_function));
}

typedef int iallreduce_function(const void *, void *, int, HANDLE, HANDLE, HANDLE, HANDLE *);

static int call_iallreduce(const struct hr_mpi *mpi, void *data, int count, uint64_t type, uint64_t op,
                           uint64_t *request) {
    HANDLE handle = TO_HANDLE(0);
    const int code = FUNCTION(mpi, HORO_MPI_IALLREDUCE, iallreduce_function)(
        in_place(mpi), data, count, TO_HANDLE(type), TO_HANDLE(op), communicator(mpi), &handle);
    *request = TO_VALUE(handle);
    return code;
}

typedef int ibcast_function(void *, int, HANDLE, int, HANDLE, HANDLE *);

static int call_ibcast(const struct hr_mpi *mpi, void *data, size_t bytes, int root, uint64_t *request) {
    HANDLE handle = TO_HANDLE(0);
    const int code = FUNCTION(mpi, HORO_MPI_IBCAST, ibcast_function)(data, (int)bytes, known(mpi, HORO_MPI_BYTE), root,
                                                                     communicator(mpi), &handle);
    *request = TO_VALUE(handle);
    return code;
}

typedef int iallgatherv_function(const void *, int, HANDLE, void *, const int *, const int *, HANDLE, HANDLE, HANDLE *);

static int call_iallgatherv(const struct hr_mpi *mpi, void *data, const int *counts, const int *offsets,
                            uint64_t *request) {
    HANDLE handle = TO_HANDLE(0);
    HANDLE byte = known(mpi, HORO_MPI_BYTE);
    const int code = FUNCTION(mpi, HORO_MPI_IALLGATHERV, iallgatherv_function)(
        in_place(mpi), 0, byte, data, counts, offsets, byte, communicator(mpi), &handle);
    *request = TO_VALUE(handle);
    return code;
}

typedef int ireduce_scatter_function(const void *, void *, const int *, HANDLE, HANDLE, HANDLE, HANDLE *);

static int call_ireduce_scatter(const struct hr_mpi *mpi, void *data, const int *counts, uint64_t type, uint64_t op,
                                uint64_t *request) {
    HANDLE handle = TO_HANDLE(0);
    const int code = FUNCTION(mpi, HORO_MPI_IREDUCE_SCATTER, ireduce_scatter_function)(
        in_place(mpi), data, counts, TO_HANDLE(type), TO_HANDLE(op), communicator(mpi), &handle);
    *request = TO_VALUE(handle);
    return code;
}

typedef int ialltoallv_function(const void *, const int *, const int *, HANDLE, void *, const int *, const int *,
                                HANDLE, HANDLE, HANDLE *);

static int call_ialltoallv(const struct hr_mpi *mpi, const struct hr_mpi_blocks *sent,
                           const struct hr_mpi_blocks *received, uint64_t *request) {
    HANDLE handle = TO_HANDLE(0);
    HANDLE byte = known(mpi, HORO_MPI_BYTE);
    const int code = FUNCTION(mpi, HORO_MPI_IALLTOALLV, ialltoallv_function)(
        sent->data, sent->counts, sent->offsets, byte, received->data, received->counts, received->offsets, byte,
        communicator(mpi), &handle);
    *request = TO_VALUE(handle);
    return code;
}

typedef int contiguous_function(int, HANDLE, HANDLE *);

static int call_type_create(const struct hr_mpi *mpi, int bytes, uint64_t *type) {
    HANDLE handle = TO_HANDLE(0);
    int code = FUNCTION(mpi, HORO_MPI_TYPE_CONTIGUOUS, contiguous_function)(bytes, known(mpi, HORO_MPI_BYTE), &handle);
    if (code == 0) {
        code = FUNCTION(mpi, HORO_MPI_TYPE_COMMIT, change_function)(&handle);
    }
    *type = TO_VALUE(handle);
    return code;
}

static int call_type_free(const struct hr_mpi *mpi, uint64_t *type) {
    return change(type, FUNCTION(mpi, HORO_MPI_TYPE_FREE, change_function));
}

typedef int op_create_function(hr_mpi_reducer *, int, HANDLE *);

static int call_op_create(const struct hr_mpi *mpi, hr_mpi_reducer *reducer, int commutes, uint64_t *op) {
    HANDLE handle = TO_HANDLE(0);
    const int code = FUNCTION(mpi, HORO_MPI_OP_CREATE, op_create_function)(reducer, commutes, &handle);
    *op = TO_VALUE(handle);
    return code;
}

static int call_op_free(const struct hr_mpi *mpi, uint64_t *op) {
    return change(op, FUNCTION(mpi, HORO_MPI_OP_FREE, change_function));
}

const struct hr_mpi_ops TABLE = {
    .issend = call_issend,
    .irecv = call_irecv,
    .test = call_test,
    .cancel = call_cancel,
    .request_free = call_request_free,
    .iallreduce = call_iallreduce,
    .ibcast = call_ibcast,
    .iallgatherv = call_iallgatherv,
    .ireduce_scatter = call_ireduce_scatter,
    .ialltoallv = call_ialltoallv,
    .type_create = call_type_create,
    .type_free = call_type_free,
    .op_create = call_op_create,
    .op_free = call_op_free,
};
