/* The state of the backend that MPI does, and its transfers; shared by the files of that backend only. */
#ifndef HR_BACKEND_MPI_BACKEND_H
#define HR_BACKEND_MPI_BACKEND_H

#include "backend/operands.h"
#include "backend/reduction.h"

/* One stretch of memory on its way. */
struct hr_mpi_transfer {
    int op; /* parts for several ranks lie one behind the other */
    char *data;
    char *received; /* alltoall: where received data goes */
    size_t bytes; /* broadcast within an allgather: of the rank that is root now */
    size_t at;    /* handed to MPI so far */
    int root;
    int ranks_left; /* allgather beyond what one call reaches: ranks whose parts are still to be broadcast */
};

/* The factors of one reduction: pre is multiplied in before it, post after. */
struct hr_mpi_factors {
    double pre;
    struct hr_scale post;
};

/* Scratch of what has a part for each rank. */
struct hr_mpi_parts {
    size_t *bytes; /* [size]; alltoall: [size * size], from each to each */
    int *counts;   /* [size]; alltoall: what goes to each, and behind it what comes from each */
    int *offsets;  /* likewise */
    size_t next;   /* allgather: operand; else share: of the kind that is being reduced, or of everything */
    /* reduce-scatter: the kind that is being reduced, [size]; alltoall: what goes to each, and behind it what comes */
    struct hr_fused *by_rank;
    size_t share_count;
};

struct hr_mpi_backend {
    struct hr_backend base;
    struct hr_team *team;
    struct hr_mpi *mpi;
    struct hr_reductions reductions;
    struct hr_pieces pieces;
    char *scratch;
    size_t scratch_bytes;

    struct hr_work work;
    struct hr_kinds kinds;
    struct hr_fused fused; /* allreduce: the kind that is being reduced; broadcast: everything */
    size_t fused_at;       /* how much of it has travelled, the current transfer included */
    int is_packed;         /* the current transfer is from and to scratch */
    struct hr_mpi_transfer transfer;
    struct hr_mpi_parts parts;
    int has_call; /* `request` is with MPI */
    uint64_t request;
};

/* mpi.c: scratch of so many bytes, whose former content is lost. HORO_OK or HORO_ERR_RESOURCE. */
int hr_mpi_reserve_scratch(struct hr_mpi_backend *self, size_t bytes);
/* Of reductions with a codec. */
struct hr_mpi_factors hr_mpi_factors_of(const struct hr_mpi_backend *self, const struct hr_codec *codec);

/* mpi_parts.c: before and after what has a part for each rank. begin: HORO_OK or HORO_ERR_RESOURCE. */
int hr_mpi_begin_parts(struct hr_mpi_backend *self);
void hr_mpi_end_parts(struct hr_mpi_backend *self);
/* The next transfer: HR_TASK_MOVED, HR_TASK_DONE if there is none, or a status. */
int hr_mpi_begin_of_gather(struct hr_mpi_backend *self);
int hr_mpi_begin_of_scatter(struct hr_mpi_backend *self);
int hr_mpi_begin_of_exchange(struct hr_mpi_backend *self);
/* A transfer of the latter two is over: scales and unpacks what has come. */
void hr_mpi_end_of_scatter(struct hr_mpi_backend *self);
void hr_mpi_end_of_exchange(struct hr_mpi_backend *self);

#endif
