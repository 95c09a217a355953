/* The way of the ranks to a communicator of NCCL, or to the knowledge that they have none. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/op.h"
#include "device/stager.h"
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

void hr_nccl_judge(const struct hr_nccl_report *reports, const struct hr_team *ranks, char *text, size_t text_bytes) {
    const int *job_rank = ranks->job_rank;
    const int size = ranks->size;
    int other = 0;
    text[0] = '\0';
    for (int r = 0; r < size; r++) {
        if (!reports[r].is_able) {
            (void)snprintf(text, text_bytes, "rank %d cannot use NCCL: %.*s", job_rank[r],
                           (int)sizeof reports[r].lack, reports[r].lack);
            return;
        }
        if (reports[r].version != reports[0].version) {
            char first[24];
            char mine[24];
            hr_nccl_write_version(reports[0].version, first, sizeof first);
            hr_nccl_write_version(reports[r].version, mine, sizeof mine);
            (void)snprintf(text, text_bytes, "rank %d has NCCL %s, and rank %d NCCL %s", job_rank[0], first,
                           job_rank[r], mine);
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

/*
 * The report's rest, which needs the GPU and, for the place to meet that rank 0 names, a socket of NCCL's. A failure
 * of that is told to all.
 */
static void complete_report(const struct hr_by_nccl *by, const struct hr_team *ranks, struct hr_nccl_report *mine) {
    const struct hr_device *device = by->gpu;
    struct hr_error error = {0};
    *mine = by->able;
    int status = mine->is_able ? HORO_OK : HORO_ERR_RESOURCE;
    if (status == HORO_OK) {
        status = hr_cuda_check(device->cuda, device->cuda->device_get_uuid(mine->uuid, device->handle),
                               "cuDeviceGetUuid", &error);
    }
    if (status == HORO_OK && ranks->rank == 0) {
        status = hr_nccl_check(&by->nccl, by->nccl.get_unique_id(&mine->id), "ncclGetUniqueId", NULL, &error);
    }
    if (mine->is_able && status != HORO_OK) {
        mine->is_able = 0;
        (void)snprintf(mine->lack, sizeof mine->lack, "%.*s", HR_NCCL_TEXT_BYTES - 1, error.text);
    }
}

static void set_stage(struct hr_engine *engine, struct hr_nccl_team *team, int stage) {
    (void)pthread_mutex_lock(&engine->submission.lock);
    atomic_store(&team->stage, stage);
    (void)pthread_mutex_unlock(&engine->submission.lock);
}

/* So many of the reports' bytes are summed, by a task in the team's lane. */
static int begin_exchange(struct hr_lane *lane, struct hr_nccl_team *team, size_t bytes) {
    team->told_bytes = bytes;
    team->told = (struct hr_operand){
        .input = team->reports, .output = team->reports, .bytes = team->told_bytes, .dtype = HORO_UINT8};
    const struct hr_work work = {
        .op = HORO_ALLREDUCE,
        .reduce_op = HORO_SUM,
        .prescale = 1.0,
        .postscale = 1.0,
        .operands = &team->told,
        .count = 1,
        .row_bytes = &team->told_bytes,
    };
    lane->executor.backend = lane->backend;
    lane->executor.state = HR_EXECUTION_TELLING;
    HR_TRY(lane->backend->ops->begin(lane->backend, &work));
    return HR_TASK_MOVED;
}

/* The sum of what each rank has in its own place and zeros in those of others. */
static int begin_telling(struct hr_lane *lane, const struct hr_by_nccl *by, struct hr_nccl_team *team) {
    const struct hr_team *ranks = lane->team;
    team->reports = calloc((size_t)ranks->size, sizeof *team->reports);
    if (team->reports == NULL) {
        return HORO_ERR_RESOURCE;
    }
    complete_report(by, ranks, &team->reports[ranks->rank]);
    set_stage(lane->engine, team, HR_BY_NCCL_TELLING);
    return begin_exchange(lane, team, (size_t)ranks->size * sizeof *team->reports);
}

/*
 * This rank is connected, and waits until all are: a batch of this team holds up those of others until all its ranks
 * have proposed a number (nccl_turn.c), which one that is not connected does not. What is summed does not matter.
 */
static int begin_rendezvous(struct hr_lane *lane, struct hr_nccl_team *team) {
    return begin_exchange(lane, team, 1);
}

/* ---- In front of a record ---- */

/* Whether it is of requests for NCCL: of one, or of a batch, whose requests are alike in that. */
static int is_for_nccl(struct hr_lane *lane, const struct hr_wire_message *record) {
    struct hr_wire_request decoded = {0};
    struct hr_wire_ref ref;
    if (record->type != HR_WIRE_BATCH || record->count == 0) {
        return 0;
    }
    const uint8_t *cursor = record->items;
    hr_wire_next_ref(&cursor, &ref);
    if (ref.name.bytes > 0) {
        const struct hr_request *request = hr_lane_find_name(lane, ref.name);
        return request != NULL && hr_request_is_by_nccl(request);
    }
    const uint32_t capacity = lane->announcer.capacity;
    const struct hr_known *known = capacity == 0 ? NULL : lane->announcer.known_slots[ref.id % capacity];
    return known != NULL && hr_wire_decode_request(known->bytes, known->byte_count, &decoded) == HORO_OK &&
           decoded.by_nccl;
}

/* As hr_lane_prepare_nccl. */
static int prepare(struct hr_lane *lane, struct hr_nccl_team *team, const struct hr_wire_message *record) {
    const int stage = team == NULL ? HR_BY_NCCL_REFUSED : atomic_load(&team->stage);
    const int is_over = stage == HR_BY_NCCL_READY || stage == HR_BY_NCCL_REFUSED;
    const int has_values =
        is_over && (team == NULL || (team->unstaged == NULL && atomic_load(&team->awaited) == 0));
    if (has_values || !is_for_nccl(lane, record)) {
        return HR_TASK_DONE;
    }
    if (stage == HR_BY_NCCL_CONNECTING && team->comm.state == HR_NCCL_IDLE) {
        return begin_rendezvous(lane, team);
    }
    if (stage != HR_BY_NCCL_ASKED) {
        return HR_TASK_BLOCKED;
    }
    return begin_telling(lane, atomic_load(&lane->engine->by_nccl), team);
}

int hr_lane_prepare_nccl(struct hr_lane *lane, const struct hr_wire_message *record) {
    struct hr_nccl_team *team = hr_nccl_team_of(lane->engine, lane);
    const int prepared = prepare(lane, team, record);
    if (team != NULL) {
        team->holds_record = prepared == HR_TASK_BLOCKED;
    }
    return prepared;
}

static int holds_record(const struct hr_lane *lane) {
    const struct hr_nccl_team *team = hr_nccl_team_of(lane->engine, lane);
    return team != NULL && team->holds_record;
}

static int awaits_values(const struct hr_lane *lane) {
    return holds_record(lane) && hr_nccl_team_of(lane->engine, lane)->comm.state != HR_NCCL_CONNECTING;
}

const char *hr_engine_holds_record(const struct hr_lane *lane) {
    return awaits_values(lane) ? "its own GPU" : holds_record(lane) ? "NCCL to connect this rank" : NULL;
}

/* ---- Staging ---- */

enum { STAGED_AT_ONCE = 64 }; /* requests whose copies are on their stream: so many have room, with some tensors each */

/* All ranks are about to do it in host memory, and count on this one. */
static void end_for_lack(struct hr_engine *engine, const char *text) {
    char words[HORO_MESSAGE_MAX];
    const int length =
        snprintf(words, sizeof words, "a tensor on a GPU that it could not copy to the host: %.700s", text);
    hr_node_end(engine->node, HORO_ERR_PEER_LOST, engine->node->rank, words, (size_t)length);
}

/*
 * The next request behind `last` that was submitted for NCCL, which is not to have it. It stays pending meanwhile: the
 * log goes on when all have been staged.
 */
static struct hr_request *next_unstaged(struct hr_engine *engine, const struct hr_lane *lane,
                                        struct hr_request *last) {
    const struct hr_nccl_team *team = hr_nccl_team_of(engine, lane);
    struct hr_request *request = last;
    (void)pthread_mutex_lock(&engine->submission.lock);
    do {
        request = hr_lane_next_pending(lane, request);
    } while (request != NULL && (request->mark == NULL || !hr_nccl_is_refused(team)));
    (void)pthread_mutex_unlock(&engine->submission.lock);
    return request;
}

int hr_nccl_may_stage(const struct hr_nccl_team *team) {
    return team->unstaged != NULL && atomic_load(&team->awaited) < STAGED_AT_ONCE &&
           hr_mark_is_reached(team->unstaged->mark);
}

static void stage(struct hr_engine *engine, struct hr_nccl_team *team, struct hr_request *request) {
    struct hr_error error = {0};
    (void)pthread_mutex_lock(&engine->submission.lock);
    request->awaits_values = 1;
    atomic_fetch_add(&team->awaited, 1);
    (void)pthread_mutex_unlock(&engine->submission.lock);
    if (hr_engine_stage_marked(engine, request, &error) != HORO_OK) {
        end_for_lack(engine, error.text);
    }
}

void hr_nccl_stage(struct hr_engine *engine, const struct hr_lane *lane) {
    struct hr_nccl_team *team = hr_nccl_team_of(engine, lane);
    while (hr_nccl_may_stage(team)) {
        struct hr_request *request = team->unstaged;
        team->unstaged = next_unstaged(engine, lane, request);
        stage(engine, team, request);
    }
}

void hr_nccl_check_values(struct hr_engine *engine, const struct hr_lane *lane) {
    struct hr_error error = {0};
    struct hr_request *request = NULL;
    (void)pthread_mutex_lock(&engine->submission.lock);
    while ((request = hr_lane_next_pending(lane, request)) != NULL && !request->awaits_values) {
    }
    (void)pthread_mutex_unlock(&engine->submission.lock);
    /* copies come in the order of one stream, so a failure is that of the first one, too */
    if (request != NULL && request->staging != NULL && hr_staging_check(request->staging, &error) != HORO_OK) {
        hr_engine_end_for_copy(engine, &request->call, error.text);
    }
}

/* ---- Going on ---- */

static void refuse(struct hr_engine *engine, const struct hr_lane *lane, const char *text) {
    struct hr_nccl_team *team = hr_nccl_team_of(engine, lane);
    char name[HR_TEAM_NAME_BYTES];
    if (lane->is_root) {
        const int is_world = lane->team->number == 0;
        hr_log(&engine->node->log, HORO_LOG_WARNING, "tensors on GPUs%s%s travel through host memory, not by NCCL: %s",
               is_world ? "" : " of ", is_world ? "" : hr_team_name(lane->team, name), text);
    }
    set_stage(engine, team, HR_BY_NCCL_REFUSED);
}

static int create_stream(struct hr_by_nccl *by, struct hr_error *error) {
    struct hr_device_visit visit;
    HR_TRY(hr_device_enter(by->gpu, &visit, error));
    int status = hr_device_create_stream(by->gpu, &by->stream, error);
    status = status == HORO_OK ? hr_backlog_create(&by->backlog, by->gpu, by->stream, error) : status;
    hr_device_leave(by->gpu, &visit);
    return status;
}

static int try_connect(struct hr_engine *engine, const struct hr_lane *lane, const struct hr_nccl_report *reports,
                       struct hr_error *error) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    struct hr_nccl_team *team = hr_nccl_team_of(engine, lane);
    const struct hr_team *all = lane->team;
    const struct hr_nccl_ranks ranks = {all->size, all->rank, &reports[0].id};
    team->backend = hr_nccl_backend_create(lane->team, &team->comm);
    if (team->backend == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for NCCL");
    }
    HR_TRY(by->stream == NULL ? create_stream(by, error) : HORO_OK);
    return hr_nccl_connect(&team->comm, &by->nccl, by->gpu, &by->backlog, &ranks, HR_NCCL_WITHIN_MS, error);
}

static void connect(struct hr_engine *engine, const struct hr_lane *lane, const struct hr_nccl_report *reports) {
    struct hr_error error = {0};
    struct hr_nccl_team *team = hr_nccl_team_of(engine, lane);
    if (try_connect(engine, lane, reports, &error) != HORO_OK) {
        (void)hr_fail(&team->comm.failure, error.code, "%s", error.text);
        team->comm.state = HR_NCCL_BROKEN;
    }
    set_stage(engine, team, HR_BY_NCCL_CONNECTING);
}

static void judge(struct hr_engine *engine, const struct hr_lane *lane, const struct hr_nccl_report *reports) {
    char text[HORO_MESSAGE_MAX];
    hr_nccl_judge(reports, lane->team, text, sizeof text);
    if (text[0] == '\0') {
        connect(engine, lane, reports);
    } else {
        refuse(engine, lane, text);
    }
    hr_nccl_team_of(engine, lane)->unstaged = next_unstaged(engine, lane, NULL);
    hr_nccl_stage(engine, lane);
}

static void be_ready(struct hr_engine *engine, const struct hr_lane *lane, struct hr_nccl_team *team) {
    char name[HR_TEAM_NAME_BYTES];
    set_stage(engine, team, HR_BY_NCCL_READY);
    hr_log(&engine->node->log, HORO_LOG_INFO, "NCCL does what it can of tensors on GPU %d for %s",
           atomic_load(&atomic_load(&engine->by_nccl)->device),
           lane->team->number == 0 ? "all ranks" : hr_team_name(lane->team, name));
}

void hr_lane_finish_telling(struct hr_lane *lane) {
    struct hr_nccl_team *team = hr_nccl_team_of(lane->engine, lane);
    lane->executor.state = HR_EXECUTION_IDLE;
    if (atomic_load(&team->stage) == HR_BY_NCCL_TELLING) {
        judge(lane->engine, lane, team->reports);
    } else {
        be_ready(lane->engine, lane, team);
    }
    if (atomic_load(&team->stage) != HR_BY_NCCL_CONNECTING) {
        free(team->reports);
        team->reports = NULL;
    }
}
