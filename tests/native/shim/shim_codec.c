#include "shim_codec.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "backend/operands.h"
#include "base/clock.h"
#include "collective/collective.h"
#include "int8_codec.h"
#include "loopback.h"

static const int64_t TIMEOUT_NS = 20000000000;

struct rank {
    struct hr_node node;
    struct hr_team team;
    struct hr_allreduce run;
};

struct shim_codec_job {
    int size;
    struct hr_codec codec;
    struct loopback_hub *hub;
    void **arenas; /* [size]: of hosts */
    struct rank *ranks;
};

/* Where the ranks of a host meet; made by the first of them. */
static void *arena_of(shim_codec_job *job, const struct hr_team *team) {
    void **arena = &job->arenas[team->host];
    if (*arena == NULL) {
        const size_t bytes = (size_t)hr_arena_layout_bytes(team->local_size, team->tuning.segment, 1);
        *arena = aligned_alloc(HR_LINE, hr_round_up(bytes, HR_LINE));
        if (*arena != NULL) {
            memset(*arena, 0, bytes);
        }
    }
    return *arena;
}

static int join(shim_codec_job *job, int index, const int32_t *host_of_rank, size_t segment_bytes) {
    struct rank *rank = &job->ranks[index];
    struct hr_team *team = &rank->team;
    struct hr_error error = {0};
    HR_TRY(hr_team_init(team, &rank->node, index, job->size, host_of_rank, segment_bytes, &error));
    void *arena = arena_of(job, team);
    if (arena == NULL) {
        return HORO_ERR_RESOURCE;
    }
    rank->node.kernel = hr_kernel_best();
    rank->node.local_rank = team->local_rank;
    rank->node.local_size = team->local_size;
    team->transport = loopback_create(job->hub, team->host, team->local_rank, &error);
    HR_TRY(team->transport == NULL ? HORO_ERR_RESOURCE : HORO_OK);
    HR_TRY(hr_arena_map(&rank->node.arena, arena, SIZE_MAX / 2, -1, team->local_rank, team->local_size, segment_bytes,
                        &error));
    return hr_partition_map(&rank->node.arena, 0, &team->partition, &error);
}

shim_codec_job *shim_codec_create(const int32_t *host_of_rank, int size, size_t segment_bytes, size_t block_elements) {
    const struct loopback_timing timing = {0};
    shim_codec_job *job = calloc(1, sizeof *job);
    if (job == NULL) {
        return NULL;
    }
    job->size = size;
    job->codec = int8_codec(block_elements);
    job->hub = loopback_hub_create(size, &timing);
    job->arenas = calloc((size_t)size, sizeof *job->arenas);
    job->ranks = calloc((size_t)size, sizeof *job->ranks);
    int status = job->hub != NULL && job->arenas != NULL && job->ranks != NULL ? HORO_OK : HORO_ERR_RESOURCE;
    for (int i = 0; i < size && status == HORO_OK; i++) {
        status = join(job, i, host_of_rank, segment_bytes);
    }
    if (status != HORO_OK) {
        shim_codec_destroy(job);
        return NULL;
    }
    return job;
}

void shim_codec_destroy(shim_codec_job *job) {
    for (int i = 0; job->ranks != NULL && i < job->size; i++) {
        hr_team_fini(&job->ranks[i].team);
    }
    for (int host = 0; job->arenas != NULL && host < job->size; host++) {
        free(job->arenas[host]);
    }
    if (job->hub != NULL) {
        loopback_hub_destroy(job->hub);
    }
    free(job->arenas);
    free(job->ranks);
    free(job);
}

/* As the driver of the engine does it, but that nobody sleeps. */
static int run_task(struct rank *rank) {
    struct hr_task *task = &rank->run.segments.task;
    const int64_t deadline_ns = hr_now_ns() + TIMEOUT_NS;
    int moved;
    while ((moved = task->progress(task)) > HR_TASK_DONE && hr_now_ns() < deadline_ns) {
        if (moved == HR_TASK_BLOCKED && !rank->team.transport->ops->progress(rank->team.transport)) {
            (void)sched_yield();
        }
    }
    if (moved != HR_TASK_DONE) {
        task->cancel(task);
    }
    return moved > HR_TASK_DONE ? HORO_ERR_TIMEOUT : moved;
}

int shim_codec_allreduce(shim_codec_job *job, int rank, const shim_codec_tensor *tensors, size_t tensor_count,
                         int reduce_op, double prescale, double postscale) {
    struct rank *self = &job->ranks[rank];
    struct hr_piece *pieces = calloc(tensor_count + 1, sizeof *pieces);
    if (pieces == NULL) {
        return HORO_ERR_RESOURCE;
    }
    struct hr_fused fused = {.pieces = pieces, .codec = &job->codec};
    for (size_t i = 0; i < tensor_count; i++) {
        hr_fuse_append(&fused, pieces, tensors[i].input, tensors[i].output, tensors[i].count);
    }
    int status = hr_allreduce_begin(&self->run, &self->team, &fused, reduce_op, prescale, hr_scale_by(postscale));
    if (status == HORO_OK) {
        status = run_task(self);
    }
    free(pieces);
    return status;
}

uint64_t shim_codec_link_bytes(const shim_codec_job *job, int rank) {
    return atomic_load(&job->ranks[rank].team.transport->data_bytes);
}
