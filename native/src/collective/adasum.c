/*
 * Adasum (S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021) of any number of ranks,
 * out of three collectives that every backend has, so that it is the same over arena, TCP and MPI.
 *
 * Two vectors a and b become a (1 - a.b / (2 a.a)) + b (1 - a.b / (2 b.b)), tensor by tensor: their sum where they are
 * orthogonal, their mean where they are equal. Ranks are combined pairwise, as a tree: 0 with 1 and 2 with 3, then what
 * came of 0 and 1 with what came of 2 and 3, and so on; who has no partner goes on unchanged.
 *
 * The values of a vector are cut into one share for each of the p ranks:
 *
 *     alltoall    every rank gets its share of what each rank has
 *     allreduce   for each of the log2(p) levels of the tree: each rank takes the scalar products of its shares, in
 *                 double, and their sums over all ranks are three numbers for each pair and tensor; with them each rank
 *                 combines its shares
 *     allgather   every rank gets all shares of the result, so that all ranks have the same bits
 *
 * Per rank and byte of data: (p-1)/p sent and received twice, as by a ring allreduce; three products of each value and
 * level. 8 (p-1) * 3 bytes of sums per tensor besides. Memory: as much as the values that travel, and once more where
 * they are several tensors, scaled, or narrowed on the way.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/cut.h"
#include "collective/collective.h"

enum {
    TURN_BYTES = 1 << 18, /* of values, worked on in one turn of the driver's loop */
    ALIGNMENT = 64,
    PRODUCTS = 3, /* a.b, a.a, b.b */
};

static int enter(struct hr_adasum *self, enum hr_adasum_phase stage) {
    struct hr_recorder *recorder = &self->team->node->recorder;
    self->stage = stage;
    self->at = 0;
    self->low = 0;
    self->inner = NULL;
    if (hr_recorder_is_traced(recorder)) {
        hr_recorder_add(recorder, &(struct hr_event){.event = HR_EVENT_PHASE,
                                                     .op = HORO_ALLREDUCE,
                                                     .team = self->team->number,
                                                     .number = (int32_t)stage});
    }
    return HR_MOVED;
}

/* ---- The collectives ---- */

/* The values of the share of a rank. */
static size_t share_of(const struct hr_adasum *self, int rank, size_t *begin) {
    size_t length;
    hr_part(self->count, (size_t)self->team->size, (size_t)rank, begin, &length);
    return length;
}

/* A vector of nothing but one piece of bytes, or of none. */
static struct hr_fused bytes_at(struct hr_piece *piece, const char *input, char *output, size_t bytes) {
    struct hr_fused vector = {.pieces = piece, .codec = hr_codec_find(HORO_UINT8, 0)};
    hr_fuse_append(&vector, piece, input, output, bytes);
    return vector;
}

static int begin_scatter(struct hr_adasum *self) {
    const int size = self->team->size;
    const char *from = self->is_packed ? self->packed : self->fused.pieces[0].input;
    struct hr_fused *vectors = self->vectors;
    for (int r = 0; r < size; r++) {
        size_t begin;
        const size_t bytes = share_of(self, r, &begin) * self->width;
        const size_t own_bytes = self->own_count * self->width;
        const char *share = from + begin * self->width;
        vectors[r] = bytes_at(&self->pieces[r], share, NULL, bytes);
        vectors[size + r] = bytes_at(&self->pieces[size + r], share, self->shares + (size_t)r * own_bytes, own_bytes);
        for (int s = 0; s < size; s++) {
            self->bytes[s * size + r] = bytes;
        }
    }
    (void)enter(self, HR_ADASUM_SCATTER);
    HR_TRY(hr_alltoall_begin(&self->run.alltoall, self->team, vectors, vectors + size, self->bytes));
    self->inner = &self->run.alltoall.segments.task;
    return HR_MOVED;
}

static int begin_sum(struct hr_adasum *self) {
    const size_t pairs = hr_divide_up((size_t)(self->team->size - self->distance), 2 * (size_t)self->distance);
    struct hr_fused sums = {.pieces = self->pieces, .codec = hr_codec_find(HORO_FLOAT64, 0)};
    hr_fuse_append(&sums, self->pieces, self->sums, self->sums, pairs * self->fused.count * PRODUCTS);
    (void)enter(self, HR_ADASUM_SUM);
    HR_TRY(hr_allreduce_begin(&self->run.allreduce, self->team, &sums, HORO_SUM, 1.0, hr_scale_by(1.0)));
    self->inner = &self->run.allreduce.segments.task;
    return HR_MOVED;
}

/* ---- Arithmetic: each function does what fits one turn, and says whether there is more ---- */

/* Packs, or unpacks. */
static int convert(struct hr_adasum *self) {
    const size_t bytes = self->count * self->width;
    const size_t step = hr_smaller(TURN_BYTES, bytes - self->at);
    const struct hr_kernel *kernel = self->team->node->kernel;
    char *packed = self->packed + self->at;
    if (self->stage == HR_ADASUM_PACK) {
        hr_fused_pack(&self->fused, self->at, step, packed, kernel, self->prescale, HR_STORE_ORDINARY);
    } else {
        hr_fused_unpack(&self->fused, self->at, step, packed, kernel, HR_STORE_ORDINARY);
    }
    self->at += step;
    return self->at < bytes;
}

/* Below that, a vector counts as zero, which has no direction. As in Horovod; of its square, too. */
static double factor_of(double product, double square) {
    return square >= sqrt(DBL_MIN) ? 1.0 - product / (2.0 * square) : 1.0;
}

/* All pairs of the level. */
static int work_on_pairs(struct hr_adasum *self) {
    const struct hr_fused *fused = &self->fused;
    size_t left = TURN_BYTES / self->width;
    while (left > 0 && self->own_count > 0 && self->low + self->distance < self->team->size) {
        const size_t place_of_value = (self->first + self->at) * self->width;
        const size_t tensor = hr_fused_find(fused, place_of_value);
        const struct hr_piece *piece = &fused->pieces[tensor];
        const size_t of_tensor = (piece->offset + piece->bytes - place_of_value) / self->width;
        const size_t step = hr_smaller(hr_smaller(of_tensor, self->own_count - self->at), left);
        const struct hr_kernel *kernel = self->team->node->kernel;
        const int dtype = self->fused.codec->wire_dtype;
        const size_t low = (size_t)self->low;
        const size_t distance = (size_t)self->distance;
        char *a = self->shares + (low * self->own_count + self->at) * self->width;
        const char *b = a + distance * self->own_count * self->width;
        double *sums = self->sums + (low / (2 * distance) * self->fused.count + tensor) * PRODUCTS;
        if (self->stage == HR_ADASUM_MULTIPLY) {
            hr_kernel_dots(kernel, dtype, a, b, step, sums);
        } else {
            hr_kernel_combine(kernel, dtype, a, b, step, factor_of(sums[0], sums[1]), factor_of(sums[0], sums[2]));
        }
        self->at += step;
        left -= step;
        if (self->at == self->own_count) {
            self->at = 0;
            self->low += 2 * self->distance;
        }
    }
    return self->own_count > 0 && self->low + self->distance < self->team->size;
}

/* ---- The task ---- */

static int begin_products(struct hr_adasum *self) {
    memset(self->sums, 0, (size_t)self->team->size / 2 * self->fused.count * PRODUCTS * sizeof *self->sums);
    return enter(self, HR_ADASUM_MULTIPLY);
}

/* Goes up the tree, or gathers its root, which is the first share. */
static int end_level(struct hr_adasum *self) {
    self->distance *= 2;
    if (self->distance < self->team->size) {
        return begin_products(self);
    }
    if (hr_scale_changes(self->postscale)) {
        const struct hr_codec *codec = self->fused.codec;
        hr_kernel_scale(self->team->node->kernel, codec->wire_dtype, self->shares, self->shares, self->own_count,
                        self->postscale, HR_STORE_ORDINARY);
    }
    char *to = self->is_packed ? self->packed : self->fused.pieces[0].output;
    for (int r = 0; r < self->team->size; r++) {
        size_t begin;
        const size_t bytes = share_of(self, r, &begin) * self->width;
        self->vectors[r] = bytes_at(&self->pieces[r], self->shares, to + begin * self->width, bytes);
    }
    (void)enter(self, HR_ADASUM_GATHER);
    HR_TRY(hr_allgather_begin(&self->run.allgather, self->team, self->vectors));
    self->inner = &self->run.allgather.segments.task;
    return HR_MOVED;
}

static int end(struct hr_adasum *self) {
    hr_adasum_free(self);
    return HR_DONE;
}

static int progress(struct hr_task *task) {
    struct hr_adasum *self = (struct hr_adasum *)task; /* its first member */
    switch (self->stage) {
    case HR_ADASUM_PACK: return convert(self) ? HR_MOVED : begin_scatter(self);
    case HR_ADASUM_MULTIPLY: return work_on_pairs(self) ? HR_MOVED : begin_sum(self);
    case HR_ADASUM_COMBINE: return work_on_pairs(self) ? HR_MOVED : end_level(self);
    case HR_ADASUM_UNPACK: return convert(self) ? HR_MOVED : end(self);
    case HR_ADASUM_SCATTER:
    case HR_ADASUM_SUM:
    case HR_ADASUM_GATHER: break;
    }
    const int moved = self->inner->progress(self->inner);
    if (moved != HR_DONE) {
        return moved;
    }
    self->inner = NULL;
    switch (self->stage) {
    case HR_ADASUM_SCATTER: return begin_products(self);
    case HR_ADASUM_SUM: return enter(self, HR_ADASUM_COMBINE);
    default: return self->is_packed ? enter(self, HR_ADASUM_UNPACK) : end(self);
    }
}

static void cancel(struct hr_task *task) {
    struct hr_adasum *self = (struct hr_adasum *)task;
    if (self->inner != NULL) {
        self->inner->cancel(self->inner);
    }
    hr_adasum_free(self);
}

void hr_adasum_free(struct hr_adasum *self) {
    hr_node_bury(self->team->node, self->memory, free);
    self->memory = NULL;
}

hr_status hr_adasum_begin(struct hr_adasum *self, struct hr_team *team, const struct hr_fused *fused, double prescale,
                          double postscale) {
    const struct hr_codec *codec = fused->codec;
    const size_t size = (size_t)team->size;
    *self = (struct hr_adasum){
        .task = {.progress = progress, .cancel = cancel},
        .team = team,
        .fused = *fused,
        .prescale = prescale,
        .postscale = hr_scale_by(postscale),
        .width = codec->wire_bytes,
        .count = fused->bytes / codec->wire_bytes,
        .is_packed = fused->count > 1 || !codec->is_plain || prescale != 1.0,
        .distance = 1,
    };
    self->own_count = share_of(self, team->rank, &self->first);
    size_t bytes = 0;
    const size_t packed = hr_place(&bytes, self->is_packed ? self->count * self->width : 0, ALIGNMENT);
    const size_t shares = hr_place(&bytes, size * self->own_count * self->width, ALIGNMENT);
    const size_t sums = hr_place(&bytes, size / 2 * fused->count * PRODUCTS * sizeof *self->sums, ALIGNMENT);
    const size_t table = hr_place(&bytes, size * size * sizeof *self->bytes, ALIGNMENT);
    const size_t vectors = hr_place(&bytes, 2 * size * sizeof *self->vectors, ALIGNMENT);
    const size_t pieces = hr_place(&bytes, 2 * size * sizeof *self->pieces, ALIGNMENT);
    char *memory = self->memory = hr_allocate_vector(bytes);
    if (memory == NULL) {
        return HORO_ERR_RESOURCE;
    }
    self->packed = memory + packed;
    self->shares = memory + shares;
    self->sums = (double *)(void *)(memory + sums);
    self->bytes = (size_t *)(void *)(memory + table);
    self->vectors = (struct hr_fused *)(void *)(memory + vectors);
    self->pieces = (struct hr_piece *)(void *)(memory + pieces);
    const int begun = self->is_packed ? enter(self, HR_ADASUM_PACK) : begin_scatter(self);
    if (begun < 0) {
        hr_adasum_free(self);
    }
    return begun < 0 ? begun : HORO_OK;
}
