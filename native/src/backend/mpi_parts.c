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
    const int exchanges = self->work.op == HORO_ALLTOALL;
    const size_t ways = exchanges ? 2 : 1;
    self->parts = (struct hr_mpi_parts){
        .bytes = calloc(exchanges ? size * size : size, sizeof(size_t)),
        .counts = calloc(ways * size, sizeof(int)),
        .offsets = calloc(ways * size, sizeof(int)),
        .by_rank = calloc(ways * size, sizeof(struct hr_fused)),
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

/* ---- Transfers of an alltoall: a share of what each rank has for each other ---- */

/* The bytes that travel from s to d. */
static size_t bytes_between(const struct hr_mpi_backend *self, int s, int d) {
    return s == d ? 0 : self->parts.bytes[(size_t)s * (size_t)self->team->size + (size_t)d];
}

/* The bytes that the busiest rank sends or gets, whichever are more. */
static size_t busiest(const struct hr_mpi_backend *self) {
    size_t most = 0;
    for (int r = 0; r < self->team->size; r++) {
        size_t sent = 0;
        size_t received = 0;
        for (int other = 0; other < self->team->size; other++) {
            sent += bytes_between(self, r, other);
            received += bytes_between(self, other, r);
        }
        most = sent > most ? sent : most;
        most = received > most ? received : most;
    }
    return most;
}

static void begin_exchange(struct hr_mpi_backend *self) {
    struct hr_mpi_parts *parts = &self->parts;
    struct hr_team *team = self->team;
    struct hr_fused *to = parts->by_rank;
    struct hr_fused *from = to + team->size;
    hr_fuse_splits(&self->work, team->rank, team->size, self->pieces.at, to, from, parts->bytes);
    for (size_t i = 0; i < to[team->rank].count; i++) { /* data for this rank itself: the pieces of both are alike */
        const struct hr_piece *piece = &to[team->rank].pieces[i];
        team->node->kernel->copy(from[team->rank].pieces[i].output, piece->input, piece->bytes, HR_STORE_ORDINARY);
    }
    const size_t most = hr_smaller(team->tuning.mpi_packed, (size_t)self->mpi->calls.message_bytes);
    parts->share_count = hr_divide_up(busiest(self), most);
}

static struct hr_range exchanged(const struct hr_mpi_backend *self, size_t index, int s, int d) {
    return hr_units(1, bytes_between(self, s, d), index, self->parts.share_count);
}

/* The bytes that I send lie in front of those that I get. */
static void place_share(struct hr_mpi_backend *self, size_t index, size_t *sent, size_t *received) {
    const struct hr_mpi_parts *parts = &self->parts;
    const int size = self->team->size;
    const int me = self->team->rank;
    *sent = 0;
    *received = 0;
    for (int r = 0; r < size; r++) {
        const size_t out = exchanged(self, index, me, r).bytes;
        const size_t in = exchanged(self, index, r, me).bytes;
        parts->counts[r] = (int)out;
        parts->counts[size + r] = (int)in;
        parts->offsets[r] = (int)*sent;
        parts->offsets[size + r] = (int)*received;
        *sent += out;
        *received += in;
    }
}

int hr_mpi_begin_of_exchange(struct hr_mpi_backend *self) {
    struct hr_mpi_parts *parts = &self->parts;
    if (parts->next == 0) {
        begin_exchange(self);
    }
    if (parts->next == parts->share_count) {
        hr_mpi_end_parts(self);
        return HR_TASK_DONE;
    }
    const size_t index = parts->next++;
    size_t sent;
    size_t received;
    place_share(self, index, &sent, &received);
    HR_TRY(hr_mpi_reserve_scratch(self, sent + received + 1));
    for (int r = 0; r < self->team->size; r++) {
        const struct hr_range share = exchanged(self, index, self->team->rank, r);
        hr_fused_pack(&parts->by_rank[r], share.offset, share.bytes, self->scratch + parts->offsets[r],
                      self->team->node->kernel, 1.0, HR_STORE_ORDINARY);
    }
    /* one byte more: also a rank that neither sends nor gets anything makes the call */
    self->transfer = (struct hr_mpi_transfer){
        .op = HORO_ALLTOALL, .data = self->scratch, .received = self->scratch + sent, .bytes = sent + received + 1};
    return HR_TASK_MOVED;
}

void hr_mpi_end_of_exchange(struct hr_mpi_backend *self) {
    const struct hr_mpi_parts *parts = &self->parts;
    const int size = self->team->size;
    for (int r = 0; r < size; r++) {
        const struct hr_range share = exchanged(self, parts->next - 1, r, self->team->rank);
        hr_fused_unpack(&parts->by_rank[size + r], share.offset, share.bytes,
                        self->transfer.received + parts->offsets[size + r], self->team->node->kernel);
    }
}
