/* The end of a request: who waits for it is told how it went. */
#include <string.h>

#include "engine/engine.h"

static struct hr_arena_block *block_of(const struct hr_engine *engine) {
    return &engine->node->arena.blocks[engine->node->local_rank];
}

/* It is no longer pending; the call behind it, if there is one, takes its place. */
static void remove_pending(struct hr_engine *engine, const struct hr_request *request) {
    struct hr_lane *lane = request->lane;
    struct hr_request *next = request->behind;
    if (request->is_behind) {
        struct hr_request *front =
            hr_map_find(&lane->in_flight, request->name_hash, request->call.name, request->name_bytes);
        while (front->behind != request) {
            front = front->behind;
        }
        front->behind = next;
    } else {
        (void)hr_map_remove(&lane->in_flight, request->name_hash, request->call.name, request->name_bytes);
        if (next != NULL) { /* into the place that has just become free */
            (void)hr_map_insert(&lane->in_flight, next->name_hash, next->call.name, next->name_bytes, next);
            next->is_behind = 0;
            atomic_store_explicit(&block_of(engine)->behind, 0, memory_order_relaxed);
            if (next->is_queued) {
                hr_engine_queue(engine, next);
            }
        }
    }
    atomic_store_explicit(&lane->pending, atomic_load_explicit(&lane->pending, memory_order_relaxed) - 1,
                          memory_order_relaxed);
    *(request->older == NULL ? &engine->submission.oldest : &request->older->newer) = request->newer;
    *(request->newer == NULL ? &engine->submission.newest : &request->newer->older) = request->older;
}

void hr_engine_complete_locked(struct hr_engine *engine, struct hr_request *request, int status, const char *text) {
    remove_pending(engine, request);
    if (status != HORO_OK) {
        hr_engine_reopen_team(engine, request);
    }
    if (request->call.op == HORO_JOIN) {
        hr_lane_end_join(request->lane);
    }
    const uint32_t left = atomic_fetch_sub(&engine->drive.pending, 1) - 1;
    atomic_store_explicit(&block_of(engine)->pending, left, memory_order_relaxed);
    if (request->refused != 0) { /* nobody waits for it */
        engine->submission.passed++;
        hr_request_destroy(request);
        return;
    }
    request->error_text = text == NULL ? NULL : strdup(text);
    atomic_store(&request->status, status); /* last: from here on the caller may release it */
}

void hr_engine_drop_refusals(const struct hr_lane *lane, int only_behind) {
    struct hr_request *older;
    for (struct hr_request *request = lane->engine->submission.newest; request != NULL; request = older) {
        older = request->older;
        if (request->lane == lane && request->refused != 0 && request->behind == NULL &&
            (request->is_behind || !only_behind)) {
            hr_engine_complete_locked(lane->engine, request, HORO_ERR_ABORTED, NULL);
        }
    }
}

void hr_engine_complete(struct hr_engine *engine, struct hr_request *const *requests, size_t count, int status,
                        const char *text) {
    hr_engine_note_done(engine, requests, count, status);
    hr_drive_lock(&engine->drive);
    for (size_t i = 0; i < count; i++) {
        if (requests[i]->is_stand_in) {
            hr_lane_end_stand_in(requests[i]->lane, requests[i]);
            engine->submission.passed++;
        } else {
            hr_engine_complete_locked(engine, requests[i], status, text);
        }
    }
    hr_drive_wake_waiters(&engine->drive);
    hr_drive_unlock(&engine->drive);
}
