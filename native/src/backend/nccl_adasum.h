/*
 * Adasum (adasum.h) of tensors in the memory of GPUs, by NCCL and kernels of horo's own: the same tree, with the same
 * arithmetic (docs/adr/0050-adasum-stays-on-the-gpu.md). Tensors that travel in one dtype are one vector, each rank has
 * a share of it, and all of a batch goes through these phases at once:
 *
 *     phase   | what is put on the stream
 *     --------+-----------------------------------------------------------------------------------------------------
 *     SCATTER | where tensors are several, scaled or narrowed, a kernel that packs them; sends and recvs of shares
 *     SUM     | for each level of the tree: kernels that multiply, an allreduce of what comes of that, and then, in
 *             | front of the next phase, a kernel that combines
 *     GATHER  | what has come of the shares to all ranks; a kernel that unpacks
 *
 * The host waits for nothing but for NCCL to have put its part of a phase on the stream.
 */
#ifndef HR_BACKEND_NCCL_ADASUM_H
#define HR_BACKEND_NCCL_ADASUM_H

#include "backend/backend.h"
#include "device/nccl_comm.h"
#include "device/packer.h"
#include "device/table.h"

enum hr_nccl_adasum_phase { HR_NCCL_ADASUM_SCATTER, HR_NCCL_ADASUM_SUM, HR_NCCL_ADASUM_GATHER, HR_NCCL_ADASUM_OVER };

/* Tensors that travel in one dtype, as one vector. Each rank has a share, in their order, the last one the rest. */
struct hr_nccl_adasum_row {
    int dtype;
    int is_packed;           /* its vector is in the room; else it is the only tensor itself */
    size_t width, count;     /* bytes of a value; values */
    size_t tensor_count;     /* not empty */
    size_t each, rest, own;  /* values */
    size_t packed, shares;   /* where in the room: the vector, and the shares that this rank has of all ranks */
    size_t stride;           /* bytes from one of them to the next */
    const char *sent;
    char *received;
};

struct hr_nccl_adasum_place {
    size_t row, at; /* in its row: values in front of it */
};

/* Zeroed, then the first four set. */
struct hr_nccl_adasum {
    const struct hr_team *team;
    struct hr_nccl_comm *comm;
    struct hr_stager *stager;
    const struct hr_packer *packer;
    enum hr_nccl_adasum_phase phase;
    int distance;  /* of the ranks of a pair */
    size_t tensor_count;
    int has_folds; /* pieces with more partial sums than a block has threads */
    struct hr_nccl_adasum_row rows[HORO_DTYPE_COUNT];
    size_t row_count;
    struct hr_adasum_batch batch;
    size_t in_count, out_count; /* of what is packed and unpacked */
    unsigned in_blocks, out_blocks;
    struct hr_room *room; /* the kernels' table, vectors and shares, sums and partial sums; NULL: there is none */
    size_t sums, partials, bytes; /* where in the room; all of it */
    struct hr_table table; /* the batch, its pieces, and those of what is packed and unpacked */
    size_t in_table, out_table; /* where in the table */
    struct hr_nccl_call *calls; /* of the launch under way */
    size_t call_count;
    /* [capacity], by tensor. Places in the room are counted from its beginning, until the table is written */
    struct hr_nccl_adasum_place *places;
    struct hr_adasum_piece *pieces;
    struct hr_pack_piece *in, *out;
    size_t capacity;
};

/*
 * For IDLE communicators, of several ranks. HORO_OK, or HORO_ERR_RESOURCE for lack of the host's memory; what else
 * fails is the communicator's, which is BROKEN then.
 */
int hr_nccl_adasum_begin(struct hr_nccl_adasum *self, const struct hr_work *work);
/* As in struct hr_task. */
int hr_nccl_adasum_progress(struct hr_nccl_adasum *self);
/* Gives the room back, in the order of the stream. */
void hr_nccl_adasum_leave(struct hr_nccl_adasum *self);
void hr_nccl_adasum_fini(struct hr_nccl_adasum *self);

#endif
