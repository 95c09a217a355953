#include "mpi/mpi.h"

#include <unistd.h>

static const char *const function_names[HORO_MPI_FUNCTION_COUNT] = {
    [HORO_MPI_ISSEND] = "MPI_Issend",
    [HORO_MPI_IRECV] = "MPI_Irecv",
    [HORO_MPI_TEST] = "MPI_Test",
    [HORO_MPI_CANCEL] = "MPI_Cancel",
    [HORO_MPI_REQUEST_FREE] = "MPI_Request_free",
    [HORO_MPI_FINALIZED] = "MPI_Finalized",
};

_Static_assert(sizeof(((horo_mpi *)0)->functions) == HORO_MPI_FUNCTION_COUNT * sizeof(uint64_t),
               "cffi wants a number there");

hr_status hr_mpi_init(struct hr_mpi *mpi, const horo_mpi *calls, struct hr_error *error) {
    if (calls->handle_bytes != (int)sizeof(int) && calls->handle_bytes != (int)sizeof(void *)) {
        return hr_fail(error, HORO_ERR_USAGE, "this MPI has handles of %d bytes; horo knows those of %zu and %zu bytes",
                       calls->handle_bytes, sizeof(int), sizeof(void *));
    }
    if (calls->status_bytes < 1 || calls->status_bytes > HORO_MPI_STATUS_MAX) {
        return hr_fail(error, HORO_ERR_USAGE, "this MPI has an MPI_Status of %d bytes; horo has room for 1 to %d",
                       calls->status_bytes, HORO_MPI_STATUS_MAX);
    }
    if (calls->message_bytes < 1 || calls->message_bytes > HORO_MPI_MESSAGE_MAX) {
        return hr_fail(error, HORO_ERR_USAGE, "one call of MPI may take 1 to %d bytes, not %d", HORO_MPI_MESSAGE_MAX,
                       calls->message_bytes);
    }
    for (int i = 0; i < HORO_MPI_FUNCTION_COUNT; i++) {
        if (calls->functions[i] == 0) {
            return hr_fail(error, HORO_ERR_USAGE, "the address of %s is missing", function_names[i]);
        }
    }
    mpi->ops = calls->handle_bytes == (int)sizeof(int) ? &hr_mpi_int_ops : &hr_mpi_pointer_ops;
    mpi->calls = *calls;
    mpi->pid = getpid();
    return HORO_OK;
}

typedef int finalized_function(int *);

int hr_mpi_is_usable(const struct hr_mpi *mpi) {
    int finalized = 0;
    return mpi->pid == getpid() &&
           ((finalized_function *)(uintptr_t)mpi->calls.functions[HORO_MPI_FINALIZED])(&finalized) == 0 && !finalized;
}
