/* How the ranks come to a communicator of NCCL, or to the knowledge that they have none. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/op.h"
#include "device/blocks.h"
#include "engine/by_nccl.h"

/* ---- What all have told ---- */

static int same_gpu(const struct hr_nccl_report *reports, int size, int *other) {
    for (int r = 1; r < size; r++) {
        for (int s = 0; s < r; s++) {
            if (memcmp(reports[s].uuid, reports[r].uuid, sizeof reports[s].uuid) == 0) {
                *other = r;
                return s;
            }
        }
    }
    return -1;
}

void hr_nccl_judge(const struct hr_nccl_report *reports, const struct hr_team *ranks, int *has_joined, char *text,
                   size_t text_bytes) {
    const int *job_rank = ranks->job_rank;
    const int size = ranks->size;
    int other = 0;
    text[0] = '\0';
    *has_joined = 0;
    for (int r = 0; r < size; r++) {
        if (!reports[r].is_told) {
            *has_joined = 1;
            (void)snprintf(text, text_bytes, "rank %d has joined", job_rank[r]);
            return;
        }
    }
    for (int r = 0; r < size; r++) {
        if (!reports[r].is_able) {
            (void)snprintf(text, text_bytes, "rank %d cannot use NCCL: %.*s", job_rank[r],
                           (int)sizeof reports[r].lack, reports[r].lack);
            return;
        }
        if (reports[r].version != reports[0].version) {
            (void)snprintf(text, text_bytes, "rank %d has version %d of NCCL, and rank %d version %d", job_rank[0],
                           reports[0].version, job_rank[r], reports[r].version);
            return;
        }
    }
    const int one = same_gpu(reports, size, &other);
    if (one >= 0) {
        (void)snprintf(text, text_bytes, "ranks %d and %d are on the same GPU, which NCCL refuses", job_rank[one],
                       job_rank[other]);
    }
}

/* ---- Telling ---- */

/* The report's rest, which needs the GPU and, on the root, a socket of NCCL's. A failure of that is told to all. */
static void complete_report(const struct hr_by_nccl *by, int is_root, struct hr_nccl_report *mine) {
    const struct hr_device *device = by->gpu;
    struct hr_error error = {0};
    *mine = by->able;
    mine->is_told = 1;
    int status = mine->is_able ? HORO_OK : HORO_ERR_RESOURCE;
    if (status == HORO_OK) {
        status = hr_cuda_check(device->cuda, device->cuda->device_get_uuid(mine->uuid, device->handle),
                               "cuDeviceGetUuid", &error);
    }
    if (status == HORO_OK && is_root) {
        status = hr_nccl_check(&by->nccl, by->nccl.get_unique_id(&mine->id), "ncclGetUniqueId", NULL, &error);
    }
    if (mine->is_able && status != HORO_OK) {
        mine->is_able = 0;
        (void)snprintf(mine->lack, sizeof mine->lack, "%.*s", HR_NCCL_TEXT_BYTES - 1, error.text);
    }
}

/* An allreduce, whose sum is that of what each rank has in its own place and zeros in those of others. */
static int submit_reports(struct hr_engine *engine, const struct hr_nccl_place *place, struct hr_nccl_report *reports,
                          int64_t *handle, struct hr_error *error) {
    const int64_t bytes = place->size * (int64_t)sizeof *reports;
    const horo_tensor tensor = {
        .input = reports, .output = reports, .output_bytes = bytes, .shape = &bytes, .ndim = 1, .dtype = HORO_UINT8};
    const horo_request call = {
        .name = HR_NCCL_NAME,
        .op = HORO_ALLREDUCE,
        .reduce_op = HORO_SUM,
        .flags = HORO_SUBMIT_TRANSIENT,
        .team = place->id,
        .prescale = 1.0,
        .postscale = 1.0,
        .tensors = &tensor,
        .tensor_count = 1,
    };
    return hr_engine_submit_with(engine, &call, NULL, handle, error);
}

/* With staging_lock held. */
static int tell(struct hr_engine *engine, struct hr_by_nccl *by, const struct hr_nccl_place *place, int number,
                struct hr_error *error) {
    struct hr_nccl_team *team = place->team;
    int64_t handle = 0;
    if (by->gpu == NULL) { /* all teams use the GPU of the first tensor */
        HR_TRY(hr_stager_device(atomic_load(&engine->stager), number, &by->gpu, error));
        atomic_store(&by->device, number);
    }
    struct hr_nccl_report *reports = calloc((size_t)place->size, sizeof *reports);
    if (reports == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for NCCL");
    }
    complete_report(by, place->rank == 0, &reports[place->rank]);
    const int status = submit_reports(engine, place, reports, &handle, error);
    if (status != HORO_OK) {
        free(reports);
        return status;
    }
    (void)pthread_mutex_lock(&engine->submission.lock);
    team->exchange = hr_engine_find_handle(engine, handle);
    team->reports = reports;
    atomic_store(&team->stage, HR_BY_NCCL_GATHERING);
    (void)pthread_mutex_unlock(&engine->submission.lock);
    return HORO_OK;
}

int hr_nccl_begin_setup(struct hr_engine *engine, const struct hr_nccl_place *place, int device,
                        struct hr_error *error) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    int status = HORO_OK;
    (void)pthread_mutex_lock(&engine->staging_lock);
    if (atomic_load(&place->team->stage) == HR_BY_NCCL_ASKED) { /* else another thread was first */
        status = tell(engine, by, place, device, error);
    }
    (void)pthread_mutex_unlock(&engine->staging_lock);
    return status;
}

/* ---- A rank that has joined ---- */

/* It may never have used a GPU: then it tells nothing, and tensors are staged until all have joined. */
void *hr_engine_report_for_nccl(const struct hr_lane *lane, const horo_request *call) {
    const struct hr_by_nccl *by = atomic_load(&lane->engine->by_nccl);
    struct hr_nccl_team *team = hr_nccl_team_of(lane->engine, lane);
    const struct hr_team *ranks = lane->team;
    int64_t bytes = 0; /* it was checked when it was decoded */
    if (by == NULL || atomic_load(&by->device) < 0 || atomic_load(&team->stage) != HR_BY_NCCL_ASKED ||
        call->tensor_count != 1) {
        return NULL;
    }
    (void)hr_wire_shape_bytes(call->tensors[0].shape, call->tensors[0].ndim, call->tensors[0].dtype, &bytes);
    if (bytes != ranks->size * (int64_t)sizeof *team->reports || team->reports != NULL) {
        return NULL;
    }
    team->reports = calloc((size_t)ranks->size, sizeof *team->reports);
    if (team->reports != NULL) {
        complete_report(by, ranks->rank == 0, &team->reports[ranks->rank]);
    }
    return team->reports;
}

void hr_engine_note_report(const struct hr_lane *lane, const horo_request *call) {
    struct hr_nccl_team *team = hr_nccl_team_of(lane->engine, lane);
    if (team != NULL && team->reports != NULL && call->tensor_count == 1 &&
        call->tensors[0].output == team->reports) {
        atomic_store(&team->stage, HR_BY_NCCL_GATHERING);
    }
}

/* ---- Going on ---- */

int hr_nccl_has_gathered(const struct hr_nccl_team *team) {
    return atomic_load(&team->stage) == HR_BY_NCCL_GATHERING &&
           (team->exchange == NULL || atomic_load(&team->exchange->status) != HORO_IN_PROGRESS);
}

static void set_stage(struct hr_engine *engine, struct hr_nccl_team *team, int stage) {
    (void)pthread_mutex_lock(&engine->submission.lock);
    atomic_store(&team->stage, stage);
    (void)pthread_mutex_unlock(&engine->submission.lock);
}

static void refuse(struct hr_engine *engine, const struct hr_lane *lane, int has_joined, const char *text) {
    struct hr_nccl_team *team = hr_nccl_team_of(engine, lane);
    char name[HR_TEAM_NAME_BYTES];
    if (lane->is_root) {
        const int is_world = lane->team->number == 0;
        hr_log(&engine->node->log, HORO_LOG_WARNING, "tensors on GPUs%s%s travel through host memory%s: %s",
               is_world ? "" : " of ", is_world ? "" : hr_team_name(lane->team, name),
               has_joined ? " until all ranks have joined" : ", not by NCCL", text);
    }
    (void)pthread_mutex_lock(&engine->submission.lock);
    team->until_join = has_joined;
    atomic_store(&team->stage, HR_BY_NCCL_REFUSED);
    (void)pthread_mutex_unlock(&engine->submission.lock);
}

static int create_stream(struct hr_by_nccl *by, struct hr_error *error) {
    struct hr_device_visit visit;
    HR_TRY(hr_device_enter(by->gpu, &visit, error));
    const int status = hr_device_create_stream(by->gpu, &by->stream, error);
    hr_device_leave(by->gpu, &visit);
    return status;
}

static int try_connect(struct hr_engine *engine, const struct hr_lane *lane, const struct hr_nccl_id *id,
                       struct hr_error *error) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    struct hr_nccl_team *team = hr_nccl_team_of(engine, lane);
    team->backend = hr_nccl_backend_create(lane->team, &team->comm);
    if (team->backend == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for NCCL");
    }
    HR_TRY(by->stream == NULL ? create_stream(by, error) : HORO_OK);
    return hr_nccl_connect(&team->comm, &by->nccl, by->gpu, by->stream, lane->team->size, lane->team->rank, id,
                           HR_NCCL_WITHIN_MS, error);
}

static void connect(struct hr_engine *engine, const struct hr_lane *lane, const struct hr_nccl_report *reports) {
    struct hr_error error = {0};
    struct hr_nccl_team *team = hr_nccl_team_of(engine, lane);
    if (try_connect(engine, lane, &reports[0].id, &error) != HORO_OK) {
        (void)hr_fail(&team->comm.failure, error.code, "%s", error.text);
        team->comm.state = HR_NCCL_BROKEN;
    }
    set_stage(engine, team, HR_BY_NCCL_CONNECTING);
}

/* The exchange is over; it is released here. */
static void finish_exchange(struct hr_engine *engine, const struct hr_lane *lane) {
    struct hr_nccl_team *team = hr_nccl_team_of(engine, lane);
    const int64_t handle = team->exchange == NULL ? 0 : team->exchange->handle;
    char text[HORO_MESSAGE_MAX];
    int has_joined = 0;
    if (team->exchange != NULL && atomic_load(&team->exchange->status) != HORO_OK) {
        (void)hr_engine_error(engine, handle, text, sizeof text);
    } else {
        hr_nccl_judge(team->reports, lane->team, &has_joined, text, sizeof text);
    }
    if (text[0] == '\0') {
        connect(engine, lane, team->reports);
    } else {
        refuse(engine, lane, has_joined, text);
    }
    if (team->exchange != NULL) {
        team->exchange = NULL;
        (void)hr_engine_release(engine, handle);
    }
    free(team->reports);
    team->reports = NULL;
}

int hr_nccl_turn_setup(struct hr_engine *engine, const struct hr_lane *lane) {
    struct hr_nccl_team *team = hr_nccl_team_of(engine, lane);
    const int stage = atomic_load(&team->stage);
    char name[HR_TEAM_NAME_BYTES];
    if (hr_nccl_has_gathered(team)) {
        finish_exchange(engine, lane);
        return 1;
    }
    if (stage != HR_BY_NCCL_CONNECTING || team->comm.state != HR_NCCL_IDLE) {
        return 0;
    }
    set_stage(engine, team, HR_BY_NCCL_READY);
    hr_log(&engine->node->log, HORO_LOG_INFO, "NCCL does what it can of tensors on GPU %d for %s",
           atomic_load(&atomic_load(&engine->by_nccl)->device),
           lane->team->number == 0 ? "all ranks" : hr_team_name(lane->team, name));
    return 1;
}
