/* Transfers of the backend that MPI does, of collectives that have a part for each rank. */
#include <stdlib.h>

#include "backend/mpi_backend.h"
#include "base/cut.h"
#include "local/shares.h"

void hr_mpi_end_parts(struct hr_mpi_backend *self) {
    struct hr_mpi_parts *parts = &self->parts;
    free(parts->bytes);
    free(parts->by_rank);
    if (atomic_load(&self->mpi->stranded) == 0) { /* else MPI may still look at them */
        free(parts->counts);
        free(parts->offsets);
    }
    *parts = (struct hr_mpi_parts){0};
}

int hr_mpi_begin_parts(struct hr_mpi_backend *self) {
    const size_t size = (size_t)self->team->size;
    self->parts = (struct hr_mpi_parts){
        .bytes = calloc(size, sizeof(size_t)),
        .counts = calloc(size, sizeof(int)),
        .offsets = calloc(size, sizeof(int)),
        .by_rank = calloc(size, sizeof(struct hr_fused)),
    };
    const struct hr_mpi_parts *parts = &self->parts;
    if (parts->bytes == NULL || parts->counts == NULL || parts->offsets == NULL ||
        parts->by_rank == NULL) {
        hr_mpi_end_parts(self);
        return HORO_ERR_RESOURCE;
    }
    return HORO_OK;
}

/* ---- Transfers of an allgather ---- */

/*
 * data: the contributions of all ranks one after the other, of which mine is there; parts->bytes says how long each is.
 */
static void begin_gather(struct hr_mpi_backend *self, char *data) {
    const struct hr_mpi_parts *parts = &self->parts;
    const size_t most = (size_t)self->mpi->calls.message_bytes;
    size_t total = 0;
    for (int r = 0; r < self->team->size; r++) {
        parts->counts[r] = (int)hr_smaller(parts->bytes[r], most);
        parts->offsets[r] = (int)hr_smaller(total, most);
        total += parts->bytes[r];
    }
    if (total <= most) {
        self->transfer = (struct hr_mpi_transfer){.op = HORO_ALLGATHER, .data = data, .bytes = total};
    } else { /* beyond what 32-bit offsets reach */
        self->transfer = (struct hr_mpi_transfer){.op = HORO_BROADCAST, .data = data, .ranks_left = self->team->size};
    }
}

static void begin_operand(struct hr_mpi_backend *self, size_t i) {
    const struct hr_gathered *result = &self->work.results[i];
    char *mine = result->data;
    for (int r = 0; r < self->team->size; r++) {
        self->parts.bytes[r] = (size_t)result->first_dims[r] * self->work.row_bytes[i];
        mine += r < self->team->rank ? self->parts.bytes[r] : 0;
    }
    if (self->parts.bytes[self->team->rank] > 0 && mine != self->work.operands[i].input) {
        self->team->node->kernel->copy(mine, self->work.operands[i].input, self->parts.bytes[self->team->rank],
                                       HR_STORE_ORDINARY);
    }
    begin_gather(self, result->data);
}

int hr_mpi_begin_of_gather(struct hr_mpi_backend *self) {
    struct hr_mpi_parts *parts = &self->parts;
    if (parts->next == self->work.count) {
        hr_mpi_end_parts(self);
        return HR_TASK_DONE;
    }
    begin_operand(self, parts->next++);
    return HR_TASK_MOVED;
}

/* ---- Transfers of a reduce-scatter: a share of the part of each rank, one behind the other ---- */

/* The next kind, cut so that what travels at once stays within bounds; 0 behind the last one. */
static int begin_kind(struct hr_mpi_backend *self) {
    struct hr_mpi_parts *parts = &self->parts;
    if (!hr_kinds_next_rows(&self->kinds, self->pieces.at, parts->by_rank)) {
        return 0;
    }
    const size_t size = (size_t)self->team->size;
    const size_t block_bytes = parts->by_rank[0].codec->block_bytes;
    const size_t most = hr_smaller(self->team->tuning.mpi_packed, (size_t)self->mpi->calls.message_bytes);
    const size_t blocks = most / size / block_bytes;
    /* the first rank's is no shorter than any other's */
    parts->share_count = hr_divide_up(parts->by_rank[0].bytes / block_bytes, blocks == 0 ? 1 : blocks);
    parts->next = 0;
    return 1;
}

static struct hr_range share_of(const struct hr_mpi_parts *parts, int r, size_t index) {
    const struct hr_fused *part = &parts->by_rank[r];
    return hr_units(part->codec->block_bytes, part->bytes, index, parts->share_count);
}

static int begin_share(struct hr_mpi_backend *self, size_t index) {
    const struct hr_mpi_parts *parts = &self->parts;
    const struct hr_codec *codec = parts->by_rank[0].codec;
    size_t total = 0;
    for (int r = 0; r < self->team->size; r++) {
        const size_t bytes = share_of(parts, r, index).bytes;
        parts->counts[r] = (int)hr_codec_blocks(codec, bytes);
        total += bytes;
    }
    HR_TRY(hr_mpi_reserve_scratch(self, total));
    char *at = self->scratch;
    for (int r = 0; r < self->team->size; r++) {
        const struct hr_range share = share_of(parts, r, index);
        hr_fused_pack(&parts->by_rank[r], share.offset, share.bytes, at, self->team->node->kernel,
                      hr_mpi_factors_of(self, codec).pre, HR_STORE_ORDINARY);
        at += share.bytes;
    }
    self->transfer = (struct hr_mpi_transfer){.op = HORO_REDUCESCATTER, .data = self->scratch, .bytes = total};
    return HR_TASK_MOVED;
}

int hr_mpi_begin_of_scatter(struct hr_mpi_backend *self) {
    struct hr_mpi_parts *parts = &self->parts;
    while (parts->next == parts->share_count) {
        if (!begin_kind(self)) {
            hr_mpi_end_parts(self);
            return HR_TASK_DONE;
        }
        if (parts->by_rank[0].codec->wire_dtype == HR_CODEC_OPAQUE) {
            return HORO_ERR_INTERNAL; /* no reducer of MPI's can be told what to do with its blocks */
        }
    }
    return begin_share(self, parts->next++);
}

void hr_mpi_end_of_scatter(struct hr_mpi_backend *self) {
    const struct hr_fused *mine = &self->parts.by_rank[self->team->rank];
    const struct hr_kernel *kernel = self->team->node->kernel;
    const struct hr_range share = share_of(&self->parts, self->team->rank, self->parts.next - 1);
    const struct hr_scale scale = hr_mpi_factors_of(self, mine->codec).post;
    if (hr_scale_changes(scale)) {
        mine->codec->scale(mine->codec, kernel, self->scratch, hr_codec_blocks(mine->codec, share.bytes), scale);
    }
    hr_fused_unpack(mine, share.offset, share.bytes, self->scratch, kernel);
}
