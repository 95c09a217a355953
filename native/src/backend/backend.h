/*
 * A backend does whole collectives on buffers, wherever they live, as tasks (collective/segments.h). The engine decides
 * what runs and when; a backend decides how. All ranks of the team begin the same work in the same order, from the
 * driver of the engine, one at a time.
 */
#ifndef HR_BACKEND_BACKEND_H
#define HR_BACKEND_BACKEND_H

#include <stddef.h>
#include <stdint.h>

#include "node/team.h"

/* One tensor of a batch. */
struct hr_operand {
    const void *input;
    void *output;
    size_t bytes; /* of the input; of a reduce-scatter the output has the rows that fall to this rank */
    int dtype;
    int wire_dtype; /* of a reduction: travels as this 16-bit float; 0: as it is */
    size_t row_bytes; /* the product of the other extents times the element */
};

/* The result of an allgather or alltoall for one tensor, ready to be written before the work begins. */
struct hr_gathered {
    void *data;
    int is_given; /* data is the caller's; else malloc'ed */
    int64_t bytes;
    int64_t *first_dims; /* [size] rows from each rank */
};

/* One batch: what all its tensors have in common, and the tensors. The engine keeps the arrays until it is over. */
struct hr_work {
    int op;        /* one that moves data */
    int reduce_op; /* of a reduction; may be AVERAGE */
    int root_rank; /* broadcast */
    double prescale, postscale; /* of a reduction */
    const struct hr_operand *operands;
    size_t count;
    struct hr_gathered *results; /* allgather, alltoall: [count] */
    /* alltoall: [size][count][size] rows that each rank has of each tensor for each rank; no sum of bytes overflows */
    const int64_t *splits;
};

struct hr_backend;

struct hr_backend_ops {
    /*
     * The work becomes the one task of this backend. HORO_OK or a status: HORO_ERR_RESOURCE for lack of memory, which
     * ends the team, since other ranks may have begun. Operands of equal dtype and wire dtype are reduced as one
     * vector.
     */
    int (*begin)(struct hr_backend *backend, const struct hr_work *work);
    /*
     * Behind begin, while other ranks may not do the same: does what needs nothing of them. 1, or 0 where that is
     * nothing. Then, when all ranks have done so, lets the work go on; or it is cancelled. Both NULL: never.
     */
    int (*begin_ahead)(struct hr_backend *backend);
    void (*show_ahead)(struct hr_backend *backend);
    /* As in struct hr_task, for the work begun last. */
    int (*progress)(struct hr_backend *backend);
    void (*cancel)(struct hr_backend *backend);
};

struct hr_backend {
    const struct hr_backend_ops *ops;
};

/* Host memory over arena and transport; the team must outlive it. NULL for lack of memory, which destroy allows. */
struct hr_backend *hr_host_backend_create(struct hr_team *team);
void hr_host_backend_destroy(struct hr_backend *backend);

/* AVERAGE is a sum and a factor. */
int hr_operation_of(int reduce_op);
/* The scale for the sum of `dtype` over `size` ranks, where the user asked for `postscale` besides. */
struct hr_scale hr_postscale_of(int reduce_op, double postscale, int dtype, int size);

#endif
