/*
 * Whole collectives by MPI, for sites where those are tuned or run in the network
 * (docs/adr/0013-mpi-carries-data-tcp-agrees.md).
 *
 * The work is a sequence of transfers, each of one stretch of memory, and a transfer is one nonblocking call of MPI or,
 * where it is larger than one call may be, several. What is large and needs no conversion travels from and to the
 * tensor itself; the rest is packed into scratch, a few MiB at a time. Which is which depends on sizes and dtypes
 * alone, for all ranks must make the same calls.
 */
#include <stdlib.h>

#include "backend/mpi_backend.h"
#include "base/cut.h"
#include "base/op.h"
#include "collective/collective.h"

enum {
    SCRATCH_ALIGNMENT = 64,
    TEXT_BYTES = 256,
};

#define POLL_WITHIN_NS 20000ll /* as the transport: an algorithm of MPI goes on only when it is called */

static struct hr_mpi_backend *mpi_of(struct hr_backend *backend) {
    return (struct hr_mpi_backend *)backend;
}

/* ---- Calls ---- */

/* MPI does not say who is gone: other ranks may. */
static int report(struct hr_mpi_backend *self, int code) {
    char text[TEXT_BYTES];
    hr_mpi_describe(self->mpi, code, text, sizeof text);
    hr_log(&self->team->node->log, HORO_LOG_ERROR, "a collective of MPI failed: %s", text);
    self->team->suspect = (struct hr_abort){.code = HORO_ERR_PEER_LOST, .rank = -1, .reason = HR_REASON_LINK};
    return HORO_ERR_PEER_LOST;
}

static int called(struct hr_mpi_backend *self, int code) {
    if (code != 0) {
        return report(self, code);
    }
    self->has_call = 1;
    self->team->node->poll_within_ns = POLL_WITHIN_NS;
    return HR_TASK_MOVED;
}

static int call_allreduce(struct hr_mpi_backend *self) {
    struct hr_mpi_transfer *transfer = &self->transfer;
    const struct hr_codec *codec = self->fused.codec;
    const struct hr_reduction how =
        hr_reductions_find(&self->reductions, self->mpi, codec->wire_dtype, hr_operation_of(self->work.reduce_op));
    const size_t element = codec->block_bytes;
    const size_t most = (size_t)self->mpi->calls.message_bytes / element * element;
    const size_t step = hr_smaller(transfer->bytes - transfer->at, most);
    char *data = transfer->data + transfer->at;
    transfer->at += step;
    return called(self,
                  self->mpi->ops->iallreduce(self->mpi, data, (int)(step / element), how.type, how.op, &self->request));
}

static int call_reduce_scatter(struct hr_mpi_backend *self) {
    struct hr_mpi_transfer *transfer = &self->transfer;
    const struct hr_reduction how =
        hr_reductions_find(&self->reductions, self->mpi, self->parts.by_rank[0].codec->wire_dtype,
                           hr_operation_of(self->work.reduce_op));
    transfer->at = transfer->bytes;
    return called(self, self->mpi->ops->ireduce_scatter(self->mpi, transfer->data, self->parts.counts, how.type, how.op,
                                                        &self->request));
}

static int call_broadcast(struct hr_mpi_backend *self) {
    struct hr_mpi_transfer *transfer = &self->transfer;
    const size_t step = hr_smaller(transfer->bytes - transfer->at, (size_t)self->mpi->calls.message_bytes);
    char *data = transfer->data + transfer->at;
    transfer->at += step;
    return called(self, self->mpi->ops->ibcast(self->mpi, data, step, transfer->root, &self->request));
}

/* The next call of the current transfer: HR_TASK_MOVED, HR_TASK_DONE if there is none, or a status. */
static int call_next(struct hr_mpi_backend *self) {
    struct hr_mpi_transfer *transfer = &self->transfer;
    while (transfer->at == transfer->bytes && transfer->ranks_left > 0) { /* the part of the next rank lies behind */
        transfer->data += transfer->bytes;
        transfer->root = self->team->size - transfer->ranks_left--;
        transfer->bytes = self->parts.bytes[transfer->root];
        transfer->at = 0;
    }
    if (transfer->at == transfer->bytes) {
        return HR_TASK_DONE;
    }
    if (transfer->op == HORO_ALLREDUCE) {
        return call_allreduce(self);
    }
    if (transfer->op == HORO_BROADCAST) {
        return call_broadcast(self);
    }
    if (transfer->op == HORO_REDUCESCATTER) {
        return call_reduce_scatter(self);
    }
    transfer->at = transfer->bytes;
    if (transfer->op == HORO_ALLTOALL) {
        const int size = self->team->size;
        const struct hr_mpi_blocks sent = {transfer->data, self->parts.counts, self->parts.offsets};
        const struct hr_mpi_blocks received = {transfer->received, self->parts.counts + size,
                                               self->parts.offsets + size};
        return called(self, self->mpi->ops->ialltoallv(self->mpi, &sent, &received, &self->request));
    }
    return called(self, self->mpi->ops->iallgatherv(self->mpi, transfer->data, self->parts.counts,
                                                    self->parts.offsets, &self->request));
}

/* ---- Transfers of fused vectors ---- */

static int travels_alone(const struct hr_mpi_backend *self, const struct hr_piece *piece) {
    const struct hr_fused *fused = &self->fused;
    return hr_codec_is_plain(fused->codec) && (fused->count == 1 || piece->bytes >= self->team->tuning.mpi_alone);
}

/* The number of bytes from `offset` on that are packed together. */
static size_t packed_bytes(const struct hr_mpi_backend *self, size_t offset) {
    const struct hr_fused *fused = &self->fused;
    size_t end = offset;
    for (size_t i = hr_fused_find(fused, offset); i < fused->count && !travels_alone(self, &fused->pieces[i]); i++) {
        end = fused->pieces[i].offset + fused->pieces[i].bytes;
    }
    return hr_smaller(end - offset, self->team->tuning.mpi_packed);
}

int hr_mpi_reserve_scratch(struct hr_mpi_backend *self, size_t bytes) {
    const size_t wanted = hr_round_up(bytes, SCRATCH_ALIGNMENT);
    if (wanted <= self->scratch_bytes) {
        return HORO_OK;
    }
    free(self->scratch);
    self->scratch = aligned_alloc(SCRATCH_ALIGNMENT, wanted);
    self->scratch_bytes = self->scratch == NULL ? 0 : wanted;
    return self->scratch == NULL ? HORO_ERR_RESOURCE : HORO_OK;
}

struct hr_mpi_factors hr_mpi_factors_of(const struct hr_mpi_backend *self, const struct hr_codec *codec) {
    const struct hr_scale post = hr_postscale_of(&self->work, codec->dtype, self->team->size);
    const double partial = hr_partial_scale(codec, hr_operation_of(self->work.reduce_op), post.factor);
    return (struct hr_mpi_factors){self->work.prescale * partial, {post.factor / partial, post.divisor}};
}

/* Whether this rank's own data goes into what travels. */
static int contributes(const struct hr_mpi_backend *self) {
    return self->work.op == HORO_ALLREDUCE || self->team->rank == self->work.root_rank;
}

/* A tensor that travels alone. */
static void begin_piece(struct hr_mpi_backend *self, const struct hr_piece *piece) {
    const struct hr_fused *fused = &self->fused;
    self->is_packed = 0;
    self->transfer.bytes = piece->bytes;
    if (self->work.op == HORO_BROADCAST) {
        /* On the root MPI only reads. */
        self->transfer.data = contributes(self) ? (char *)(uintptr_t)piece->input : piece->output;
        return;
    }
    const struct hr_mpi_factors factors = hr_mpi_factors_of(self, fused->codec);
    if (piece->output != piece->input || factors.pre != 1.0) {
        hr_fused_pack(fused, piece->offset, piece->bytes, piece->output, self->team->node->kernel, factors.pre,
                      HR_STORE_ORDINARY);
    }
    self->transfer.data = piece->output;
}

static int begin_packed(struct hr_mpi_backend *self, size_t bytes) {
    const double scale = self->work.op == HORO_ALLREDUCE ? hr_mpi_factors_of(self, self->fused.codec).pre : 1.0;
    HR_TRY(hr_mpi_reserve_scratch(self, bytes));
    self->is_packed = 1;
    self->transfer.bytes = bytes;
    self->transfer.data = self->scratch;
    if (contributes(self)) {
        hr_fused_pack(&self->fused, self->fused_at, bytes, self->scratch, self->team->node->kernel, scale,
                      HR_STORE_ORDINARY);
    }
    return HORO_OK;
}

/* The transfer is over: scale and unpack what has come. */
static void end_transfer(struct hr_mpi_backend *self) {
    const struct hr_mpi_transfer *transfer = &self->transfer;
    if (transfer->op == HORO_REDUCESCATTER && transfer->bytes > 0) {
        hr_mpi_end_of_scatter(self);
    }
    if (transfer->op == HORO_ALLTOALL) {
        hr_mpi_end_of_exchange(self);
    }
    const struct hr_kernel *kernel = self->team->node->kernel;
    if (self->work.op == HORO_ALLREDUCE && transfer->bytes > 0) {
        const struct hr_scale scale = hr_mpi_factors_of(self, self->fused.codec).post;
        if (hr_scale_changes(scale)) {
            const struct hr_codec *codec = self->fused.codec;
            codec->scale(codec, kernel, transfer->data, hr_codec_blocks(codec, transfer->bytes), scale);
        }
    }
    if (self->is_packed && (self->work.op == HORO_ALLREDUCE || !contributes(self))) {
        hr_fused_unpack(&self->fused, self->fused_at - transfer->bytes, transfer->bytes, transfer->data, kernel);
    }
    self->transfer = (struct hr_mpi_transfer){0};
    self->is_packed = 0;
}

/* The next transfer of the vector, or of the next kind: HR_TASK_MOVED, HR_TASK_DONE if there is none, or a status. */
static int begin_of_fused(struct hr_mpi_backend *self) {
    while (self->fused_at == self->fused.bytes) {
        if (self->work.op == HORO_BROADCAST || !hr_kinds_next(&self->kinds, self->pieces.at, &self->fused)) {
            return HR_TASK_DONE;
        }
        if (self->fused.codec->wire_dtype == HR_CODEC_OPAQUE) {
            return HORO_ERR_INTERNAL; /* no reducer of MPI's can be told what to do with its blocks */
        }
        self->fused_at = 0;
    }
    const struct hr_piece *piece = &self->fused.pieces[hr_fused_find(&self->fused, self->fused_at)];
    self->transfer = (struct hr_mpi_transfer){.op = self->work.op, .root = self->work.root_rank};
    if (travels_alone(self, piece)) {
        begin_piece(self, piece);
    } else {
        HR_TRY(begin_packed(self, packed_bytes(self, self->fused_at)));
    }
    self->fused_at += self->transfer.bytes;
    return HR_TASK_MOVED;
}

/* ---- The table ---- */

static int mpi_begin(struct hr_backend *backend, const struct hr_work *work) {
    struct hr_mpi_backend *self = mpi_of(backend);
    self->work = *work;
    self->transfer = (struct hr_mpi_transfer){0};
    self->fused = (struct hr_fused){0};
    self->fused_at = 0;
    if (work->op == HORO_REDUCESCATTER && self->team->size == 1) {
        self->work.op = HORO_ALLREDUCE;
    }
    self->kinds = (struct hr_kinds){.operands = work->operands,
                                    .count = work->count,
                                    .row_bytes = work->row_bytes,
                                    .rank = self->team->rank,
                                    .size = self->team->size};
    HR_TRY(hr_pieces_reserve(&self->pieces, hr_vectors_of(self->work.op, self->team->size) * work->count));
    if (self->work.op == HORO_REDUCESCATTER || hr_op_tells_rows(work->op)) {
        return hr_mpi_begin_parts(self);
    }
    if (hr_op_reduces(work->op)) {
        return HORO_OK;
    }
    self->fused = hr_fuse_bytes(self->pieces.at, work->operands, work->count);
    return HORO_OK;
}

static int test_call(struct hr_mpi_backend *self) {
    int done = 0;
    const int code = self->mpi->ops->test(self->mpi, &self->request, &done);
    if (done || code != 0) {
        self->has_call = 0;
        self->team->node->poll_within_ns = 0;
    }
    if (code != 0) {
        atomic_fetch_add_explicit(&self->mpi->stranded, (uint64_t)!done, memory_order_relaxed);
        return report(self, code);
    }
    self->team->pieces += (uint64_t)done;
    return done ? HR_TASK_MOVED : HR_TASK_BLOCKED;
}

static int begin_transfer(struct hr_mpi_backend *self) {
    switch (self->work.op) {
    case HORO_ALLGATHER: return hr_mpi_begin_of_gather(self);
    case HORO_REDUCESCATTER: return hr_mpi_begin_of_scatter(self);
    case HORO_ALLTOALL: return hr_mpi_begin_of_exchange(self);
    default: return begin_of_fused(self);
    }
}

static int mpi_progress(struct hr_backend *backend) {
    struct hr_mpi_backend *self = mpi_of(backend);
    if (self->has_call) {
        return test_call(self);
    }
    int moved = call_next(self);
    if (moved == HR_TASK_DONE) {
        end_transfer(self);
        moved = begin_transfer(self);
    }
    if (moved == HR_TASK_DONE && self->work.op == HORO_BROADCAST && contributes(self)) {
        hr_fused_copy(&self->fused, 0, self->fused.bytes, self->team->node->kernel, HR_STORE_ORDINARY);
    }
    return moved;
}

/* A collective of MPI can be neither cancelled nor forgotten. */
static void mpi_cancel(struct hr_backend *backend) {
    struct hr_mpi_backend *self = mpi_of(backend);
    atomic_fetch_add_explicit(&self->mpi->stranded, (uint64_t)self->has_call, memory_order_relaxed);
    self->has_call = 0;
    self->team->node->poll_within_ns = 0;
    if (hr_op_tells_rows(self->work.op)) {
        hr_gathered_bury(self->team->node, self->work.results, self->work.count);
    }
    hr_mpi_end_parts(self);
}

static int mpi_is_ending(const struct hr_backend *backend) {
    (void)backend;
    return 0; /* MPI does not tell how far a call is */
}

static void mpi_destroy(struct hr_backend *backend) {
    struct hr_mpi_backend *self = (struct hr_mpi_backend *)backend;
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
    .begin = mpi_begin,
    .progress = mpi_progress,
    .cancel = mpi_cancel,
    .is_ending = mpi_is_ending,
    .destroy = mpi_destroy,
};

struct hr_backend *hr_mpi_backend_create(struct hr_team *team, struct hr_error *error) {
    const horo_mpi *calls = &team->node->mpi.calls;
    if (calls->rank != team->rank || calls->size != team->size) {
        (void)hr_fail(
            error, HORO_ERR_USAGE,
            "rank %d of %d is rank %d of %d in the MPI communicator; collectives by MPI need the same numbers in both",
            team->rank, team->size, calls->rank, calls->size);
        return NULL;
    }
    struct hr_mpi_backend *self = calloc(1, sizeof *self);
    if (self == NULL) {
        (void)hr_fail(error, HORO_ERR_RESOURCE, "out of memory for a context");
        return NULL;
    }
    self->base.ops = &mpi_ops;
    self->team = team;
    self->mpi = &team->node->mpi;
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
