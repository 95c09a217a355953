/* Requests that NCCL does: from submission to the place on a stream behind which their results are. */
#include "engine/by_nccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/op.h"
#include "device/blocks.h"

enum {
    CLOSE_MS = 5000,
    LOOK_NS = 1000000,     /* for failures of what runs on the GPU, which holds up nobody here */
};

#define CONFIRM_NS 250000000ll /* other ranks may tell of the cause meanwhile: a rank that is gone */

/* ---- Callers ---- */

static int create(struct hr_by_nccl **by, const char *const *paths, size_t path_count, struct hr_error *error) {
    struct hr_error lack = {0};
    horo_library library = {0};
    struct hr_by_nccl *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for NCCL");
    }
    made->able.is_able = hr_nccl_load(&made->nccl, paths, path_count, &library, &lack) == HORO_OK;
    made->able.version = library.version;
    (void)snprintf(made->able.lack, sizeof made->able.lack, "%.*s", HR_NCCL_TEXT_BYTES - 1, lack.text);
    for (int i = 0; i < HR_TEAMS_MAX; i++) {
        made->teams[i].held_last = &made->teams[i].held_first;
    }
    atomic_init(&made->device, -1);
    *by = made;
    return HORO_OK;
}

int hr_engine_use_nccl(struct hr_engine *engine, const char *const *paths, size_t path_count, struct hr_error *error) {
    struct hr_by_nccl *made = NULL;
    int status = HORO_OK;
    (void)pthread_mutex_lock(&engine->staging_lock);
    if (atomic_load(&engine->stager) == NULL) {
        status = hr_fail(error, HORO_ERR_USAGE, "NCCL, and horo_use_cuda has not been called");
    } else if (atomic_load(&engine->by_nccl) == NULL) {
        status = create(&made, paths, path_count, error);
    }
    if (made != NULL) {
        atomic_store(&engine->by_nccl, made);
    }
    (void)pthread_mutex_unlock(&engine->staging_lock);
    return status;
}

/* 0: this rank is no member. */
static int find_place(struct hr_engine *engine, struct hr_by_nccl *by, int32_t id, struct hr_nccl_place *found) {
    struct hr_error ignored = {0};
    (void)pthread_mutex_lock(&engine->submission.lock);
    const struct hr_team_place *place = hr_engine_find_team(engine, id, NULL, &ignored);
    const struct hr_lane *lane = place == NULL ? NULL : place->lane;
    if (lane != NULL) {
        *found = (struct hr_nccl_place){&by->teams[hr_team_number(id)], id, lane->team->size, lane->team->rank};
    }
    (void)pthread_mutex_unlock(&engine->submission.lock);
    return lane != NULL;
}

int hr_engine_mark_for_nccl(struct hr_engine *engine, struct hr_request *request, struct hr_error *error) {
    const horo_request *call = &request->call;
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    struct hr_nccl_place place;
    struct hr_device *device;
    if (by == NULL || !hr_nccl_can(call) || !find_place(engine, by, call->team, &place) ||
        atomic_load(&place.team->stage) == HR_BY_NCCL_REFUSED) {
        return HORO_OK;
    }
    HR_TRY(hr_stager_device(atomic_load(&engine->stager), call->device - 1, &device, error));
    const int is_asked = atomic_load(&place.team->stage) == HR_BY_NCCL_ASKED;
    if (!is_asked && atomic_load(&by->device) != call->device - 1) {
        return HORO_OK; /* on another GPU than the others of this rank */
    }
    HR_TRY(hr_mark_create(device, (void *)(uintptr_t)call->stream, &request->mark, error));
    if (is_asked) { /* now that nothing is refused */
        HR_TRY(hr_nccl_begin_setup(engine, &place, call->device - 1, error));
    }
    if (atomic_load(&by->device) != call->device - 1) {
        hr_mark_drop(request->mark);
        request->mark = NULL;
    }
    return HORO_OK;
}

/* With the lock held. */
static void announce(struct hr_engine *engine, struct hr_request *request) {
    hr_request_set_by_nccl(request);
    hr_engine_queue(engine, request);
}

void hr_engine_queue_for_nccl(struct hr_engine *engine, struct hr_request *request) {
    struct hr_nccl_team *team = hr_nccl_team_of(engine, request->lane);
    if (atomic_load(&team->stage) == HR_BY_NCCL_READY && team->held_first == NULL) {
        announce(engine, request);
        return;
    }
    request->next = NULL;
    *team->held_last = request;
    team->held_last = &request->next;
    atomic_store(&team->held, 1);
}

void hr_engine_retry_nccl(struct hr_engine *engine, const struct hr_lane *lane) {
    struct hr_nccl_team *team = hr_nccl_team_of(engine, lane);
    if (team != NULL && team->until_join) {
        team->until_join = 0;
        atomic_store(&team->stage, HR_BY_NCCL_ASKED);
    }
}

/* ---- The driver, between records ---- */

/* With the lock held. */
static struct hr_request *take_held(struct hr_nccl_team *team) {
    struct hr_request *request = team->held_first;
    if (request != NULL) {
        team->held_first = request->next;
        team->held_last = team->held_first == NULL ? &team->held_first : team->held_last;
    }
    atomic_store(&team->held, team->held_first != NULL);
    return request;
}

void hr_engine_drop_held(struct hr_engine *engine) {
    for (int i = 0; i < engine->lane_count && atomic_load(&engine->by_nccl) != NULL; i++) {
        while (take_held(hr_nccl_team_of(engine, engine->lanes[i])) != NULL) {
        }
    }
}

static int is_decided(const struct hr_nccl_team *team) {
    const int stage = atomic_load(&team->stage);
    return stage == HR_BY_NCCL_READY || stage == HR_BY_NCCL_REFUSED;
}

static void release_held(struct hr_engine *engine, struct hr_nccl_team *team) {
    (void)pthread_mutex_lock(&engine->submission.lock);
    struct hr_request *request;
    while ((request = take_held(team)) != NULL) {
        if (atomic_load(&team->stage) == HR_BY_NCCL_READY) {
            announce(engine, request);
            continue;
        }
        const int64_t handle = request->handle;
        (void)pthread_mutex_unlock(&engine->submission.lock); /* for calls of CUDA */
        hr_engine_stage_held(engine, request, handle);
        (void)pthread_mutex_lock(&engine->submission.lock);
    }
    (void)pthread_mutex_unlock(&engine->submission.lock);
}

/*
 * NCCL does not say who is to blame. A rank that is gone is heard of in a moment; else this one ends the group. `of`:
 * the process set; empty for the world.
 */
static int turn_broken(struct hr_engine *engine, struct hr_nccl_team *team, const char *of) {
    char words[HORO_MESSAGE_MAX];
    if (team->is_told) {
        return 0;
    }
    if (team->tell_ns == 0) {
        team->tell_ns = hr_now_ns() + CONFIRM_NS;
        hr_log(&engine->node->log, HORO_LOG_ERROR, "NCCL%s%s: %s", of[0] == '\0' ? "" : " for ", of,
               team->comm.failure.text);
    }
    if (hr_now_ns() < team->tell_ns) {
        return 0;
    }
    team->is_told = 1;
    const int length = snprintf(words, sizeof words, "a failure of NCCL%s%s: %.700s", of[0] == '\0' ? "" : " for ", of,
                                team->comm.failure.text);
    hr_node_end(engine->node, HORO_ERR_PEER_LOST, engine->node->rank, words, (size_t)length);
    return 1;
}

static int64_t look_within(const struct hr_nccl_team *team) {
    switch (team->comm.state) {
    case HR_NCCL_CONNECTING:
    case HR_NCCL_LAUNCHING: return HR_NCCL_LOOK_SOON_NS;
    case HR_NCCL_IDLE: return team->comm.is_in_flight ? LOOK_NS : 0;
    case HR_NCCL_ENDING:
    case HR_NCCL_BROKEN: return LOOK_NS;
    default: return 0;
    }
}

static int is_busy(const struct hr_nccl_team *team) {
    return team->comm.is_in_flight || team->comm.state == HR_NCCL_ENDING ||
           (team->comm.state == HR_NCCL_BROKEN && !team->is_told);
}

/* A wait that spins comes here all the time, for all teams; of what runs on the GPU nobody here waits for the end. */
static int is_due(struct hr_nccl_team *team) {
    if (team->comm.state != HR_NCCL_IDLE || !team->comm.is_in_flight) {
        return 1;
    }
    const int64_t now_ns = hr_now_ns();
    const int is_time = now_ns >= team->look_ns;
    team->look_ns = is_time ? now_ns + LOOK_NS : team->look_ns;
    return is_time;
}

/* That of a launch is its task's. */
static int look(struct hr_nccl_team *team) {
    return team->comm.state != HR_NCCL_LAUNCHING && is_due(team) && hr_nccl_poll(&team->comm);
}

static int turn_team(struct hr_engine *engine, const struct hr_lane *lane) {
    struct hr_nccl_team *team = hr_nccl_team_of(engine, lane);
    char name[HR_TEAM_NAME_BYTES];
    int moved = team->has_moved;
    team->has_moved = 0;
    moved |= look(team);
    moved |= hr_nccl_turn_setup(engine, lane);
    if (team->comm.state == HR_NCCL_BROKEN) {
        moved |= turn_broken(engine, team, lane->team->number == 0 ? "" : hr_team_name(lane->team, name));
    }
    if (atomic_load(&team->held) && is_decided(team)) {
        release_held(engine, team);
        moved = 1;
    }
    return moved;
}

/* Those of teams that are gone: 1 if one has moved. */
static int turn_ending(struct hr_engine *engine, struct hr_by_nccl *by) {
    int moved = 0;
    for (struct hr_nccl_team **link = &by->ending; *link != NULL;) {
        struct hr_nccl_team *team = *link;
        moved |= look(team) | team->has_moved;
        team->has_moved = 0;
        if (team->comm.state == HR_NCCL_IDLE && !team->comm.is_in_flight) {
            hr_nccl_end(&team->comm, HR_NCCL_WITHIN_MS);
            moved = 1;
        }
        if (team->comm.state == HR_NCCL_BROKEN) {
            moved |= turn_broken(engine, team, team->name);
        }
        if (team->comm.state == HR_NCCL_NONE && !team->comm.is_in_flight) {
            *link = team->next;
            hr_nccl_close(&team->comm);
            free(team);
            continue;
        }
        link = &team->next;
    }
    return moved;
}

/* How soon to look, and whether to look at all, of one team more. */
static void note_looks(struct hr_engine *engine, const struct hr_nccl_team *team, int *is_any_busy) {
    const int64_t within_ns = look_within(team);
    int64_t *soonest_ns = &engine->node->nccl_within_ns;
    *soonest_ns = within_ns > 0 && (*soonest_ns == 0 || within_ns < *soonest_ns) ? within_ns : *soonest_ns;
    *is_any_busy |= is_busy(team);
}

int hr_engine_turn_nccl(struct hr_engine *engine) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    int is_any_busy = 0;
    if (by == NULL) {
        return 0;
    }
    int moved = by->ending != NULL && turn_ending(engine, by);
    engine->node->nccl_within_ns = 0;
    for (int i = 0; i < engine->lane_count; i++) {
        moved |= turn_team(engine, engine->lanes[i]);
        note_looks(engine, hr_nccl_team_of(engine, engine->lanes[i]), &is_any_busy);
    }
    for (const struct hr_nccl_team *team = by->ending; team != NULL; team = team->next) {
        note_looks(engine, team, &is_any_busy);
    }
    atomic_store(&by->is_busy, is_any_busy);
    return moved;
}

static int has_work(struct hr_nccl_team *team) {
    team->has_moved |= look(team);
    const int is_told = hr_nccl_has_gathered(team);
    const int is_late = team->comm.state == HR_NCCL_BROKEN && !team->is_told && hr_now_ns() >= team->tell_ns;
    return team->has_moved || is_told || is_late || (atomic_load(&team->held) && is_decided(team));
}

int hr_engine_nccl_has_work(struct hr_engine *engine) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    for (int i = 0; i < engine->lane_count && by != NULL; i++) {
        if (has_work(hr_nccl_team_of(engine, engine->lanes[i]))) {
            return 1;
        }
    }
    for (struct hr_nccl_team *team = by == NULL ? NULL : by->ending; team != NULL; team = team->next) {
        if (has_work(team)) {
            return 1;
        }
    }
    return 0;
}

int hr_engine_is_nccl_busy(const struct hr_engine *engine) {
    const struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    return by != NULL && atomic_load(&by->is_busy);
}

/* ---- The end of a team ---- */

/* MPI may still touch what an exchange that was given up has left with it. */
static void free_reports(const struct hr_engine *engine, struct hr_nccl_team *team) {
    if (atomic_load(&engine->node->mpi.stranded) == 0) {
        free(team->reports);
    }
    team->reports = NULL;
}

void hr_engine_remove_nccl(struct hr_engine *engine, const struct hr_lane *lane) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    struct hr_nccl_team *team = hr_nccl_team_of(engine, lane);
    if (team == NULL) {
        return;
    }
    struct hr_nccl_team *gone = team->comm.handle == NULL ? NULL : calloc(1, sizeof *gone);
    hr_nccl_backend_destroy(team->backend);
    team->backend = NULL;
    if (gone != NULL) {
        gone->comm = team->comm;
        hr_nccl_expect_end(&gone->comm, HR_NCCL_WITHIN_MS);
        (void)hr_team_name(lane->team, gone->name);
        gone->next = by->ending;
        by->ending = gone;
        atomic_store(&by->is_busy, 1);
    } else {
        hr_nccl_close(&team->comm); /* for lack of memory perhaps, of one that all others end in order */
    }
    (void)pthread_mutex_lock(&engine->submission.lock);
    atomic_store(&team->stage, HR_BY_NCCL_ASKED);
    team->until_join = 0;
    free_reports(engine, team);
    team->comm = (struct hr_nccl_comm){0};
    team->has_moved = 0;
    (void)pthread_mutex_unlock(&engine->submission.lock);
}

/* ---- The end ---- */

static struct hr_nccl_comm *link_for_abort(struct hr_nccl_comm *comm, struct hr_nccl_comm *others) {
    if (comm->handle == NULL) {
        return others;
    }
    comm->next_aborted = others;
    return comm;
}

static void abort_all(struct hr_by_nccl *by) {
    struct hr_nccl_comm *first = NULL;
    for (int i = 0; i < HR_TEAMS_MAX; i++) {
        first = link_for_abort(&by->teams[i].comm, first);
    }
    for (struct hr_nccl_team *team = by->ending; team != NULL; team = team->next) {
        first = link_for_abort(&team->comm, first);
    }
    hr_nccl_abort(first);
}

void hr_engine_leave_nccl(struct hr_engine *engine, int is_aborted) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    if (by == NULL) {
        return;
    }
    if (is_aborted) {
        abort_all(by);
    }
    for (int i = 0; i < HR_TEAMS_MAX; i++) {
        hr_nccl_leave_room(&by->teams[i], 0);
    }
    atomic_store(&by->is_busy, 0);
    engine->node->nccl_within_ns = 0;
}

int hr_engine_is_nccl_quiet(struct hr_engine *engine) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    int is_quiet = 1;
    for (int i = 0; i < HR_TEAMS_MAX && by != NULL; i++) {
        is_quiet &= hr_nccl_is_quiet(&by->teams[i].comm);
    }
    for (struct hr_nccl_team *team = by == NULL ? NULL : by->ending; team != NULL; team = team->next) {
        is_quiet &= hr_nccl_is_quiet(&team->comm);
    }
    return is_quiet;
}

static void destroy_stream(struct hr_by_nccl *by) {
    struct hr_error ignored = {0};
    struct hr_device_visit visit;
    if (by->stream != NULL && hr_device_enter(by->gpu, &visit, &ignored) == HORO_OK) {
        (void)by->gpu->cuda->stream_destroy(by->stream);
        hr_device_leave(by->gpu, &visit);
    }
}

static int left_ms(int64_t until_ns) {
    const int64_t left_ns = until_ns - hr_now_ns();
    return left_ns > 0 ? (int)(left_ns / 1000000) : 0;
}

/* In one order on all ranks, as far as they are members: each waits for the others. */
static void await_ends(struct hr_by_nccl *by) {
    const int64_t until_ns = hr_now_ns() + CLOSE_MS * 1000000ll;
    for (int i = 0; i < HR_TEAMS_MAX; i++) {
        hr_nccl_await_end(&by->teams[i].comm, left_ms(until_ns));
    }
    for (struct hr_nccl_team *team = by->ending; team != NULL; team = team->next) {
        hr_nccl_await_end(&team->comm, left_ms(until_ns));
    }
}

static void close_all(struct hr_by_nccl *by) {
    for (int i = 0; i < HR_TEAMS_MAX; i++) {
        hr_nccl_close(&by->teams[i].comm);
        hr_nccl_backend_destroy(by->teams[i].backend);
    }
    while (by->ending != NULL) {
        struct hr_nccl_team *team = by->ending;
        by->ending = team->next;
        hr_nccl_close(&team->comm);
        free(team);
    }
}

void hr_engine_end_nccl(struct hr_engine *engine) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    if (by != NULL) {
        if (hr_arena_aborted(&engine->node->arena).code == 0) {
            await_ends(by);
        }
        abort_all(by); /* what has not come to its end */
        close_all(by);
        destroy_stream(by);
        for (int i = 0; i < HR_TEAMS_MAX; i++) {
            free_reports(engine, &by->teams[i]);
        }
        atomic_store(&engine->by_nccl, NULL);
        if (!by->is_stranded) {
            free(by);
        }
    }
}
