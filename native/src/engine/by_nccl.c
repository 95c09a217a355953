/* Requests that NCCL does: from submission to the place on a stream behind which their results are. */
#include "engine/by_nccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/op.h"
#include "device/stager.h"

enum {
    CLOSE_MS = 5000,
    QUIET_MS = 2000,       /* for kernels to end that have been aborted; on a busy machine something may hold them up */
};

/* ---- Callers ---- */

static void load(struct hr_by_nccl *by, const char *const *paths, size_t path_count) {
    struct hr_error lack = {0};
    horo_library library = {0};
    by->able.is_able = hr_nccl_load(&by->nccl, paths, path_count, &library, &lack) == HORO_OK;
    by->able.version = library.version;
    (void)snprintf(by->able.lack, sizeof by->able.lack, "%.*s", HR_NCCL_TEXT_BYTES - 1, lack.text);
}

int hr_engine_use_nccl(struct hr_engine *engine, const char *const *paths, size_t path_count, struct hr_error *error) {
    int status = HORO_OK;
    struct hr_by_nccl *by;
    (void)pthread_mutex_lock(&engine->staging_lock);
    if (atomic_load(&engine->stager) == NULL) {
        status = hr_fail(error, HORO_ERR_USAGE, "NCCL, and horo_use_cuda has not been called");
    } else if (atomic_load(&engine->by_nccl) == NULL) {
        if ((by = calloc(1, sizeof *by)) == NULL) {
            status = hr_fail(error, HORO_ERR_RESOURCE, "out of memory for NCCL");
        } else {
            atomic_init(&by->device, -1);
            load(by, paths, path_count);
            atomic_store(&engine->by_nccl, by);
        }
    }
    (void)pthread_mutex_unlock(&engine->staging_lock);
    return status;
}

/* NULL: this rank is no member. */
static struct hr_nccl_team *find_team(struct hr_engine *engine, struct hr_by_nccl *by, int32_t id) {
    struct hr_error ignored = {0};
    (void)pthread_mutex_lock(&engine->submission.lock);
    const struct hr_team_place *place = hr_engine_find_team(engine, id, NULL, &ignored);
    const int is_member = place != NULL && place->lane != NULL;
    (void)pthread_mutex_unlock(&engine->submission.lock);
    return is_member ? &by->teams[hr_team_number(id)] : NULL;
}

/* All teams use the GPU of the first tensor. */
static void choose_gpu(struct hr_engine *engine, struct hr_by_nccl *by, struct hr_device *device, int number) {
    (void)pthread_mutex_lock(&engine->staging_lock);
    if (by->gpu == NULL) {
        by->gpu = device;
        atomic_store(&by->device, number);
    }
    (void)pthread_mutex_unlock(&engine->staging_lock);
}

int hr_engine_mark_for_nccl(struct hr_engine *engine, struct hr_request *request, struct hr_error *error) {
    const horo_request *call = &request->call;
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    struct hr_device *device;
    if (by == NULL || !hr_nccl_can(call)) {
        return HORO_OK;
    }
    const struct hr_nccl_team *team = find_team(engine, by, call->team);
    const int number = atomic_load(&by->device);
    if (team == NULL || (number >= 0 && number != call->device - 1)) {
        return HORO_OK; /* on another GPU than the others of this rank */
    }
    HR_TRY(hr_stager_device(atomic_load(&engine->stager), call->device - 1, &device, error));
    HR_TRY(hr_mark_create(device, (void *)(uintptr_t)call->stream, &request->mark, error));
    choose_gpu(engine, by, device, call->device - 1); /* now that nothing is refused */
    if (atomic_load(&by->device) == call->device - 1) {
        hr_request_set_by_nccl(request);
    }
    if (!hr_request_is_by_nccl(request) || hr_nccl_is_refused(team)) {
        hr_mark_drop(request->mark);
        request->mark = NULL;
    }
    return HORO_OK;
}

int hr_engine_is_placed_late(const struct hr_engine *engine, const struct hr_request *request) {
    return hr_request_is_by_nccl(request) &&
           hr_nccl_is_refused(hr_nccl_team_of(engine, request->lane)) != (request->mark == NULL);
}

void hr_engine_note_values(struct hr_engine *engine, struct hr_request *request) {
    if (request->awaits_values) {
        struct hr_nccl_team *team = hr_nccl_team_of(engine, request->lane);
        request->awaits_values = 0;
        if (atomic_fetch_sub(&team->awaited, 1) == 1) {
            atomic_store(&team->has_values, 1);
        }
    }
}

/* ---- The driver ---- */

void hr_lane_settle_nccl(const struct hr_lane *lane, struct hr_request *request) {
    const struct hr_nccl_team *team = hr_nccl_team_of(lane->engine, lane);
    if (hr_request_is_by_nccl(request) && team != NULL && hr_nccl_is_refused(team)) {
        request->is_taken = 1;
    }
}

static int64_t look_within(const struct hr_nccl_team *team) {
    if (team->gone_ns != 0 && team->comm.state != HR_NCCL_BROKEN) {
        return hr_nccl_gone_within_ns(team, hr_now_ns());
    }
    const int64_t for_values_ns = atomic_load(&team->awaited) > 0 || team->unstaged != NULL ? HR_NCCL_LOOK_NS : 0;
    switch (team->comm.state) {
    case HR_NCCL_CONNECTING:
    case HR_NCCL_LAUNCHING: return HR_NCCL_LOOK_SOON_NS;
    case HR_NCCL_IDLE:
        return team->comm.backlog->is_awaited ? HR_NCCL_LOOK_SOON_NS
               : team->comm.is_in_flight      ? HR_NCCL_LOOK_NS
                                              : for_values_ns;
    case HR_NCCL_ENDING:
    case HR_NCCL_BROKEN: return HR_NCCL_LOOK_NS;
    default: return for_values_ns;
    }
}

static int is_busy(const struct hr_nccl_team *team) {
    return team->turn.lane != NULL || team->comm.is_in_flight || team->comm.state == HR_NCCL_ENDING ||
           (team->comm.state == HR_NCCL_BROKEN && !team->is_told);
}

static int turn_team(struct hr_engine *engine, const struct hr_lane *lane) {
    struct hr_nccl_team *team = hr_nccl_team_of(engine, lane);
    char name[HR_TEAM_NAME_BYTES];
    int moved = team->has_moved | atomic_exchange(&team->has_values, 0);
    team->has_moved = 0;
    moved |= hr_nccl_look(team);
    if (atomic_load(&team->awaited) > 0) {
        hr_nccl_check_values(engine, lane);
    }
    if (hr_nccl_may_stage(team)) {
        hr_nccl_stage(engine, lane);
        moved = 1;
    }
    if (team->comm.state == HR_NCCL_BROKEN) {
        moved |= hr_nccl_turn_broken(engine, team, lane->team->number == 0 ? "" : hr_team_name(lane->team, name));
    }
    return moved;
}

/* Adds one team to how soon to look, and whether to look at all. */
static void note_looks(struct hr_engine *engine, const struct hr_nccl_team *team, int *is_any_busy) {
    const int64_t within_ns = look_within(team);
    int64_t *soonest_ns = &engine->node->nccl_within_ns;
    *soonest_ns = within_ns > 0 && (*soonest_ns == 0 || within_ns < *soonest_ns) ? within_ns : *soonest_ns;
    *is_any_busy |= is_busy(team);
}

static int turn(struct hr_part *part) {
    struct hr_engine *engine = part->owner;
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    int is_any_busy = 0;
    if (by == NULL) {
        return HR_STILL;
    }
    int moved = by->ending != NULL && hr_nccl_turn_gone(engine, by);
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

/*
 * Not while anything of NCCL's runs, that of a team that is gone included, however long it takes: to free waits for it,
 * and it may need another rank, whose GPU goes on only when this thread has come to its next call. What is idle is used
 * again meanwhile. Nor once the group has ended: a GPU may stand still then.
 */
void hr_engine_trim_pinned(struct hr_engine *engine) {
    struct hr_stager *stager = atomic_load(&engine->stager);
    const int has_ended = hr_engine_end(engine).code != 0;
    if (stager != NULL && !has_ended && !hr_engine_is_nccl_busy(engine)) {
        hr_stager_trim(stager);
    }
}

int hr_engine_is_nccl_busy(const struct hr_engine *engine) {
    const struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    return by != NULL && atomic_load(&by->is_busy);
}

/* ---- The end ---- */

static void free_reports(const struct hr_engine *engine, struct hr_nccl_team *team) {
    hr_node_bury(engine->node, team->reports, free);
    team->reports = NULL;
}

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

/* Work on the GPU ends by itself, unless the group has failed. */
static void end(struct hr_part *part, int has_failed) {
    struct hr_engine *engine = part->owner;
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    if (by == NULL) {
        return;
    }
    if (has_failed) {
        abort_all(by);
    }
    atomic_store(&by->is_busy, 0);
    engine->node->nccl_within_ns = 0;
}

static int needs(const struct hr_part *part) {
    return hr_engine_is_nccl_busy(part->owner);
}

const struct hr_part_ops hr_part_nccl = {.rank = HR_PART_NCCL, .turn = turn, .needs = needs, .end = end};

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
        hr_backlog_destroy(&by->backlog);
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

/*
 * Tells of what is aborted as it does not end: results that callers have been told are on their way. Not where only
 * other ranks have not come to the end of a communicator (ENDING): they may leave much later, and nothing is lost here.
 */
static void warn_of(const struct hr_engine *engine, const struct hr_nccl_team *team, const char *name) {
    const int is_late = team->comm.is_in_flight || team->comm.state == HR_NCCL_LAUNCHING;
    char last[HR_NCCL_LAST_BYTES];
    if (team->comm.handle == NULL || !is_late || team->comm.state == HR_NCCL_BROKEN) {
        return;
    }
    hr_log(&engine->node->log, HORO_LOG_WARNING,
           "leaving, this rank has waited %d s for NCCL, and ends it: operations of %s up to %s have not ended on "
           "this rank's GPU, or on one that it waits for, and their results are lost",
           CLOSE_MS / 1000, name, hr_nccl_name_last(team, last));
}

static void warn_of_late(const struct hr_engine *engine, const struct hr_by_nccl *by) {
    char name[HR_TEAM_NAME_BYTES];
    for (int i = 0; i < engine->lane_count; i++) {
        const struct hr_team *team = engine->lanes[i]->team;
        warn_of(engine, &by->teams[team->number], team->number == 0 ? "all ranks" : hr_team_name(team, name));
    }
    for (const struct hr_nccl_team *team = by->ending; team != NULL; team = team->next) {
        warn_of(engine, team, team->name);
    }
}

/* Waits a moment for what has been aborted; memory of what goes on without end stays with the process. */
static void await_quiet(struct hr_by_nccl *by, struct hr_stager *stager) {
    const int64_t until_ns = hr_now_ns() + QUIET_MS * 1000000ll;
    int is_quiet = 1;
    for (int i = 0; i < HR_TEAMS_MAX; i++) {
        is_quiet &= hr_nccl_await_quiet(&by->teams[i].comm, left_ms(until_ns));
    }
    for (struct hr_nccl_team *team = by->ending; team != NULL; team = team->next) {
        is_quiet &= hr_nccl_await_quiet(&team->comm, left_ms(until_ns));
    }
    if (stager != NULL && !is_quiet) {
        hr_stager_keep_all(stager);
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
            warn_of_late(engine, by);
        }
        abort_all(by); /* operations that have not come to their end */
        await_quiet(by, atomic_load(&engine->stager));
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
