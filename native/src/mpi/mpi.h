/*
 * The MPI of this process, whatever its handles are. horo is built without one: the bootstrap brings the addresses of
 * its functions and the values of its handles (horo_mpi). Handles are int in the MPICH family and pointers in Open MPI
 * and in the ABI of MPI 5; calls_template.h is compiled once for each, so that every function is called with its true
 * type. Here a handle is a uint64_t of which the lower bytes count.
 *
 * Each operation returns what MPI returned, 0 for success; none blocks. At most calls.message_bytes go into one call.
 */
#ifndef HR_MPI_MPI_H
#define HR_MPI_MPI_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/status.h"

struct hr_mpi;

struct hr_mpi_ops {
    /*
     * HORO_MPI_ISSEND or HORO_MPI_IRECV. A send is done when the receiver has begun to receive: what is done needs no
     * further call of mine to arrive.
     */
    int (*start)(const struct hr_mpi *mpi, enum horo_mpi_function function, void *data, size_t bytes, int rank, int tag,
                 uint64_t *request);
    /* *done: the request is over and gone. Makes progress on all requests. */
    int (*test)(const struct hr_mpi *mpi, uint64_t *request, int *done);
    /* HORO_MPI_CANCEL or HORO_MPI_REQUEST_FREE. */
    int (*change)(const struct hr_mpi *mpi, enum horo_mpi_function function, uint64_t *request);
};

extern const struct hr_mpi_ops hr_mpi_int_ops;
extern const struct hr_mpi_ops hr_mpi_pointer_ops;

struct hr_mpi {
    const struct hr_mpi_ops *ops; /* NULL: there is no MPI */
    horo_mpi calls;               /* its arrays are the bootstrap's: gone once the context is created */
    pid_t pid;                    /* a forked child must not touch its parent's MPI */
    _Atomic uint64_t stranded;    /* requests given up that MPI has not given back */
};

/* Checks and copies. HORO_OK, or HORO_ERR_USAGE with a sentence that names what is wrong. */
hr_status hr_mpi_init(struct hr_mpi *mpi, const horo_mpi *calls, struct hr_error *error);

/* Whether MPI may be called: it is this process's own and has not been finalized. */
int hr_mpi_is_usable(const struct hr_mpi *mpi);

#endif
