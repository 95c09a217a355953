/* Collectives on host memory: turns operands into fused vectors for the algorithms. */
#include <stdlib.h>

#include "backend/operands.h"
#include "collective/collective.h"

/* Scratch of one allgather. */
struct gathering {
    struct hr_fused *by_rank;
    size_t *offsets;
};

struct host_backend {
    struct hr_backend base;
    struct hr_team *team;
    struct hr_pieces pieces;
    struct hr_work work;
    struct hr_kinds kinds;
    struct gathering gathering;
    struct hr_task *task; /* the step that runs; NULL: none */
    union {
        struct hr_allreduce allreduce;
        struct hr_broadcast broadcast;
        struct hr_allgather allgather;
    } run;
};

static struct host_backend *host_of(struct hr_backend *backend) {
    return (struct host_backend *)backend;
}

/* ---- Allreduce: one vector after the other ---- */

static int begin_kind(struct host_backend *host) {
    struct hr_fused fused;
    const struct hr_work *work = &host->work;
    if (!hr_kinds_next(&host->kinds, host->pieces.at, &fused)) {
        return HR_TASK_DONE;
    }
    host->task = NULL; /* a task that could not begin has nothing to cancel */
    HR_TRY(hr_allreduce_begin(&host->run.allreduce, host->team, &fused, hr_operation_of(work->reduce_op),
                              work->prescale, hr_postscale_of(work, fused.codec->dtype, host->team->size)));
    host->task = &host->run.allreduce.segments.task;
    return HR_TASK_MOVED;
}

/* ---- Allgather ---- */

static void end_gathering(struct host_backend *host) {
    free(host->gathering.by_rank);
    free(host->gathering.offsets);
    host->gathering = (struct gathering){0};
}

/* For each rank, its contributions to all tensors as one vector with the places here as outputs. */
static void place_contributions(const struct host_backend *host) {
    const struct hr_work *work = &host->work;
    const struct gathering *gathering = &host->gathering;
    for (int r = 0; r < host->team->size; r++) {
        struct hr_piece *pieces = host->pieces.at + (size_t)r * work->count;
        struct hr_fused *theirs = &gathering->by_rank[r];
        *theirs = (struct hr_fused){.pieces = pieces, .codec = hr_codec_find(HORO_UINT8, 0)};
        for (size_t i = 0; i < work->count; i++) {
            const struct hr_gathered *result = &work->results[i];
            const size_t bytes = (size_t)result->first_dims[r] * work->row_bytes[i];
            hr_fuse_append(theirs, pieces, work->operands[i].input, (char *)result->data + gathering->offsets[i],
                           bytes);
            gathering->offsets[i] += bytes;
        }
    }
}

static int begin_gathering(struct host_backend *host) {
    struct gathering *gathering = &host->gathering;
    gathering->by_rank = calloc((size_t)host->team->size, sizeof *gathering->by_rank);
    gathering->offsets = calloc(host->work.count, sizeof *gathering->offsets);
    if (gathering->by_rank == NULL || gathering->offsets == NULL) {
        end_gathering(host);
        return HORO_ERR_RESOURCE;
    }
    place_contributions(host);
    HR_TRY(hr_allgather_begin(&host->run.allgather, host->team, gathering->by_rank));
    host->task = &host->run.allgather.segments.task;
    return HORO_OK;
}

/* ---- The table ---- */

static int host_begin(struct hr_backend *backend, const struct hr_work *work) {
    struct host_backend *host = host_of(backend);
    const size_t parts = work->op == HORO_ALLGATHER ? (size_t)host->team->size : 1;
    host->work = *work;
    host->task = NULL;
    HR_TRY(hr_pieces_reserve(&host->pieces, parts * work->count));
    switch (work->op) {
    case HORO_ALLREDUCE:
        host->kinds = (struct hr_kinds){.operands = work->operands, .count = work->count};
        return begin_kind(host) < 0 ? HORO_ERR_RESOURCE : HORO_OK;
    case HORO_BROADCAST: {
        const struct hr_fused fused = hr_fuse_bytes(host->pieces.at, work->operands, work->count);
        hr_broadcast_begin(&host->run.broadcast, host->team, &fused, work->root_rank);
        host->task = &host->run.broadcast.segments.task;
        return HORO_OK;
    }
    case HORO_ALLGATHER: return begin_gathering(host);
    default: return HORO_ERR_INTERNAL;
    }
}

/* What follows a step that is done: HR_TASK_MOVED if there is something, HR_TASK_DONE if there is not, or a status. */
static int begin_next(struct host_backend *host) {
    if (host->work.op == HORO_ALLREDUCE) {
        return begin_kind(host);
    }
    end_gathering(host);
    return HR_TASK_DONE;
}

static int host_progress(struct hr_backend *backend) {
    struct host_backend *host = host_of(backend);
    const int moved = host->task == NULL ? HR_TASK_DONE : host->task->progress(host->task);
    return moved == HR_TASK_DONE ? begin_next(host) : moved;
}

static void host_cancel(struct hr_backend *backend) {
    struct host_backend *host = host_of(backend);
    if (host->task != NULL) {
        host->task->cancel(host->task);
        host->task = NULL;
    }
    if (host->work.op == HORO_ALLGATHER && atomic_load(&host->team->node->mpi.stranded) != 0) {
        hr_gathered_disown(host->work.results, host->work.count);
    }
    end_gathering(host);
}

static int host_is_ending(const struct hr_backend *backend) {
    const struct host_backend *host = (const struct host_backend *)backend;
    return host->task == NULL || host->task->is_ending(host->task);
}

static void host_destroy(struct hr_backend *backend) {
    struct host_backend *host = host_of(backend);
    if (host != NULL) {
        hr_pieces_fini(&host->pieces);
        end_gathering(host);
        free(host);
    }
}

static const struct hr_backend_ops host_ops = {
    .name = "host",
    .carries = 1,
    .begin = host_begin,
    .progress = host_progress,
    .cancel = host_cancel,
    .is_ending = host_is_ending,
    .destroy = host_destroy,
};

struct hr_backend *hr_host_backend_create(struct hr_team *team) {
    struct host_backend *host = calloc(1, sizeof *host);
    if (host == NULL) {
        return NULL;
    }
    host->base.ops = &host_ops;
    host->team = team;
    return &host->base;
}
