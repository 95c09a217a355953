/* The end of a request: who waits for it is told how it went. */
#include <string.h>

#include "engine/engine.h"

static void forget_announcement(const struct hr_request *request) {
    struct hr_lane *lane = request->lane;
    if (request->pending_place == HR_NOT_ANNOUNCED) {
        return;
    }
    if (request->announced_id != 0) {
        struct hr_known *known = lane->announcer.known_slots[request->announced_id % lane->announcer.capacity];
        if (known != NULL && known->pending == request) {
            known->pending = NULL;
        }
    }
    hr_arena_pending_remove(&lane->node->arena, request->pending_place);
}

static void remove_in_flight(struct hr_engine *engine, const struct hr_request *request) {
    struct hr_lane *lane = request->lane;
    (void)hr_map_remove(&lane->in_flight, request->name_hash, request->call.name, request->name_bytes);
    atomic_store_explicit(&lane->pending, (uint32_t)lane->in_flight.count, memory_order_relaxed);
    *(request->older == NULL ? &engine->submission.oldest : &request->older->newer) = request->newer;
    *(request->newer == NULL ? &engine->submission.newest : &request->newer->older) = request->older;
}

void hr_engine_complete_locked(struct hr_engine *engine, struct hr_request *request, int status, const char *text) {
    forget_announcement(request);
    hr_engine_note_values(engine, request);
    remove_in_flight(engine, request);
    if (status != HORO_OK) {
        hr_engine_reopen_team(engine, request);
    }
    if (request->call.op == HORO_JOIN) {
        hr_lane_end_join(request->lane);
    }
    request->error_text = text == NULL ? NULL : strdup(text);
    atomic_fetch_sub(&engine->submission.pending, 1);
    atomic_store(&request->status, status); /* last: from here on the caller may release it */
}

void hr_engine_complete(struct hr_engine *engine, struct hr_request *const *requests, size_t count, int status,
                        const char *text) {
    hr_engine_note_done(engine, requests, count, status);
    (void)pthread_mutex_lock(&engine->submission.lock);
    for (size_t i = 0; i < count; i++) {
        if (requests[i]->is_stand_in) {
            hr_lane_end_stand_in(requests[i]->lane, requests[i]);
            engine->submission.passed++;
        } else {
            hr_engine_complete_locked(engine, requests[i], status, text);
        }
    }
    if (engine->submission.waiters > 0) {
        (void)pthread_cond_broadcast(&engine->submission.done);
    }
    (void)pthread_mutex_unlock(&engine->submission.lock);
}
