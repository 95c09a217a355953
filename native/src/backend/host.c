/* Collectives on host memory: turns operands into fused vectors for the algorithms. */
#include <stdlib.h>

#include "backend/backend.h"
#include "base/buffer.h"
#include "base/cut.h"
#include "base/traits.h"
#include "collective/collective.h"

struct host_backend {
    struct hr_backend base;
    struct hr_team *team;
    struct hr_piece *pieces; /* [piece_capacity] */
    size_t piece_capacity;
    struct hr_fused *by_rank; /* [2 * size] a part of each; of an exchange, behind them, what goes to each */
    size_t *bytes;            /* [size * size] of an exchange, from each to each; NULL before the first one */
    struct hr_work work;
    int next_kind;         /* of a reduction: see kind_of */
    size_t moved_bytes;    /* of all ranks together, of an exchange their mean; not of an allreduce */
    struct hr_task *task;  /* the step that runs; NULL: none */
    int has_adasum;        /* the step is run.adasum */
    int is_direct;         /* of a move, and of a reduce-scatter: from the others' memory, not by the slots */
    union {
        struct hr_direct direct;
        struct hr_allreduce allreduce;
        struct hr_adasum adasum;
        struct hr_broadcast broadcast;
        struct hr_allgather allgather;
        struct hr_reducescatter reducescatter;
        struct hr_alltoall alltoall;
    } run;
};

/* ---- From the others' memory ---- */

/* Begins what reads the others' memory; 0 if it does not pay. */
static int begin_direct(struct host_backend *host, const struct hr_move *move) {
    struct hr_team *team = host->team;
    host->is_direct = hr_direct_pays(team, move, host->moved_bytes);
    if (host->is_direct) {
        hr_direct_begin(&host->run.direct, team, move);
        host->task = &host->run.direct.task;
    }
    return host->is_direct;
}

/* ---- Reductions: the operands of equal dtype and wire dtype are one vector; one kind after the other ---- */

int hr_operation_of(int reduce_op) {
    return reduce_op == HORO_AVERAGE ? HORO_SUM : reduce_op;
}

struct hr_scale hr_postscale_of(int reduce_op, double postscale, int dtype, int size) {
    if (reduce_op != HORO_AVERAGE) {
        return hr_scale_by(postscale);
    }
    return hr_dtype_is_integer(dtype) ? (struct hr_scale){postscale, size} : hr_scale_by(postscale / size);
}

static struct hr_scale postscale_of(const struct host_backend *host, const struct hr_codec *codec) {
    return hr_postscale_of(host->work.reduce_op, host->work.postscale, codec->dtype, host->team->size);
}

enum { KIND_COUNT = 3 * HR_REDUCED_DTYPE_COUNT }; /* a dtype that travels as it is, as float16 or as bfloat16 */

static int kind_of(const struct hr_operand *operand) {
    const int wire = operand->wire_dtype;
    return operand->dtype + HR_REDUCED_DTYPE_COUNT * (wire == 0 ? 0 : wire == HORO_FLOAT16 ? 1 : 2);
}

/* The rows of all operands of a kind that fall to rank r (a reduce's to the root); mine have outputs; -1: all. */
static struct hr_fused fuse(const struct host_backend *host, struct hr_piece *pieces, int kind, int r) {
    struct hr_fused fused = {.pieces = pieces};
    for (size_t i = 0; i < host->work.count; i++) {
        const struct hr_operand *operand = &host->work.operands[i];
        if (kind_of(operand) != kind) {
            continue;
        }
        size_t begin = 0, bytes = operand->bytes;
        if (host->work.op == HORO_REDUCE) {
            bytes = r < 0 || r == host->work.root_rank ? bytes : 0;
        } else if (r >= 0 && bytes > 0) {
            hr_part(bytes / operand->row_bytes, (size_t)host->team->size, (size_t)r, &begin, &bytes);
            begin *= operand->row_bytes;
            bytes *= operand->row_bytes;
        }
        fused.codec = hr_codec_find(operand->dtype, operand->wire_dtype);
        hr_fuse_append(&fused, pieces, (const char *)operand->input + begin,
                       r < 0 || r == host->team->rank ? operand->output : NULL, bytes / fused.codec->element_bytes);
    }
    return fused;
}

/* The vectors have been made. */
static int begin_scatter(struct host_backend *host, int begins_again) {
    const struct hr_fused *by_rank = host->by_rank;
    const struct hr_work *work = &host->work;
    const int reduce_op = hr_operation_of(work->reduce_op);
    const struct hr_scale postscale = postscale_of(host, by_rank[0].codec);
    const size_t done = begins_again ? host->run.direct.done : 0;
    /* the sum of a reduce may have taken the place of the root's input, which a second try would need */
    if (work->prescale == 1.0 && by_rank[0].codec->is_plain && work->op != HORO_REDUCE) {
        const struct hr_move move = {by_rank, host->team->size, by_rank, work->count, 0, 1, reduce_op, postscale};
        if (begin_direct(host, &move)) {
            return HR_MOVED;
        }
    }
    host->is_direct = 0;
    host->task = NULL;
    HR_TRY(hr_reducescatter_begin(&host->run.reducescatter, host->team, by_rank, reduce_op, work->prescale, postscale));
    host->run.reducescatter.done = done;
    host->task = &host->run.reducescatter.segments.task;
    return HR_MOVED;
}

/* The least kind that is not done. */
static int begin_reduction(struct host_backend *host) {
    const struct hr_work *work = &host->work;
    int kind = KIND_COUNT;
    for (size_t i = 0; i < work->count; i++) {
        const int other = kind_of(&work->operands[i]);
        kind = other >= host->next_kind && other < kind ? other : kind;
    }
    host->next_kind = kind + 1;
    if (kind == KIND_COUNT) {
        return HR_DONE;
    }
    if (work->op != HORO_ALLREDUCE) {
        host->moved_bytes = 0;
        for (int r = 0; r < host->team->size; r++) {
            host->by_rank[r] = fuse(host, host->pieces + (size_t)r * work->count, kind, r);
            host->moved_bytes += host->by_rank[r].bytes;
        }
        return begin_scatter(host, 0);
    }
    const struct hr_fused fused = fuse(host, host->pieces, kind, -1);
    host->task = NULL; /* a task that could not begin has nothing to cancel */
    host->has_adasum = work->reduce_op == HORO_ADASUM && fused.bytes > 0;
    if (host->has_adasum) {
        HR_TRY(hr_adasum_begin(&host->run.adasum, host->team, &fused, work->prescale, work->postscale));
        host->task = &host->run.adasum.task;
    } else {
        HR_TRY(hr_allreduce_begin(&host->run.allreduce, host->team, &fused, hr_operation_of(work->reduce_op),
                                  work->prescale, postscale_of(host, fused.codec)));
        host->task = &host->run.allreduce.segments.task;
    }
    return HR_MOVED;
}

/* ---- Moves: broadcast, allgather, alltoall, and gather and scatter, which are alltoalls with little to do ---- */

/* The bytes that rank s has of tensor i for rank d. */
static size_t bytes_for(const struct hr_work *work, int size, int s, size_t i, int d) {
    const struct hr_operand *operand = &work->operands[i];
    switch (work->op) {
    case HORO_ALLGATHER: return (size_t)work->results[i].first_dims[s] * operand->row_bytes;
    case HORO_ALLTOALL:
        return (size_t)work->splits[((size_t)s * work->count + i) * (size_t)size + (size_t)d] * operand->row_bytes;
    default: return work->root_rank == (work->op == HORO_GATHER ? d : s) ? operand->bytes : 0;
    }
}

/* Of an exchange, the bytes from each to each. */
static hr_status measure(struct host_backend *host) {
    const struct hr_work *work = &host->work;
    const int size = host->team->size;
    if (host->bytes == NULL && (host->bytes = malloc((size_t)size * (size_t)size * sizeof *host->bytes)) == NULL) {
        return HORO_ERR_RESOURCE;
    }
    size_t *pair = host->bytes;
    for (int s = 0; s < size; s++) {
        for (int d = 0; d < size; d++, pair++) {
            *pair = 0;
            for (size_t i = 0; i < work->count; i++) {
                *pair += bytes_for(work, size, s, i, d);
            }
            host->moved_bytes += *pair;
        }
    }
    host->moved_bytes /= (size_t)size;
    return HORO_OK;
}

/* Makes the vectors: what comes from each rank, of my own with its input; of an exchange also what goes to each. */
static hr_status lay_out_move(struct host_backend *host) {
    const struct hr_work *work = &host->work;
    const int size = host->team->size;
    const int rank = host->team->rank;
    const int exchanges = hr_op_is(work->op, HR_OP_EXCHANGE);
    struct hr_fused *from = host->by_rank;
    struct hr_fused *to = from + size;
    for (int v = 0; v < (exchanges ? 2 * size : size); v++) {
        from[v] = (struct hr_fused){.pieces = host->pieces + (size_t)v * work->count,
                                    .codec = hr_codec_find(HORO_UINT8, 0)};
    }
    for (size_t i = 0; i < work->count; i++) {
        const char *input = work->operands[i].input;
        char *output = hr_op_is(work->op, HR_OP_TELLING_ROWS) ? work->results[i].data : work->operands[i].output;
        struct hr_piece *pieces = host->pieces;
        for (int r = 0; r < size; r++, pieces += work->count) {
            const size_t received = bytes_for(work, size, r, i, rank);
            hr_fuse_append(&from[r], pieces, r == rank ? input : NULL, output, received);
            output += received;
            if (exchanges) {
                const size_t sent = bytes_for(work, size, rank, i, r);
                hr_fuse_append(&to[r], pieces + (size_t)size * work->count, input, NULL, sent);
                input += sent;
            }
        }
    }
    host->moved_bytes = 0;
    for (int r = 0; r < size && !exchanges; r++) {
        host->moved_bytes += from[r].bytes;
    }
    return exchanges ? measure(host) : HORO_OK;
}

/* From the others' memory where that pays, else through the slots, and between hosts. */
static hr_status begin_move(struct host_backend *host) {
    const int op = host->work.op;
    const int exchanges = hr_op_is(op, HR_OP_EXCHANGE);
    struct hr_team *team = host->team;
    const struct hr_fused *from = host->by_rank;
    const struct hr_fused *to = from + team->size;
    const struct hr_move move = {.shown = exchanges ? to : &from[team->rank], .shown_count = exchanges ? team->size : 1,
                                 .from = from, .tensors = host->work.count, .is_gather = op == HORO_ALLGATHER};
    host->task = NULL;
    if (begin_direct(host, &move)) {
        return HORO_OK;
    }
    if (exchanges) {
        HR_TRY(hr_alltoall_begin(&host->run.alltoall, team, to, from, host->bytes));
        host->task = &host->run.alltoall.segments.task;
    } else if (op == HORO_BROADCAST && team->host_count > 1) {
        hr_broadcast_begin(&host->run.broadcast, team, &from[host->work.root_rank], host->work.root_rank);
        host->task = &host->run.broadcast.segments.task;
    } else { /* on one host, in a broadcast, the others have nothing to gather */
        HR_TRY(hr_allgather_begin(&host->run.allgather, team, from));
        host->task = &host->run.allgather.segments.task;
    }
    return HORO_OK;
}

/* ---- The table ---- */

static hr_status host_begin(struct hr_backend *backend, const struct hr_work *work) {
    struct host_backend *host = (struct host_backend *)backend;
    host->work = *work;
    if (hr_op_is(work->op, HR_OP_REDUCTION) && host->team->size == 1) {
        host->work.op = HORO_ALLREDUCE;
        if (work->reduce_op == HORO_ADASUM) {
            host->work.reduce_op = HORO_SUM; /* its own, scaled */
        }
    }
    host->task = NULL;
    host->has_adasum = host->is_direct = host->next_kind = 0;
    const int op = host->work.op;
    /* each vector needs a piece for each tensor */
    const size_t vectors = op == HORO_ALLREDUCE ? 1 : (size_t)host->team->size * (hr_op_is(op, HR_OP_EXCHANGE) ? 2 : 1);
    HR_TRY(hr_reserve((void **)&host->pieces, &host->piece_capacity, vectors * work->count, sizeof *host->pieces));
    if (hr_op_is(op, HR_OP_REDUCTION)) {
        return begin_reduction(host) < 0 ? HORO_ERR_RESOURCE : HORO_OK;
    }
    HR_TRY(lay_out_move(host));
    return begin_move(host);
}

static int host_begin_ahead(struct hr_backend *backend) {
    const struct host_backend *host = (struct host_backend *)backend;
    return host->task->fill_ahead != NULL && host->task->fill_ahead(host->task);
}

static void host_show_ahead(struct hr_backend *backend) {
    const struct host_backend *host = (struct host_backend *)backend;
    host->task->show_ahead(host->task);
}

static int host_progress(struct hr_backend *backend) {
    struct host_backend *host = (struct host_backend *)backend;
    const int moved = host->task == NULL ? HR_DONE : host->task->progress(host->task);
    if (moved != HR_DONE) {
        return moved;
    }
    const int begins_again = host->is_direct && host->team->reads_peers < 0; /* its reads have failed */
    if (hr_op_is(host->work.op, HR_OP_REDUCTION)) {
        return begins_again ? begin_scatter(host, 1) : begin_reduction(host);
    }
    HR_TRY(begins_again ? begin_move(host) : HORO_OK);
    return begins_again ? HR_MOVED : HR_DONE;
}

static void host_cancel(struct hr_backend *backend) {
    struct host_backend *host = (struct host_backend *)backend;
    if (host->task != NULL && host->task->cancel != NULL) {
        host->task->cancel(host->task);
    }
    host->task = NULL;
    for (size_t i = 0; i < host->work.count && hr_op_is(host->work.op, HR_OP_TELLING_ROWS); i++) {
        struct hr_gathered *result = &host->work.results[i];
        if (!result->is_given) {
            hr_node_bury(host->team->node, result->data, free);
            result->data = NULL;
        }
    }
}

void hr_host_backend_destroy(struct hr_backend *backend) {
    struct host_backend *host = (struct host_backend *)backend;
    if (host != NULL) {
        if (host->has_adasum && host->task != NULL) {
            hr_adasum_free(&host->run.adasum);
        }
        free(host->pieces);
        free(host->by_rank);
        free(host->bytes);
        free(host);
    }
}

static const struct hr_backend_ops host_ops = {
    .begin = host_begin, .begin_ahead = host_begin_ahead, .show_ahead = host_show_ahead,
    .progress = host_progress, .cancel = host_cancel};

struct hr_backend *hr_host_backend_create(struct hr_team *team) {
    struct host_backend *host = calloc(1, sizeof *host);
    struct hr_fused *by_rank = calloc(2 * (size_t)team->size, sizeof *by_rank);
    if (host == NULL || by_rank == NULL) {
        free(host);
        free(by_rank);
        return NULL;
    }
    host->base.ops = &host_ops;
    host->team = team;
    host->by_rank = by_rank;
    return &host->base;
}
