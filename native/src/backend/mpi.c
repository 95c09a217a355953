/*
 * Whole collectives by MPI, for sites where those are tuned or run in the network (docs/adr/0013-mpi-carries-data-tcp-agrees.md).
 *
 * Every call is nonblocking and waited for by the one way to wait, so that the end of the group ends it. What is large and needs no
 * conversion travels from and to the tensor itself; the rest is packed into scratch, a few MiB at a time. Which is which depends on
 * sizes and dtypes alone, for all ranks must make the same calls.
 */
#include <stdlib.h>
#include <string.h>

#include "backend/operands.h"
#include "backend/reduction.h"
#include "base/cut.h"
#include "collective/collective.h"

enum {
    ALONE_BYTES = 1 << 20,   /* from here on a tensor travels by itself: packing would cost more than a call */
    SCRATCH_BYTES = 1 << 24, /* packed at once, at most */
    TEXT_BYTES = 256,
};

#define POLL_WITHIN_NS 20000ll /* as the transport: an algorithm of MPI goes on only when it is called */

struct mpi_backend {
    struct hr_backend base;
    struct hr_group *group;
    struct hr_mpi *mpi;
    struct hr_reductions reductions;
    struct hr_pieces pieces;
    char *scratch;
    size_t scratch_bytes;
};

/* ---- One call ---- */

struct flight {
    struct hr_mpi *mpi;
    uint64_t request;
    int code; /* of MPI */
    int done;
};

static int has_landed(struct hr_group *group, void *arg) {
    (void)group;
    struct flight *flight = arg;
    if (!flight->done && flight->code == 0) {
        flight->code = flight->mpi->ops->test(flight->mpi, &flight->request, &flight->done);
    }
    return flight->done || flight->code != 0;
}

/* MPI does not say who is gone: other ranks may. */
static int report(struct mpi_backend *self, int code) {
    char text[TEXT_BYTES];
    hr_mpi_describe(self->mpi, code, text, sizeof text);
    hr_log(&self->group->log, HORO_LOG_ERROR, "a collective of MPI failed: %s", text);
    self->group->suspect = (struct hr_abort){.code = HORO_ERR_PEER_LOST, .rank = -1, .reason = HR_REASON_LINK};
    return HORO_ERR_PEER_LOST;
}

/* Waits for a call that has been made. HORO_OK, or the code with which the group has ended or will. */
static int finish(struct mpi_backend *self, struct flight *flight) {
    struct hr_group *group = self->group;
    int ended = HORO_OK;
    if (flight->code == 0) {
        group->poll_within_ns = POLL_WITHIN_NS;
        ended = hr_group_finish(group, has_landed, flight);
        group->poll_within_ns = 0;
    }
    if (ended != HORO_OK || flight->code != 0) {
        /* A collective can be neither cancelled nor forgotten. */
        atomic_fetch_add_explicit(&self->mpi->stranded, (uint64_t)!flight->done, memory_order_relaxed);
    }
    return ended != HORO_OK || flight->code == 0 ? ended : report(self, flight->code);
}

static int reduce_in_place(struct mpi_backend *self, char *data, size_t bytes, int dtype, int reduce_op) {
    const struct hr_reduction how = hr_reductions_find(&self->reductions, self->mpi, dtype, reduce_op);
    const size_t element = hr_dtype_bytes(dtype);
    const size_t most = (size_t)self->mpi->calls.message_bytes / element * element;
    for (size_t at = 0; at < bytes; at += most) {
        const size_t step = bytes - at < most ? bytes - at : most;
        struct flight flight = {.mpi = self->mpi};
        flight.code = self->mpi->ops->iallreduce(self->mpi, data + at, (int)(step / element), how.type, how.op, &flight.request);
        HR_TRY(finish(self, &flight));
    }
    return HORO_OK;
}

static int broadcast_bytes(struct mpi_backend *self, char *data, size_t bytes, int root_rank) {
    const size_t most = (size_t)self->mpi->calls.message_bytes;
    for (size_t at = 0; at < bytes; at += most) {
        struct flight flight = {.mpi = self->mpi};
        flight.code =
            self->mpi->ops->ibcast(self->mpi, data + at, bytes - at < most ? bytes - at : most, root_rank, &flight.request);
        HR_TRY(finish(self, &flight));
    }
    return HORO_OK;
}

/* data: the contributions of all ranks one after the other, of which mine is there; counts and offsets have room for all ranks. */
static int gather_in_place(struct mpi_backend *self, char *data, const size_t *bytes_by_rank, int *counts, int *offsets) {
    const size_t most = (size_t)self->mpi->calls.message_bytes;
    size_t total = 0;
    for (int r = 0; r < self->group->size; r++) {
        counts[r] = (int)(bytes_by_rank[r] < most ? bytes_by_rank[r] : most);
        offsets[r] = (int)(total < most ? total : most);
        total += bytes_by_rank[r];
    }
    if (total == 0) {
        return HORO_OK;
    }
    if (total <= most) {
        struct flight flight = {.mpi = self->mpi};
        flight.code = self->mpi->ops->iallgatherv(self->mpi, data, counts, offsets, &flight.request);
        return finish(self, &flight);
    }
    for (int r = 0; r < self->group->size; r++) { /* beyond what 32-bit offsets reach */
        HR_TRY(broadcast_bytes(self, data, bytes_by_rank[r], r));
        data += bytes_by_rank[r];
    }
    return HORO_OK;
}

/* ---- Fused vectors ---- */

static int travels_alone(const struct hr_fused *fused, const struct hr_piece *piece) {
    return fused->wide_dtype == 0 && (fused->count == 1 || piece->bytes >= ALONE_BYTES);
}

/* How much from `offset` on is packed together. */
static size_t packed_bytes(const struct hr_fused *fused, size_t offset) {
    size_t end = offset;
    for (size_t i = hr_fused_find(fused, offset); i < fused->count && !travels_alone(fused, &fused->pieces[i]); i++) {
        end = fused->pieces[i].offset + fused->pieces[i].bytes;
    }
    return end - offset < SCRATCH_BYTES ? end - offset : SCRATCH_BYTES;
}

static int reserve_scratch(struct mpi_backend *self, size_t bytes) {
    const size_t wanted = hr_round_up(bytes, HR_CROSS_ALIGNMENT);
    if (wanted <= self->scratch_bytes) {
        return HORO_OK;
    }
    free(self->scratch);
    self->scratch = aligned_alloc(HR_CROSS_ALIGNMENT, wanted);
    self->scratch_bytes = self->scratch == NULL ? 0 : wanted;
    return self->scratch == NULL ? HORO_ERR_RESOURCE : HORO_OK;
}

/* The factors of one reduction: pre is multiplied in before it, post after. */
struct factors {
    double pre;
    struct hr_scale post;
};

static int reduce_piece(struct mpi_backend *self, const struct hr_fused *fused, const struct hr_piece *piece, int reduce_op,
                        struct factors factors) {
    const struct hr_kernel *kernel = self->group->kernel;
    if (piece->output != piece->input || factors.pre != 1.0) {
        hr_fused_pack(fused, piece->offset, piece->bytes, piece->output, kernel, factors.pre, HR_STORE_ORDINARY);
    }
    HR_TRY(reduce_in_place(self, piece->output, piece->bytes, fused->dtype, reduce_op));
    if (hr_scale_changes(factors.post)) {
        kernel->scale(fused->dtype, piece->output, piece->output, piece->bytes / hr_dtype_bytes(fused->dtype), factors.post,
                      HR_STORE_ORDINARY);
    }
    return HORO_OK;
}

static int reduce_packed(struct mpi_backend *self, const struct hr_fused *fused, size_t offset, size_t bytes, int reduce_op,
                         struct factors factors) {
    const struct hr_kernel *kernel = self->group->kernel;
    HR_TRY(reserve_scratch(self, bytes));
    hr_fused_pack(fused, offset, bytes, self->scratch, kernel, factors.pre, HR_STORE_ORDINARY);
    HR_TRY(reduce_in_place(self, self->scratch, bytes, fused->dtype, reduce_op));
    if (hr_scale_changes(factors.post)) {
        kernel->scale(fused->dtype, self->scratch, self->scratch, bytes / hr_dtype_bytes(fused->dtype), factors.post,
                      HR_STORE_ORDINARY);
    }
    hr_fused_unpack(fused, offset, bytes, self->scratch, kernel);
    return HORO_OK;
}

static int reduce_fused(void *arg, const struct hr_fused *fused, int reduce_op, double prescale,
                        struct hr_scale postscale) {
    struct mpi_backend *self = arg;
    const double partial = hr_partial_scale(fused->dtype, reduce_op, postscale.factor);
    const struct factors factors = {prescale * partial, {postscale.factor / partial, postscale.divisor}};
    for (size_t at = 0; at < fused->bytes;) {
        const struct hr_piece *piece = &fused->pieces[hr_fused_find(fused, at)];
        if (travels_alone(fused, piece)) {
            HR_TRY(reduce_piece(self, fused, piece, reduce_op, factors));
            at += piece->bytes;
        } else {
            const size_t bytes = packed_bytes(fused, at);
            HR_TRY(reduce_packed(self, fused, at, bytes, reduce_op, factors));
            at += bytes;
        }
    }
    return HORO_OK;
}

/* ---- The table ---- */

static int mpi_allreduce(struct hr_backend *backend, const struct hr_operand *operands, size_t count, int reduce_op,
                         double prescale, double postscale) {
    struct mpi_backend *self = (struct mpi_backend *)backend;
    return hr_reduce_kinds(&self->pieces, operands, count, self->group->size, reduce_op, prescale, postscale, reduce_fused, self);
}

static int broadcast_packed(struct mpi_backend *self, const struct hr_fused *fused, size_t offset, size_t bytes, int root_rank) {
    const struct hr_kernel *kernel = self->group->kernel;
    HR_TRY(reserve_scratch(self, bytes));
    if (self->group->rank == root_rank) {
        hr_fused_pack(fused, offset, bytes, self->scratch, kernel, 1.0, HR_STORE_ORDINARY);
    }
    HR_TRY(broadcast_bytes(self, self->scratch, bytes, root_rank));
    if (self->group->rank != root_rank) {
        hr_fused_unpack(fused, offset, bytes, self->scratch, kernel);
    }
    return HORO_OK;
}

static int mpi_broadcast(struct hr_backend *backend, const struct hr_operand *operands, size_t count, int root_rank) {
    struct mpi_backend *self = (struct mpi_backend *)backend;
    HR_TRY(hr_pieces_reserve(&self->pieces, count));
    const struct hr_fused fused = hr_fuse_bytes(self->pieces.at, operands, count);
    const int is_root = self->group->rank == root_rank;
    for (size_t at = 0; at < fused.bytes;) {
        const struct hr_piece *piece = &fused.pieces[hr_fused_find(&fused, at)];
        size_t bytes = piece->bytes;
        if (travels_alone(&fused, piece)) {
            /* On the root MPI only reads. */
            char *data = is_root ? (char *)(uintptr_t)piece->input : piece->output;
            HR_TRY(broadcast_bytes(self, data, bytes, root_rank));
        } else {
            bytes = packed_bytes(&fused, at);
            HR_TRY(broadcast_packed(self, &fused, at, bytes, root_rank));
        }
        at += bytes;
    }
    for (size_t i = 0; i < fused.count && is_root; i++) {
        const struct hr_piece *piece = &fused.pieces[i];
        if (piece->output != piece->input) {
            self->group->kernel->copy(piece->output, piece->input, piece->bytes, HR_STORE_ORDINARY);
        }
    }
    return HORO_OK;
}

/* Scratch of one allgather. */
struct gathering {
    int64_t *table; /* rows of operand i of rank r at [r * count + i] */
    size_t *bytes;  /* [size] */
    int *counts;    /* [size] */
    int *offsets;   /* [size] */
};

static int exchange_rows(struct mpi_backend *self, const struct gathering *scratch, const int64_t *rows, size_t count) {
    for (int r = 0; r < self->group->size; r++) {
        scratch->bytes[r] = count * sizeof *rows;
    }
    memcpy(scratch->table + (size_t)self->group->rank * count, rows, count * sizeof *rows);
    return gather_in_place(self, (char *)scratch->table, scratch->bytes, scratch->counts, scratch->offsets);
}

static int gather_operand(struct mpi_backend *self, const struct gathering *scratch, const struct hr_operand *operand,
                          size_t row_bytes, struct hr_gathered *result) {
    char *mine = result->data;
    for (int r = 0; r < self->group->size; r++) {
        scratch->bytes[r] = (size_t)result->first_dims[r] * row_bytes;
        mine += r < self->group->rank ? scratch->bytes[r] : 0;
    }
    if (scratch->bytes[self->group->rank] > 0) {
        self->group->kernel->copy(mine, operand->input, scratch->bytes[self->group->rank], HR_STORE_ORDINARY);
    }
    const int status = gather_in_place(self, result->data, scratch->bytes, scratch->counts, scratch->offsets);
    if (status != HORO_OK) {
        result->data = NULL; /* MPI may still write there: lost on purpose */
    }
    return status;
}

static int gather_all(struct mpi_backend *self, const struct gathering *scratch, const struct hr_operand *operands,
                      const int64_t *rows, const size_t *row_bytes, size_t count, struct hr_gathered *results) {
    HR_TRY(exchange_rows(self, scratch, rows, count));
    HR_TRY(hr_gathered_allocate(self->group->size, scratch->table, row_bytes, count, results));
    for (size_t i = 0; i < count; i++) {
        HR_TRY(gather_operand(self, scratch, &operands[i], row_bytes[i], &results[i]));
    }
    return HORO_OK;
}

static int mpi_allgather(struct hr_backend *backend, const struct hr_operand *operands, const int64_t *rows,
                         const size_t *row_bytes, size_t count, struct hr_gathered *results) {
    struct mpi_backend *self = (struct mpi_backend *)backend;
    const size_t size = (size_t)self->group->size;
    const struct gathering scratch = {
        .table = calloc(size * count, sizeof(int64_t)),
        .bytes = calloc(size, sizeof(size_t)),
        .counts = calloc(size, sizeof(int)),
        .offsets = calloc(size, sizeof(int)),
    };
    int status = HORO_ERR_RESOURCE;
    if (scratch.table != NULL && scratch.bytes != NULL && scratch.counts != NULL && scratch.offsets != NULL) {
        status = gather_all(self, &scratch, operands, rows, row_bytes, count, results);
    }
    free(scratch.bytes);
    if (atomic_load(&self->mpi->stranded) == 0) {
        free(scratch.table);
        free(scratch.counts);
        free(scratch.offsets);
    } else { /* MPI may still look at them */
        hr_gathered_disown(results, count);
    }
    return status;
}

static void mpi_destroy(struct hr_backend *backend) {
    struct mpi_backend *self = (struct mpi_backend *)backend;
    if (self == NULL) {
        return;
    }
    if (atomic_load(&self->mpi->stranded) == 0) {
        if (hr_mpi_is_usable(self->mpi)) {
            hr_reductions_fini(&self->reductions, self->mpi);
        }
        free(self->scratch);
    }
    hr_pieces_fini(&self->pieces);
    free(self);
}

static const struct hr_backend_ops mpi_ops = {
    .name = "mpi",
    .allreduce = mpi_allreduce,
    .broadcast = mpi_broadcast,
    .allgather = mpi_allgather,
    .destroy = mpi_destroy,
};

struct hr_backend *hr_mpi_backend_create(struct hr_group *group, struct hr_error *error) {
    const horo_mpi *calls = &group->mpi.calls;
    if (calls->rank != group->rank || calls->size != group->size) {
        (void)hr_fail(error, HORO_ERR_USAGE,
                      "rank %d of %d is rank %d of %d in the MPI communicator; collectives by MPI need the same numbers in both",
                      group->rank, group->size, calls->rank, calls->size);
        return NULL;
    }
    struct mpi_backend *self = calloc(1, sizeof *self);
    if (self == NULL) {
        (void)hr_fail(error, HORO_ERR_RESOURCE, "out of memory for a context");
        return NULL;
    }
    self->base.ops = &mpi_ops;
    self->group = group;
    self->mpi = &group->mpi;
    const int code = hr_reductions_init(&self->reductions, self->mpi);
    if (code != 0) {
        char text[TEXT_BYTES];
        hr_mpi_describe(self->mpi, code, text, sizeof text);
        (void)hr_fail(error, HORO_ERR_RESOURCE, "MPI refuses a reduction of horo's: %s", text);
        mpi_destroy(&self->base);
        return NULL;
    }
    return &self->base;
}
