/*
 * Communicators of NCCL: a caller connects them, the driver looks after them. All are on one GPU of this rank and on
 * one stream there, and each team that has one is connected on all its ranks before its first request.
 */
#include "engine/gpu/nccl.h"

#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "device/stager.h"

enum {
    CLOSE_MS = 5000,
    QUIET_MS = 2000, /* for kernels to end that have been aborted; on a busy machine something may hold them up */
    MOMENT_NS = 100000,
    GONE_LOOK_NS = 10000000, /* for the end of what is left of a team, which nobody waits for */
};

#define CONFIRM_NS 250000000ll /* other ranks may tell of the cause meanwhile: a rank that is gone */

_Static_assert(HORO_NCCL_ID_BYTES == sizeof(struct hr_nccl_id), "of NCCL");

static void wait_a_moment(void) {
    const struct timespec moment = {.tv_nsec = MOMENT_NS}; /* nothing tells of what is waited for here */
    (void)nanosleep(&moment, NULL);
}

/* ---- Callers: requests ---- */

int hr_gpu_place(struct hr_engine *engine, struct hr_request *request, struct hr_error *reason) {
    const horo_request *call = &request->call;
    const struct hr_on_gpu *gpu = atomic_load(&engine->on_gpu);
    if (!hr_nccl_can(call)) {
        return HORO_OK;
    }
    if (call->device - 1 != gpu->device->number) {
        return hr_fail(reason, HORO_ERR_USAGE,
                       "its tensors are on cuda:%d, and NCCL was set up for cuda:%d: move them there, or choose the "
                       "GPU by init(device=\"cuda:%d\")",
                       call->device - 1, gpu->device->number, call->device - 1);
    }
    static const struct hr_hooks hooks = {.freed = hr_mark_drop};
    struct hr_mark *mark = NULL;
    HR_TRY(hr_mark_create(gpu->device, (void *)(uintptr_t)call->stream, &mark, reason));
    request->cargo = (struct hr_cargo){&hooks, mark};
    hr_request_set_on_gpu(request);
    return HORO_OK;
}

/* ---- Callers: connecting ---- */

/* The library, the device and a stream there. */
static int open_nccl(struct hr_engine *engine, struct hr_on_gpu *made, const char *const *paths, size_t path_count,
                     int device, horo_gpu *found, struct hr_error *error) {
    horo_library library = {0};
    struct hr_device_visit visit;
    HR_TRY(hr_library_load(&hr_nccl_library, paths, path_count, &made->nccl, &library, error));
    found->nccl_version = library.version;
    HR_TRY(hr_stager_device(atomic_load(&engine->stager), device, &made->device, error));
    const struct hr_cuda *cuda = made->device->cuda;
    HR_TRY(hr_cuda_check(cuda, cuda->device_get_uuid((char *)found->uuid, made->device->handle), "cuDeviceGetUuid",
                         error));
    HR_TRY(hr_device_enter(made->device, &visit, error));
    const int status = hr_device_create_stream(made->device, &made->stream, error);
    hr_device_leave(made->device, &visit);
    return status;
}

int hr_engine_use_nccl(struct hr_engine *engine, const char *const *paths, size_t path_count, int device,
                       horo_gpu *found, struct hr_error *error) {
    struct hr_on_gpu *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for NCCL");
    }
    (void)pthread_mutex_lock(&engine->staging_lock);
    const int may_use = atomic_load(&engine->stager) != NULL && atomic_load(&engine->on_gpu) == NULL;
    const int status =
        may_use ? open_nccl(engine, made, paths, path_count, device, found, error)
                : hr_fail(error, HORO_ERR_USAGE, "NCCL: horo_use_cuda comes once before it, and nothing behind it");
    if (status == HORO_OK) {
        atomic_store(&engine->on_gpu, made);
    } else {
        free(made);
    }
    (void)pthread_mutex_unlock(&engine->staging_lock);
    return status;
}

static int find_gpu(const struct hr_engine *engine, struct hr_on_gpu **gpu, struct hr_error *error) {
    *gpu = atomic_load(&engine->on_gpu);
    return *gpu != NULL ? HORO_OK : hr_fail(error, HORO_ERR_USAGE, "NCCL, and horo_use_nccl has not been called");
}

int hr_engine_nccl_id(struct hr_engine *engine, void *id, struct hr_error *error) {
    struct hr_on_gpu *gpu;
    HR_TRY(find_gpu(engine, &gpu, error));
    return hr_nccl_check(&gpu->nccl, gpu->nccl.get_unique_id(id), "ncclGetUniqueId", NULL, error);
}

static void drop(struct hr_engine *engine, struct hr_gpu_team *team) {
    if (team != NULL) {
        hr_nccl_close(&team->comm);
        hr_node_bury(engine->node, team, free); /* MPI may touch the number that a batch has proposed */
    }
}

/* Nobody else uses what is being connected: changes of teams come one at a time. */
int hr_engine_connect_nccl(struct hr_engine *engine, const void *id, int size, int rank, struct hr_error *error) {
    struct hr_on_gpu *gpu;
    HR_TRY(find_gpu(engine, &gpu, error));
    struct hr_gpu_team *team = calloc(1, sizeof *team);
    if (team == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for NCCL");
    }
    team->base.ops = &hr_nccl_ops;
    team->engine = engine;
    drop(engine, gpu->connecting); /* of a change that has failed */
    gpu->connecting = team;
    return hr_nccl_connect(&team->comm, &gpu->nccl, gpu->device, gpu->stream, id, size, rank, error);
}

int hr_engine_await_nccl(struct hr_engine *engine, int is_world, int timeout_ms, struct hr_error *error) {
    const int64_t until_ns = hr_now_ns() + (int64_t)timeout_ms * 1000000;
    struct hr_on_gpu *gpu;
    HR_TRY(find_gpu(engine, &gpu, error));
    if (gpu->connecting == NULL) {
        return hr_fail(error, HORO_ERR_USAGE, "NCCL, and horo_connect_nccl has not been called");
    }
    struct hr_nccl_comm *comm = &gpu->connecting->comm;
    while (!hr_nccl_poll(comm) && comm->state == HR_NCCL_CONNECTING) {
        if (hr_now_ns() >= until_ns || hr_arena_aborted(&engine->node->arena).code != 0) {
            return HORO_IN_PROGRESS;
        }
        wait_a_moment();
    }
    if (comm->state != HR_NCCL_IDLE) {
        return hr_fail(error, HORO_ERR_RESOURCE, "%s", comm->failure.text);
    }
    if (is_world) {
        hr_gpu_attach(engine, engine->lanes[0]);
    }
    return HORO_OK;
}

/* ---- The driver: teams come and go ---- */

void hr_gpu_attach(struct hr_engine *engine, struct hr_lane *lane) {
    struct hr_on_gpu *gpu = atomic_load(&engine->on_gpu);
    struct hr_gpu_team *team = gpu == NULL ? NULL : gpu->connecting;
    if (team == NULL) {
        return;
    }
    gpu->connecting = NULL;
    team->lane = lane;
    team->next = atomic_load(&gpu->teams);
    if (lane->team->number != 0) {
        (void)hr_team_name(lane->team, team->name);
    }
    atomic_store(&gpu->teams, team);
    atomic_store(&lane->on_gpu, &team->base);
}

/* Goes on with the end of a communicator, which its ranks come to together, once nothing of it is in flight here. */
static int wind_up(struct hr_nccl_comm *comm) {
    if (comm->state == HR_NCCL_IDLE && !comm->is_in_flight) {
        hr_nccl_end(comm);
        return 1;
    }
    return hr_nccl_poll(comm);
}

/* ---- The driver: looking after them ---- */

static int64_t look_within(const struct hr_gpu_team *team) {
    switch (team->comm.state) {
    case HR_NCCL_LAUNCHING: return HR_NCCL_LOOK_SOON_NS;
    case HR_NCCL_IDLE:
        return team->batch.phase == HR_NCCL_HELD ? HR_NCCL_LOOK_SOON_NS
               : team->lane == NULL                   ? GONE_LOOK_NS
               : team->comm.is_in_flight         ? HR_NCCL_LOOK_NS
                                                 : 0;
    case HR_NCCL_ENDING: return GONE_LOOK_NS;
    case HR_NCCL_BROKEN: return HR_NCCL_LOOK_NS;
    default: return 0;
    }
}

/*
 * Looks at a communicator, of which during a launch its task does: 1 if it has moved. A wait that spins comes here all
 * the time, for all teams.
 */
static int look(struct hr_gpu_team *team) {
    const int64_t within_ns = look_within(team);
    if (team->comm.state == HR_NCCL_LAUNCHING || within_ns == 0) {
        return 0;
    }
    const int64_t now_ns = hr_now_ns();
    if (now_ns < team->look_ns) {
        return 0;
    }
    team->look_ns = now_ns + within_ns;
    return team->lane == NULL ? wind_up(&team->comm) : hr_nccl_poll(&team->comm);
}

/* NCCL does not say who is to blame. A rank that is gone is heard of in a moment; else this one ends the group. */
static int turn_broken(struct hr_gpu_team *team) {
    const struct hr_engine *engine = team->engine;
    const char *of = team->name[0] == '\0' ? "" : " for ";
    if (team->comm.state != HR_NCCL_BROKEN || team->is_told) {
        return 0;
    }
    if (team->tell_ns == 0) {
        team->tell_ns = hr_now_ns() + CONFIRM_NS;
        hr_log(&engine->node->log, HORO_LOG_ERROR, "NCCL%s%s: %s", of, team->name, team->comm.failure.text);
    }
    if (hr_now_ns() < team->tell_ns) {
        return 0;
    }
    team->is_told = 1;
    hr_node_end(engine->node, HORO_ERR_PEER_LOST, "a failure of NCCL%s%s: %.700s", of, team->name,
                team->comm.failure.text);
    return 1;
}

static int is_over(const struct hr_gpu_team *team) {
    return team->lane == NULL && team->comm.state == HR_NCCL_NONE && !team->comm.is_in_flight;
}

static int turn(struct hr_part *part) {
    struct hr_engine *engine = part->owner;
    struct hr_on_gpu *gpu = atomic_load(&engine->on_gpu);
    int64_t soonest_ns = 0;
    int any_busy = 0, any_over = 0;
    int moved = HR_STILL;
    for (struct hr_gpu_team *team = atomic_load(&gpu->teams); team != NULL; team = team->next) {
        moved |= look(team) | team->has_moved | turn_broken(team);
        team->has_moved = 0;
        any_over |= is_over(team);
        any_busy |= team->batch.phase != HR_NCCL_NO_BATCH || team->comm.is_in_flight || team->lane == NULL ||
                    (team->comm.state == HR_NCCL_BROKEN && !team->is_told);
        const int64_t within_ns = look_within(team);
        soonest_ns = within_ns > 0 && (soonest_ns == 0 || within_ns < soonest_ns) ? within_ns : soonest_ns;
    }
    if (any_over) { /* teams that are gone and at their end are taken out of the list */
        struct hr_gpu_team *left = NULL;
        struct hr_gpu_team *next;
        for (struct hr_gpu_team *team = atomic_load(&gpu->teams); team != NULL; team = next) {
            next = team->next;
            if (is_over(team)) {
                drop(engine, team);
            } else {
                team->next = left;
                left = team;
            }
        }
        atomic_store(&gpu->teams, left);
    }
    engine->node->poll_within_ns = soonest_ns;
    moved |= atomic_load(&gpu->is_busy) && !any_busy; /* nobody need drive for it any more */
    atomic_store(&gpu->is_busy, any_busy);
    return moved;
}

/* ---- The end ---- */

static void abort_all(struct hr_on_gpu *gpu) {
    struct hr_nccl_comm *first = NULL;
    for (struct hr_gpu_team *team = atomic_load(&gpu->teams); team != NULL; team = team->next) {
        if (team->comm.handle != NULL) {
            team->comm.next_aborted = first;
            first = &team->comm;
        }
    }
    hr_nccl_abort(first);
}

/* Work on the GPU ends by itself, unless the group has failed. */
static void end(struct hr_part *part, int has_failed) {
    const struct hr_engine *engine = part->owner;
    struct hr_on_gpu *gpu = atomic_load(&engine->on_gpu);
    if (has_failed) {
        abort_all(gpu);
    }
    atomic_store(&gpu->is_busy, 0);
    engine->node->poll_within_ns = 0;
}

static int needs(const struct hr_part *part) {
    const struct hr_engine *engine = part->owner;
    const struct hr_on_gpu *gpu = atomic_load(&engine->on_gpu);
    return gpu != NULL && atomic_load(&gpu->is_busy);
}

const struct hr_part_ops hr_part_gpu = {.rank = HR_PART_GPU, .turn = turn, .needs = needs, .end = end};

void hr_gpu_detach(struct hr_engine *engine, const struct hr_lane *lane) {
    struct hr_gpu_team *team = (struct hr_gpu_team *)atomic_load(&lane->on_gpu);
    if (team != NULL) {
        team->lane = NULL;
        hr_gpu_become_busy(engine);
    }
}

int hr_gpu_is_quiet(struct hr_engine *engine) {
    struct hr_on_gpu *gpu = atomic_load(&engine->on_gpu);
    int is_quiet = 1;
    for (struct hr_gpu_team *team = gpu == NULL ? NULL : atomic_load(&gpu->teams); team != NULL; team = team->next) {
        is_quiet &= hr_nccl_is_quiet(&team->comm);
    }
    return is_quiet;
}

static int may_end(const struct hr_nccl_comm *comm) {
    return comm->state == HR_NCCL_LAUNCHING || comm->state == HR_NCCL_ENDING || comm->state == HR_NCCL_IDLE;
}

/*
 * Waits for what is in flight, and for the other ranks to end the communicators. Tells of what is aborted then since it
 * has not ended here: results that callers have been told are on their way.
 */
static void await_ends(struct hr_engine *engine, struct hr_on_gpu *gpu) {
    const int64_t until_ns = hr_now_ns() + CLOSE_MS * 1000000ll;
    int is_any_open;
    do {
        int moved = 0;
        is_any_open = 0;
        for (struct hr_gpu_team *team = atomic_load(&gpu->teams); team != NULL; team = team->next) {
            moved |= may_end(&team->comm) && wind_up(&team->comm);
            is_any_open |= may_end(&team->comm);
        }
        if (!moved && is_any_open) {
            wait_a_moment();
        }
    } while (is_any_open && hr_now_ns() < until_ns);
    for (const struct hr_gpu_team *team = atomic_load(&gpu->teams); team != NULL; team = team->next) {
        if (may_end(&team->comm) && (team->comm.is_in_flight || team->comm.state == HR_NCCL_LAUNCHING)) {
            hr_log(&engine->node->log, HORO_LOG_WARNING,
                   "leaving, this rank has waited %d s for NCCL, and ends it: operations of %s have not ended on this "
                   "rank's GPU, or on one that it waits for, and their results are lost",
                   CLOSE_MS / 1000, team->name[0] == '\0' ? "all ranks" : team->name);
        }
    }
}

void hr_gpu_end(struct hr_engine *engine, int has_failed) {
    struct hr_on_gpu *gpu = atomic_load(&engine->on_gpu);
    if (gpu == NULL) {
        return;
    }
    if (!has_failed) {
        await_ends(engine, gpu);
    }
    abort_all(gpu);
    const int64_t until_ns = hr_now_ns() + QUIET_MS * 1000000ll;
    while (!hr_gpu_is_quiet(engine) && hr_now_ns() < until_ns) {
        wait_a_moment();
    }
    if (!hr_gpu_is_quiet(engine)) {
        hr_stager_keep_all(atomic_load(&engine->stager)); /* memory of what goes on without end stays, too */
    }
    hr_nccl_drop_marks(&gpu->in_flight);
    struct hr_gpu_team *next;
    for (struct hr_gpu_team *team = atomic_load(&gpu->teams); team != NULL; team = next) {
        next = team->next;
        drop(engine, team);
    }
    drop(engine, gpu->connecting);
    struct hr_device_visit visit;
    if (hr_device_enter(gpu->device, &visit, NULL) == HORO_OK) {
        (void)gpu->device->cuda->stream_destroy(gpu->stream);
        hr_device_leave(gpu->device, &visit);
    }
    atomic_store(&engine->on_gpu, NULL);
    free(gpu);
}
