/*
 * Adasum (S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021) of any number of ranks,
 * out of three collectives that every backend has, so that it is the same over arena, TCP and MPI.
 *
 * Two vectors a and b become a (1 - a.b / (2 a.a)) + b (1 - a.b / (2 b.b)), tensor by tensor: their sum where they are
 * orthogonal, their mean where they are equal. Ranks are combined pairwise, as a tree: 0 with 1 and 2 with 3, then what
 * came of 0 and 1 with what came of 2 and 3, and so on; who has no partner goes on unchanged.
 *
 * The values of a batch, seen as one vector, are cut into one share for each of the p ranks:
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

#include "backend/operands.h"
#include "base/cut.h"

enum {
    TURN_BYTES = 1 << 18, /* of values, worked on in one turn of the driver's loop */
    ALIGNMENT = 64,
    PRODUCTS = 3, /* a.b, a.a, b.b */
};

struct adasum {
    struct hr_backend base;
    struct hr_backend *inner;
    struct hr_team *team;

    int runs; /* the work begun last is an Adasum: else it is inner's */
    struct hr_work work;
    struct hr_kinds kinds;
    struct hr_pieces pieces;
    /* In their order, for the kinds of the batch one after the other; the middle three for each level of the tree. */
    enum hr_adasum_phase stage;

    /* Of one kind. Counts are of values as they travel. */
    struct hr_fused fused;
    size_t width;            /* bytes of a value */
    size_t count;
    size_t first, own_count; /* my share */
    int is_packed;           /* the values to send and the result lie in `packed`; else in the only tensor itself */
    size_t at;               /* values done in this stage, of the current pair */
    int low;                 /* the lower rank of the current pair, whose share becomes what comes of both */
    int distance;            /* to the upper one */

    /* One allocation. */
    struct hr_gathered memory;
    char *packed;          /* [count] */
    char *shares;          /* [size][own_count] mine, of the vector of each rank */
    double *sums;          /* [pairs of a level][tensors][PRODUCTS] */
    int64_t *splits;       /* [size][size] */
    int64_t *own_counts;   /* [size] */
    int64_t *share_counts; /* [size] */

    /* The operand that inner is told. */
    struct hr_operand operand;
    struct hr_gathered result;
};

static void enter(struct adasum *self, enum hr_adasum_phase stage) {
    struct hr_recorder *recorder = &self->team->node->recorder;
    self->stage = stage;
    self->at = 0;
    if (hr_recorder_is_traced(recorder)) {
        hr_recorder_add(recorder, &(struct hr_event){.event = HR_EVENT_PHASE,
                                                     .op = HORO_ALLREDUCE,
                                                     .team = self->team->number,
                                                     .number = (int32_t)stage});
    }
}

static void free_memory(struct adasum *self) {
    hr_node_bury(self->team->node, self->memory.data, free);
    self->memory = (struct hr_gathered){0};
}

/* ---- What inner does ---- */

static int begin_inner(struct adasum *self, enum hr_adasum_phase stage, struct hr_work work) {
    work.operands = &self->operand;
    work.count = 1;
    work.results = &self->result;
    work.prescale = 1.0;
    work.postscale = 1.0;
    enter(self, stage);
    HR_TRY(self->inner->ops->begin(self->inner, &work));
    return HR_MOVED;
}

static int begin_scatter(struct adasum *self) {
    const size_t size = (size_t)self->team->size;
    for (size_t r = 0; r < size; r++) {
        size_t begin;
        size_t length;
        hr_part(self->count, size, r, &begin, &length);
        self->own_counts[r] = (int64_t)self->own_count;
        self->share_counts[r] = (int64_t)length;
        for (size_t s = 0; s < size; s++) {
            self->splits[s * size + r] = (int64_t)length;
        }
    }
    self->operand = (struct hr_operand){.input = self->is_packed ? self->packed : self->fused.pieces[0].input,
                                        .bytes = self->count * self->width,
                                        .dtype = HORO_UINT8,
                                        .row_bytes = self->width};
    self->result = (struct hr_gathered){.data = self->shares,
                                        .is_given = 1,
                                        .bytes = (int64_t)(size * self->own_count * self->width),
                                        .first_dims = self->own_counts};
    return begin_inner(self, HR_ADASUM_SCATTER, (struct hr_work){.op = HORO_ALLTOALL, .splits = self->splits});
}

static int begin_sum(struct adasum *self) {
    const size_t pairs = hr_divide_up((size_t)(self->team->size - self->distance), 2 * (size_t)self->distance);
    const size_t bytes = pairs * self->fused.count * PRODUCTS * sizeof *self->sums;
    self->operand =
        (struct hr_operand){.input = self->sums, .output = self->sums, .bytes = bytes, .dtype = HORO_FLOAT64};
    return begin_inner(self, HR_ADASUM_SUM, (struct hr_work){.op = HORO_ALLREDUCE, .reduce_op = HORO_SUM});
}

/* ---- Arithmetic: each function does what fits one turn, and says whether there is more ---- */

/* Packs, or unpacks. */
static int convert(struct adasum *self) {
    const size_t bytes = self->count * self->width;
    const size_t step = hr_smaller(TURN_BYTES, bytes - self->at);
    const struct hr_kernel *kernel = self->team->node->kernel;
    char *packed = self->packed + self->at;
    if (self->stage == HR_ADASUM_PACK) {
        hr_fused_pack(&self->fused, self->at, step, packed, kernel, self->work.prescale, HR_STORE_ORDINARY);
    } else {
        hr_fused_unpack(&self->fused, self->at, step, packed, kernel);
    }
    self->at += step;
    return self->at < bytes;
}

/* Below that, a vector counts as zero, which has no direction. As in Horovod; of its square, too. */
static double factor_of(double product, double square) {
    return square >= sqrt(DBL_MIN) ? 1.0 - product / (2.0 * square) : 1.0;
}

/* All pairs of the level. */
static int work_on_pairs(struct adasum *self) {
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
            kernel->dots(dtype, a, b, step, sums);
        } else {
            kernel->combine(dtype, a, b, step, factor_of(sums[0], sums[1]), factor_of(sums[0], sums[2]));
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

static void begin_pairs(struct adasum *self, enum hr_adasum_phase stage) {
    enter(self, stage);
    self->low = 0;
    if (stage == HR_ADASUM_MULTIPLY) {
        memset(self->sums, 0, (size_t)self->team->size / 2 * self->fused.count * PRODUCTS * sizeof *self->sums);
    }
}

/* ---- The stages ---- */

/* HR_MOVED; HR_DONE behind the last kind; or a status. */
static int begin_kind(struct adasum *self) {
    free_memory(self);
    do {
        if (!hr_kinds_next(&self->kinds, self->pieces.at, &self->fused)) {
            return HR_DONE;
        }
    } while (self->fused.bytes == 0);
    const struct hr_codec *codec = self->fused.codec;
    if (codec->wire_dtype == HR_CODEC_OPAQUE) {
        return HORO_ERR_INTERNAL; /* no kernel can multiply its blocks */
    }
    self->width = codec->block_bytes;
    self->count = self->fused.bytes / self->width;
    self->is_packed = self->fused.count > 1 || !hr_codec_is_plain(codec) || self->work.prescale != 1.0;
    hr_part(self->count, (size_t)self->team->size, (size_t)self->team->rank, &self->first, &self->own_count);
    self->distance = 1;
    self->stage = HR_ADASUM_PACK;
    self->at = 0;
    const size_t size = (size_t)self->team->size;
    size_t bytes = 0;
    const size_t packed = hr_place(&bytes, self->is_packed ? self->count * self->width : 0, ALIGNMENT);
    const size_t shares = hr_place(&bytes, size * self->own_count * self->width, ALIGNMENT);
    const size_t sums = hr_place(&bytes, size / 2 * self->fused.count * PRODUCTS * sizeof *self->sums, ALIGNMENT);
    const size_t splits = hr_place(&bytes, size * size * sizeof *self->splits, ALIGNMENT);
    const size_t own_counts = hr_place(&bytes, size * sizeof *self->own_counts, ALIGNMENT);
    const size_t share_counts = hr_place(&bytes, size * sizeof *self->share_counts, ALIGNMENT);
    self->memory = (struct hr_gathered){.bytes = (int64_t)bytes};
    HR_TRY(hr_gathered_allocate(&self->memory));
    char *data = self->memory.data;
    self->packed = data + packed;
    self->shares = data + shares;
    self->sums = (double *)(void *)(data + sums);
    self->splits = (int64_t *)(void *)(data + splits);
    self->own_counts = (int64_t *)(void *)(data + own_counts);
    self->share_counts = (int64_t *)(void *)(data + share_counts);
    if (!self->is_packed) {
        return begin_scatter(self);
    }
    enter(self, HR_ADASUM_PACK);
    return HR_MOVED;
}

/* The root of the tree is the first share. */
static int end_level(struct adasum *self) {
    self->distance *= 2;
    if (self->distance >= self->team->size) {
        const struct hr_scale scale = hr_scale_by(self->work.postscale);
        if (hr_scale_changes(scale)) {
            const struct hr_codec *codec = self->fused.codec;
            codec->scale(codec, self->team->node->kernel, self->shares, self->own_count, scale);
        }
        self->operand = (struct hr_operand){.input = self->shares,
                                            .bytes = self->own_count * self->width,
                                            .dtype = HORO_UINT8,
                                            .row_bytes = self->width};
        self->result = (struct hr_gathered){.data = self->is_packed ? self->packed : self->fused.pieces[0].output,
                                            .is_given = 1,
                                            .bytes = (int64_t)(self->count * self->width),
                                            .first_dims = self->share_counts};
        return begin_inner(self, HR_ADASUM_GATHER, (struct hr_work){.op = HORO_ALLGATHER});
    }
    begin_pairs(self, HR_ADASUM_MULTIPLY);
    return HR_MOVED;
}

static int adasum_progress(struct hr_backend *backend) {
    struct adasum *self = (struct adasum *)backend;
    if (!self->runs) {
        return self->inner->ops->progress(self->inner);
    }
    switch (self->stage) {
    case HR_ADASUM_PACK:
        return convert(self) ? HR_MOVED : begin_scatter(self);
    case HR_ADASUM_MULTIPLY: return work_on_pairs(self) ? HR_MOVED : begin_sum(self);
    case HR_ADASUM_COMBINE: return work_on_pairs(self) ? HR_MOVED : end_level(self);
    case HR_ADASUM_UNPACK:
        return convert(self) ? HR_MOVED : begin_kind(self);
    case HR_ADASUM_SCATTER:
    case HR_ADASUM_SUM:
    case HR_ADASUM_GATHER: break;
    }
    const int moved = self->inner->ops->progress(self->inner);
    if (moved != HR_DONE) {
        return moved;
    }
    if (self->stage != HR_ADASUM_GATHER) {
        begin_pairs(self, self->stage == HR_ADASUM_SCATTER ? HR_ADASUM_MULTIPLY : HR_ADASUM_COMBINE);
    } else if (self->is_packed) {
        enter(self, HR_ADASUM_UNPACK);
    } else {
        return begin_kind(self);
    }
    return HR_MOVED;
}

/* ---- The table ---- */

static hr_status adasum_begin(struct hr_backend *backend, const struct hr_work *work) {
    struct adasum *self = (struct adasum *)backend;
    const int is_adasum = work->reduce_op == HORO_ADASUM && work->op == HORO_ALLREDUCE;
    self->runs = is_adasum && self->team->size > 1;
    self->work = *work;
    if (!self->runs) {
        self->work.reduce_op = is_adasum ? HORO_SUM : work->reduce_op; /* of one rank: its own, scaled */
        return self->inner->ops->begin(self->inner, &self->work);
    }
    self->kinds = (struct hr_kinds){.operands = work->operands,
                                    .count = work->count,
                                    .rank = self->team->rank,
                                    .size = self->team->size};
    HR_TRY(hr_pieces_reserve(&self->pieces, work->count));
    const int begun = begin_kind(self);
    self->runs = begun != HR_DONE;
    if (begun == HR_DONE) { /* no values at all: inner is done with that at once */
        self->work.reduce_op = HORO_SUM;
        return self->inner->ops->begin(self->inner, &self->work);
    }
    return begun < 0 ? begun : HORO_OK;
}

static void adasum_cancel(struct hr_backend *backend) {
    struct adasum *self = (struct adasum *)backend;
    const int is_with_inner =
        self->stage == HR_ADASUM_SCATTER || self->stage == HR_ADASUM_SUM || self->stage == HR_ADASUM_GATHER;
    if (!self->runs || is_with_inner) {
        self->inner->ops->cancel(self->inner);
    }
    free_memory(self);
}

static int adasum_begin_ahead(struct hr_backend *backend) {
    const struct adasum *self = (const struct adasum *)backend;
    return !self->runs && self->inner->ops->begin_ahead(self->inner);
}

static void adasum_show_ahead(struct hr_backend *backend) {
    const struct adasum *self = (const struct adasum *)backend;
    self->inner->ops->show_ahead(self->inner);
}

static int adasum_is_ending(const struct hr_backend *backend) {
    const struct adasum *self = (const struct adasum *)backend;
    if (self->runs && (self->stage != HR_ADASUM_GATHER || self->fused.count < self->work.count)) {
        return 0; /* also with several kinds, whose last one has fewer tensors */
    }
    return self->inner->ops->is_ending(self->inner);
}

static void adasum_destroy(struct hr_backend *backend) {
    struct adasum *self = (struct adasum *)backend;
    hr_backend_destroy(self->inner);
    hr_pieces_fini(&self->pieces);
    free_memory(self);
    free(self);
}

static const struct hr_backend_ops adasum_ops = {
    .name = "host",
    .begin = adasum_begin,
    .begin_ahead = adasum_begin_ahead,
    .show_ahead = adasum_show_ahead,
    .progress = adasum_progress,
    .cancel = adasum_cancel,
    .is_ending = adasum_is_ending,
    .destroy = adasum_destroy,
};

struct hr_backend *hr_adasum_create(struct hr_team *team) {
    struct hr_backend *inner = hr_host_backend_create(team);
    struct adasum *self = inner == NULL ? NULL : calloc(1, sizeof *self);
    if (self == NULL) {
        hr_backend_destroy(inner);
        return NULL;
    }
    self->base.ops = &adasum_ops;
    self->inner = inner;
    self->team = team;
    return &self->base;
}
