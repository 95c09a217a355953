/*
 * The tensors that NCCL reduces in another form than they have in memory: values that travel as 16-bit floats, integers
 * that are multiplied or divided, dtypes and reductions that NCCL lacks. Kernels of horo's put it into a buffer, NCCL
 * reduces that, and kernels take the results out; see docs/adr/0048-kernels-of-horos-own.md.
 */
#ifndef HR_BACKEND_NCCL_PACK_H
#define HR_BACKEND_NCCL_PACK_H

#include "backend/backend.h"
#include "device/packer.h"
#include "device/table.h"

/* In which form NCCL reduces values. */
struct hr_nccl_form {
    int dtype;
    int reduce_op; /* SUM, MIN, MAX or PRODUCT */
    int is_packed; /* else NCCL takes the tensor itself */
};

/* Of an operand of a reduction. */
struct hr_nccl_form hr_nccl_form_of(const struct hr_work *work, size_t i);
/* Whether kernels of horo's take part if NCCL does it: a request has tensors that are packed, or is an Adasum. */
int hr_nccl_needs_kernels(const horo_request *call);

struct hr_packed_place {
    size_t at, bytes;
};

/* An allreduce passes a buffer of this size, in as many rounds as it takes. */
enum { HR_NCCL_PACK_BYTES = 32 << 20 };
/* The most that a round puts on the stream, beside NCCL's: memory, the table, both kernels, and events behind them. */
enum { HR_NCCL_PACK_WEIGHT = 8 };

/* The buffer of a batch. Zeroed, then the first two set. */
struct hr_nccl_pack {
    struct hr_stager *stager;
    const struct hr_packer *packer;
    struct hr_room *room;         /* the pieces of both kernels, and the buffer; NULL: nothing is packed */
    struct hr_table table;        /* the pieces */
    struct hr_operand *operands;  /* [count] of the batch: where NCCL finds what this round has of it, in its form */
    size_t *row_bytes;            /* [count] likewise */
    struct hr_packed_place *places; /* [count] in the buffer, if that had room for all; empty: not packed */
    size_t total, begin, end;     /* bytes of all; those of this round */
    size_t head;                  /* bytes of the room before the buffer: for the pieces */
    struct hr_pack_piece *pieces; /* [2][count] scratch: those of the kernel that packs, and of the one that unpacks */
    size_t capacity;
    size_t in_count, out_count;   /* of pieces */
    unsigned out_blocks;
};

/*
 * Begins the first round: puts what must be packed, or as much of it as the buffer holds, there, in the order of
 * `stream`, and fills in operands and row_bytes of it: inputs are outputs, but for the rows of this rank of a
 * reduce-scatter. Those of an allreduce that travel alike and follow one another lie beside each other. `rank` of
 * `size`. HORO_OK, or a status with *error set.
 */
int hr_nccl_pack_begin(struct hr_nccl_pack *pack, const struct hr_work *work, int rank, int size, void *stream,
                       struct hr_error *error);
/*
 * The end of a round: takes its results out, behind what is on the stream, and gives the buffer back after the last
 * one. HORO_OK or as begin.
 */
int hr_nccl_pack_end(struct hr_nccl_pack *pack, void *stream, struct hr_error *error);
/* Between two rounds: there is a buffer still. As begin. */
int hr_nccl_pack_go_on(struct hr_nccl_pack *pack, const struct hr_work *work, int rank, int size, void *stream,
                       struct hr_error *error);
/* Gives the buffer back in the order of the stream: what is in it is dropped. */
void hr_nccl_pack_leave(struct hr_nccl_pack *pack, void *stream);
void hr_nccl_pack_fini(struct hr_nccl_pack *pack);

#endif
