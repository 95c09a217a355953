/* How the ranks come to a communicator of NCCL, or to the knowledge that they have none. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/op.h"
#include "device/blocks.h"
#include "engine/by_nccl.h"

#define CONNECT_NS 300000000000ll /* NCCL gives up by itself much sooner, but for a network that swallows everything */

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

void hr_nccl_judge(const struct hr_nccl_report *reports, const int64_t *rows, int size, int *has_joined, char *text,
                   size_t text_bytes) {
    int other = 0;
    text[0] = '\0';
    *has_joined = 0;
    for (int r = 0; r < size; r++) {
        if (rows[r] != (int64_t)sizeof *reports) {
            *has_joined = 1;
            (void)snprintf(text, text_bytes, "rank %d has joined", r);
            return;
        }
    }
    for (int r = 0; r < size; r++) {
        if (!reports[r].is_able) {
            (void)snprintf(text, text_bytes, "rank %d cannot use NCCL: %.*s", r, (int)sizeof reports[r].lack,
                           reports[r].lack);
            return;
        }
        if (reports[r].version != reports[0].version) {
            (void)snprintf(text, text_bytes, "rank 0 has version %d of NCCL, and rank %d version %d",
                           reports[0].version, r, reports[r].version);
            return;
        }
    }
    const int one = same_gpu(reports, size, &other);
    if (one >= 0) {
        (void)snprintf(text, text_bytes, "ranks %d and %d are on the same GPU, which NCCL refuses", one, other);
    }
}

/* ---- Telling ---- */

/* The report's rest, which needs the GPU and, on rank 0, a socket of NCCL's. A failure of that is told to all. */
static void complete_report(const struct hr_engine *engine, struct hr_by_nccl *by, const struct hr_device *device) {
    struct hr_nccl_report *mine = &by->mine;
    struct hr_error error = {0};
    int status = mine->is_able ? HORO_OK : HORO_ERR_RESOURCE;
    if (status == HORO_OK) {
        status = hr_cuda_check(device->cuda, device->cuda->device_get_uuid(mine->uuid, device->handle),
                               "cuDeviceGetUuid", &error);
    }
    if (status == HORO_OK && engine->node->rank == 0) {
        status = hr_nccl_check(&by->nccl, by->nccl.get_unique_id(&mine->id), "ncclGetUniqueId", NULL, &error);
    }
    if (mine->is_able && status != HORO_OK) {
        mine->is_able = 0;
        (void)snprintf(mine->lack, sizeof mine->lack, "%.*s", HR_NCCL_TEXT_BYTES - 1, error.text);
    }
}

/* With staging_lock held. */
static int tell(struct hr_engine *engine, struct hr_by_nccl *by, int number, struct hr_error *error) {
    struct hr_device *device;
    int64_t handle = 0;
    const int64_t bytes = (int64_t)sizeof by->mine;
    HR_TRY(hr_stager_device(atomic_load(&engine->stager), number, &device, error));
    complete_report(engine, by, device);
    const horo_tensor tensor = {.input = &by->mine, .shape = &bytes, .ndim = 1, .dtype = HORO_UINT8};
    const horo_request call = {
        .name = HR_NCCL_NAME,
        .op = HORO_ALLGATHER,
        .flags = HORO_SUBMIT_TRANSIENT,
        .prescale = 1.0,
        .postscale = 1.0,
        .tensors = &tensor,
        .tensor_count = 1,
    };
    by->comm.device = device; /* for connecting */
    HR_TRY(hr_engine_submit_with(engine, &call, NULL, &handle, error));
    (void)pthread_mutex_lock(&engine->submission.lock);
    by->exchange = hr_engine_find_handle(engine, handle);
    atomic_store(&by->device, number);
    atomic_store(&by->stage, HR_BY_NCCL_GATHERING);
    (void)pthread_mutex_unlock(&engine->submission.lock);
    return HORO_OK;
}

int hr_nccl_begin_setup(struct hr_engine *engine, int device, struct hr_error *error) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    int status = HORO_OK;
    (void)pthread_mutex_lock(&engine->staging_lock);
    if (atomic_load(&by->stage) == HR_BY_NCCL_ASKED) { /* else another thread was first */
        status = tell(engine, by, device, error);
    }
    (void)pthread_mutex_unlock(&engine->staging_lock);
    return status;
}

/* ---- Going on ---- */

static void set_stage(struct hr_engine *engine, struct hr_by_nccl *by, int stage) {
    (void)pthread_mutex_lock(&engine->submission.lock);
    atomic_store(&by->stage, stage);
    (void)pthread_mutex_unlock(&engine->submission.lock);
}

static void refuse(struct hr_engine *engine, struct hr_by_nccl *by, int has_joined, const char *text) {
    if (engine->node->rank == 0) {
        hr_log(&engine->node->log, HORO_LOG_WARNING, "tensors on GPUs travel through host memory%s: %s",
               has_joined ? " until all ranks have joined" : ", not by NCCL", text);
    }
    (void)pthread_mutex_lock(&engine->submission.lock);
    by->until_join = has_joined;
    atomic_store(&by->stage, HR_BY_NCCL_REFUSED);
    (void)pthread_mutex_unlock(&engine->submission.lock);
}

void hr_nccl_break(struct hr_by_nccl *by, const struct hr_error *error) {
    (void)hr_fail(&by->comm.failure, error->code, "%s", error->text);
    by->comm.state = HR_NCCL_BROKEN;
}

static void connect(struct hr_engine *engine, struct hr_by_nccl *by, const struct hr_nccl_report *reports) {
    struct hr_error error = {0};
    struct hr_team *team = hr_engine_world(engine)->team;
    struct hr_device *device = by->comm.device;
    by->backend = by->backend != NULL ? by->backend : hr_nccl_backend_create(team, &by->comm);
    int status = by->backend != NULL ? HORO_OK : hr_fail(&error, HORO_ERR_RESOURCE, "out of memory for NCCL");
    if (status == HORO_OK) {
        status = hr_nccl_connect(&by->comm, &by->nccl, device, team->size, team->rank, &reports[0].id, &error);
    }
    if (status != HORO_OK) {
        hr_nccl_break(by, &error);
    }
    by->connect_ns = hr_now_ns() + CONNECT_NS;
    set_stage(engine, by, HR_BY_NCCL_CONNECTING);
}

/* The exchange is over; it is released here. */
static void finish_exchange(struct hr_engine *engine, struct hr_by_nccl *by) {
    const int size = engine->node->size;
    const int64_t handle = by->exchange->handle;
    char text[HORO_MESSAGE_MAX];
    void *data = NULL;
    int64_t bytes = 0;
    int has_joined = 0;
    int64_t *rows = calloc((size_t)size, sizeof *rows);
    if (rows == NULL || hr_engine_take(engine, handle, 0, &data, &bytes, rows) != HORO_OK) {
        (void)hr_engine_error(engine, handle, text, sizeof text);
    } else {
        hr_nccl_judge(data, rows, size, &has_joined, text, sizeof text);
    }
    if (data != NULL && text[0] == '\0') {
        connect(engine, by, data);
    } else {
        refuse(engine, by, has_joined, text);
    }
    by->exchange = NULL;
    (void)hr_engine_release(engine, handle);
    free(rows);
    free(data);
}

int hr_nccl_turn_setup(struct hr_engine *engine, struct hr_by_nccl *by) {
    const int stage = atomic_load(&by->stage);
    if (stage == HR_BY_NCCL_GATHERING && atomic_load(&by->exchange->status) != HORO_IN_PROGRESS) {
        finish_exchange(engine, by);
        return 1;
    }
    if (stage != HR_BY_NCCL_CONNECTING) {
        return 0;
    }
    if (by->comm.state == HR_NCCL_IDLE) {
        set_stage(engine, by, HR_BY_NCCL_READY);
        hr_log(&engine->node->log, HORO_LOG_INFO, "NCCL does what it can of tensors on GPU %d",
               atomic_load(&by->device));
        return 1;
    }
    if (by->comm.state == HR_NCCL_CONNECTING && hr_now_ns() >= by->connect_ns) {
        const struct hr_error late = {HORO_ERR_RESOURCE, "the ranks have not connected within 300 s"};
        hr_nccl_break(by, &late);
        return 1;
    }
    return 0;
}
