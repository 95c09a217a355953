/* Requests that NCCL does: from submission to the place on a stream behind which their results are. */
#include "engine/by_nccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cut.h"
#include "base/op.h"
#include "device/blocks.h"

enum {
    CLOSE_MS = 5000,
    LOOK_SOON_NS = 50000,  /* for what holds up a request: a launch, or the connecting */
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
    made->mine.is_able = hr_nccl_load(&made->nccl, paths, path_count, &library, &lack) == HORO_OK;
    made->mine.version = library.version;
    (void)snprintf(made->mine.lack, sizeof made->mine.lack, "%.*s", HR_NCCL_TEXT_BYTES - 1, lack.text);
    made->held_last = &made->held_first;
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

int hr_engine_mark_for_nccl(struct hr_engine *engine, struct hr_request *request, struct hr_error *error) {
    const horo_request *call = &request->call;
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    struct hr_device *device;
    if (by == NULL || call->team != 0 || atomic_load(&by->stage) == HR_BY_NCCL_REFUSED || !hr_nccl_can(call)) {
        return HORO_OK;
    }
    HR_TRY(hr_stager_device(atomic_load(&engine->stager), call->device - 1, &device, error));
    if (atomic_load(&by->stage) == HR_BY_NCCL_ASKED) {
        HR_TRY(hr_nccl_begin_setup(engine, call->device - 1, error));
    }
    if (atomic_load(&by->device) != call->device - 1) {
        return HORO_OK; /* on another GPU than the others of this rank */
    }
    return hr_mark_create(device, (void *)(uintptr_t)call->stream, &request->mark, error);
}

/* With the lock held. */
static void announce(struct hr_engine *engine, struct hr_request *request) {
    hr_request_set_by_nccl(request);
    hr_engine_queue(engine, request);
}

void hr_engine_queue_for_nccl(struct hr_engine *engine, struct hr_request *request) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    if (atomic_load(&by->stage) == HR_BY_NCCL_READY && by->held_first == NULL) {
        announce(engine, request);
        return;
    }
    request->next = NULL;
    *by->held_last = request;
    by->held_last = &request->next;
    atomic_store(&by->held, 1);
}

void hr_engine_retry_nccl(struct hr_engine *engine) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    if (by != NULL && by->until_join) {
        by->until_join = 0;
        atomic_store(&by->stage, HR_BY_NCCL_ASKED);
    }
}

/* ---- The driver, between records ---- */

/* With the lock held. */
static struct hr_request *take_held(struct hr_by_nccl *by) {
    struct hr_request *request = by->held_first;
    if (request != NULL) {
        by->held_first = request->next;
        by->held_last = by->held_first == NULL ? &by->held_first : by->held_last;
    }
    atomic_store(&by->held, by->held_first != NULL);
    return request;
}

void hr_engine_drop_held(struct hr_engine *engine) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    while (by != NULL && take_held(by) != NULL) {
    }
}

static int is_decided(const struct hr_by_nccl *by) {
    const int stage = atomic_load(&by->stage);
    return stage == HR_BY_NCCL_READY || stage == HR_BY_NCCL_REFUSED;
}

static void release_held(struct hr_engine *engine, struct hr_by_nccl *by) {
    (void)pthread_mutex_lock(&engine->submission.lock);
    struct hr_request *request;
    while ((request = take_held(by)) != NULL) {
        if (atomic_load(&by->stage) == HR_BY_NCCL_READY) {
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

/* NCCL does not say who is to blame. A rank that is gone is heard of in a moment; else this one ends the group. */
static int turn_broken(struct hr_engine *engine, struct hr_by_nccl *by) {
    char words[HORO_MESSAGE_MAX];
    if (by->is_told) {
        return 0;
    }
    if (by->tell_ns == 0) {
        by->tell_ns = hr_now_ns() + CONFIRM_NS;
        hr_log(&engine->node->log, HORO_LOG_ERROR, "NCCL: %s", by->comm.failure.text);
    }
    if (hr_now_ns() < by->tell_ns) {
        return 0;
    }
    by->is_told = 1;
    const int length = snprintf(words, sizeof words, "a failure of NCCL: %.700s", by->comm.failure.text);
    hr_node_end(engine->node, HORO_ERR_PEER_LOST, engine->node->rank, words, (size_t)length);
    return 1;
}

static int64_t look_within(const struct hr_by_nccl *by) {
    switch (by->comm.state) {
    case HR_NCCL_CONNECTING:
    case HR_NCCL_LAUNCHING: return LOOK_SOON_NS;
    case HR_NCCL_IDLE: return by->comm.is_in_flight ? LOOK_NS : 0;
    case HR_NCCL_BROKEN: return LOOK_NS;
    default: return 0;
    }
}

int hr_engine_turn_nccl(struct hr_engine *engine) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    if (by == NULL) {
        return 0;
    }
    int moved = by->has_moved;
    by->has_moved = 0;
    if (by->comm.state != HR_NCCL_LAUNCHING) { /* that is its task's */
        moved |= hr_nccl_poll(&by->comm);
    }
    moved |= hr_nccl_turn_setup(engine, by);
    if (by->comm.state == HR_NCCL_BROKEN) {
        moved |= turn_broken(engine, by);
    }
    if (atomic_load(&by->held) && is_decided(by)) {
        release_held(engine, by);
        moved = 1;
    }
    atomic_store(&by->is_busy, by->comm.is_in_flight || (by->comm.state == HR_NCCL_BROKEN && !by->is_told));
    engine->node->nccl_within_ns = look_within(by);
    return moved;
}

int hr_engine_nccl_has_work(struct hr_engine *engine) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    if (by == NULL) {
        return 0;
    }
    if (by->comm.state != HR_NCCL_LAUNCHING) {
        by->has_moved |= hr_nccl_poll(&by->comm);
    }
    const int is_told = atomic_load(&by->stage) == HR_BY_NCCL_GATHERING &&
                        atomic_load(&by->exchange->status) != HORO_IN_PROGRESS;
    const int is_late = by->comm.state == HR_NCCL_BROKEN && !by->is_told && hr_now_ns() >= by->tell_ns;
    return by->has_moved || is_told || is_late || (atomic_load(&by->held) && is_decided(by));
}

int hr_engine_is_nccl_busy(const struct hr_engine *engine) {
    const struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    return by != NULL && atomic_load(&by->is_busy);
}

/* ---- The driver, in a record ---- */

/* Each result where kernels like to begin. */
static size_t divide(struct hr_request *request, char *data) {
    size_t at = 0;
    for (int i = 0; i < request->call.tensor_count; i++) {
        struct hr_gathered *result = &request->gathered[i];
        result->data = data == NULL ? NULL : data + at;
        result->is_given = 1;
        at += hr_round_up((size_t)result->bytes, HR_STAGED_ALIGNMENT);
    }
    return at;
}

int hr_engine_make_room(struct hr_engine *engine, struct hr_request *request) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    const size_t bytes = divide(request, NULL);
    if (by == NULL || by->backend == NULL) {
        return HORO_ERR_INTERNAL;
    }
    if (by->comm.state != HR_NCCL_IDLE || bytes == 0) {
        return HORO_OK; /* nothing will be written */
    }
    if (hr_room_create(atomic_load(&engine->stager), by->comm.device, by->comm.stream, bytes, &request->room,
                       &by->comm.failure) != HORO_OK) {
        by->comm.state = HR_NCCL_BROKEN;
        return HORO_OK;
    }
    (void)divide(request, request->room->data);
    by->room = request->room;
    return HORO_OK;
}

static int await_marks(struct hr_by_nccl *by, struct hr_request *const *requests, size_t count) {
    for (size_t i = 0; i < count; i++) {
        HR_TRY(hr_mark_await(requests[i]->mark, by->comm.stream, &by->comm.failure));
    }
    return HORO_OK;
}

struct hr_backend *hr_engine_begin_nccl(struct hr_engine *engine, struct hr_request *const *requests, size_t count) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    if (by == NULL || by->backend == NULL || atomic_load(&by->stage) != HR_BY_NCCL_READY) {
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        if (requests[i]->mark == NULL) {
            return NULL;
        }
    }
    if (by->comm.state == HR_NCCL_IDLE && await_marks(by, requests, count) != HORO_OK) {
        by->comm.state = HR_NCCL_BROKEN;
    }
    engine->node->nccl_within_ns = LOOK_SOON_NS;
    return by->backend;
}

static int move_marks(struct hr_by_nccl *by, struct hr_request *const *requests, size_t count) {
    for (size_t i = 0; i < count; i++) {
        HR_TRY(hr_mark_move(requests[i]->mark, by->comm.stream, &by->comm.failure));
    }
    return HORO_OK;
}

int hr_engine_end_nccl_batch(struct hr_engine *engine, struct hr_request *const *requests, size_t count) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    struct hr_device_visit visit;
    int status = hr_device_enter(by->comm.device, &visit, &by->comm.failure);
    if (status == HORO_OK) {
        status = move_marks(by, requests, count);
        hr_device_leave(by->comm.device, &visit);
    }
    if (status != HORO_OK) {
        by->comm.state = HR_NCCL_BROKEN;
    } else {
        by->room = NULL; /* behind the mark it can go at any time */
    }
    atomic_store(&by->is_busy, 1);
    return status == HORO_OK;
}

/* ---- The end ---- */

void hr_engine_leave_nccl(struct hr_engine *engine, int is_aborted) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    if (by != NULL) {
        if (is_aborted) {
            hr_nccl_abort(&by->comm);
        }
        if (by->room != NULL) {
            hr_room_leave(by->room, by->comm.stream);
            by->room = NULL;
        }
        atomic_store(&by->is_busy, 0);
        engine->node->nccl_within_ns = 0;
    }
}

int hr_engine_is_nccl_quiet(struct hr_engine *engine) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    return by == NULL || by->comm.stream == NULL || hr_nccl_is_quiet(&by->comm);
}

void hr_engine_end_nccl(struct hr_engine *engine) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    if (by != NULL) {
        hr_nccl_close(&by->comm, hr_arena_aborted(&engine->node->arena).code == 0, CLOSE_MS);
        hr_backend_destroy(by->backend);
        free(by);
        atomic_store(&engine->by_nccl, NULL);
    }
}
