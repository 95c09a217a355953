/*
 * A backend does one whole collective on buffers, wherever they live. The engine decides what runs and when; a backend decides how.
 * All ranks of the group call the same function with matching arguments in the same order, from the driver of the engine.
 */
#ifndef HR_BACKEND_BACKEND_H
#define HR_BACKEND_BACKEND_H

#include <stddef.h>
#include <stdint.h>

#include "collective/group.h"

/* One tensor of a batch. */
struct hr_operand {
    const void *input;
    void *output;
    size_t bytes;
    int dtype;
    int wire_dtype; /* allreduce: travels as this 16-bit float; 0: as it is */
};

/* The result of an allgather for one tensor; the data is malloc'ed. */
struct hr_gathered {
    void *data;
    int64_t bytes;
    int64_t *first_dims; /* [size] */
};

struct hr_backend;

/* Each returns HORO_OK or a status; HORO_ERR_RESOURCE only if no rank can have begun (the engine ends the group otherwise). */
struct hr_backend_ops {
    const char *name;
    /* All operands; reduce_op may be AVERAGE. Operands of equal dtype and wire dtype are reduced as one vector. */
    int (*allreduce)(struct hr_backend *backend, const struct hr_operand *operands, size_t count, int reduce_op,
                     double prescale, double postscale);
    int (*broadcast)(struct hr_backend *backend, const struct hr_operand *operands, size_t count, int root_rank);
    /* row_bytes[i]: bytes per row of operand i (its product of the other extents times the element), rows[i]: my rows. */
    int (*allgather)(struct hr_backend *backend, const struct hr_operand *operands, const int64_t *rows,
                     const size_t *row_bytes, size_t count, struct hr_gathered *results);
    void (*destroy)(struct hr_backend *backend);
};

struct hr_backend {
    const struct hr_backend_ops *ops;
};

/* Host memory over arena and transport; the group must outlive it. NULL for lack of memory. */
struct hr_backend *hr_host_backend_create(struct hr_group *group);

/*
 * Host memory by the collectives of group->mpi, whose communicator numbers the ranks as the group does. The group must outlive it.
 * A batch whose group has ended leaves what it has begun with MPI: it is counted in group->mpi.stranded, its scratch is never freed,
 * and MPI may still touch the operands. NULL with *error set.
 */
struct hr_backend *hr_mpi_backend_create(struct hr_group *group, struct hr_error *error);

#endif
