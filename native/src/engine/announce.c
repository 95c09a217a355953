/* A rank's own announcements, and what it remembers of tensors that have an id. Driver only. */
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"

/* How many ids travel in one message, and from how many bytes on what is announced goes before all of it is. */
enum { IDS_MAX = 256, FLUSH_BYTES = 1024 };

/* Announced by id, not yet written down. */
struct id_list {
    uint32_t count;
    uint32_t ids[IDS_MAX];
};

static struct hr_request *take_queue(struct hr_engine *engine) {
    (void)pthread_mutex_lock(&engine->submission.lock);
    struct hr_request *head = engine->submission.queue_head;
    engine->submission.queue_head = NULL;
    engine->submission.queue_tail = &engine->submission.queue_head;
    atomic_store(&engine->submission.queued, 0);
    (void)pthread_mutex_unlock(&engine->submission.lock);
    return head;
}

static void tell_leader(struct hr_engine *engine) {
    atomic_fetch_add(&engine->node->arena.header->announced, 1); /* partner: has_lead_work */
    hr_node_wake(engine->node, 0);
}

/* In full, through my request ring; the next flush takes it there. */
static int announce_full(struct hr_engine *engine, struct hr_request *request) {
    request->announced_id = 0;
    if (engine->is_leader) {
        return hr_engine_announce_own(engine, request, 0);
    }
    size_t mark;
    const struct hr_wire_text none = {NULL, 0};
    HR_TRY(hr_frame_begin(&engine->announcer.request_out, &mark));
    HR_TRY(hr_wire_put_request(&engine->announcer.request_out, engine->node->rank, HORO_OK, none, request->bytes,
                               request->byte_count));
    hr_frame_end(&engine->announcer.request_out, mark);
    return HORO_OK;
}

int hr_engine_flush_requests(struct hr_engine *engine) {
    struct hr_buffer *out = &engine->announcer.request_out;
    if (hr_buffer_size(out) == 0) {
        return 0;
    }
    struct hr_arena *arena = &engine->node->arena;
    struct hr_arena_block *block = &arena->blocks[arena->local_rank];
    atomic_store(&block->wants_room, 1); /* before looking for room: a leader that makes some wakes us */
    const uint64_t read = atomic_load(&block->requests_read); /* partner: the leader's store after reading */
    const size_t written = hr_ring_write(&block->requests, hr_arena_request_ring(arena, arena->local_rank),
                                         HR_REQUEST_RING_BYTES, read, hr_buffer_front(out), hr_buffer_size(out));
    hr_buffer_consume(out, written);
    if (hr_buffer_size(out) == 0) {
        atomic_store(&block->wants_room, 0);
    }
    if (written > 0) {
        tell_leader(engine);
    }
    return written > 0;
}

static int write_ids(struct hr_engine *engine, struct id_list *list) {
    if (list->count == 0) {
        return HORO_OK;
    }
    size_t mark;
    HR_TRY(hr_frame_begin(&engine->announcer.request_out, &mark));
    HR_TRY(hr_wire_put_ids(&engine->announcer.request_out, list->ids, list->count));
    hr_frame_end(&engine->announcer.request_out, mark);
    list->count = 0;
    return HORO_OK;
}

static int announce_id(struct hr_engine *engine, struct hr_request *request, struct hr_known *known, struct id_list *list) {
    request->announced_id = known->id;
    known->pending = request;
    atomic_fetch_add_explicit(&engine->counts.cache_hits, 1, memory_order_relaxed);
    if (engine->is_leader) {
        return hr_engine_announce_own(engine, request, known->id);
    }
    list->ids[list->count++] = known->id;
    return list->count == IDS_MAX ? write_ids(engine, list) : HORO_OK;
}

static int announce_one(struct hr_engine *engine, struct hr_request *request, struct id_list *list) {
    struct hr_known *known = hr_map_find(&engine->announcer.known, request->name_hash, request->call.name, request->name_bytes);
    const int same = known != NULL && known->byte_count == request->byte_count &&
                     memcmp(known->bytes, request->bytes, request->byte_count) == 0;
    HR_TRY(same ? announce_id(engine, request, known, list) : announce_full(engine, request));
    return hr_buffer_size(&engine->announcer.request_out) < FLUSH_BYTES ? HORO_OK : hr_engine_flush_requests(engine);
}

int hr_engine_announce(struct hr_engine *engine) {
    if (atomic_load(&engine->submission.queued) == 0) {
        return 0;
    }
    struct id_list list;
    list.count = 0; /* the ids are written before they are read */
    int count = 0;
    int status = HORO_OK;
    struct hr_request *next = NULL;
    for (struct hr_request *request = take_queue(engine); request != NULL; request = next, count++) {
        next = request->next;
        request->pending_place = hr_arena_pending_add(&engine->node->arena, request->name_hash);
        if (status >= 0) { /* the others are no longer in the queue either, and fail with the group */
            status = announce_one(engine, request, &list);
        }
    }
    status = status < 0 ? status : write_ids(engine, &list);
    return status < 0 ? status : count;
}

int hr_engine_ask_to_leave(struct hr_engine *engine) {
    if (engine->announcer.has_asked_to_leave) {
        return HORO_OK;
    }
    engine->announcer.has_asked_to_leave = 1;
    if (engine->is_leader) {
        return hr_engine_note_leaver(engine, engine->node->rank);
    }
    size_t mark;
    HR_TRY(hr_frame_begin(&engine->announcer.request_out, &mark));
    HR_TRY(hr_wire_put_leave(&engine->announcer.request_out, engine->node->rank));
    hr_frame_end(&engine->announcer.request_out, mark);
    /* The leader may be parked: its program computes, and nobody there waits for anything. */
    atomic_store(&engine->node->arena.header->wants_leave, 1); /* partner: hr_engine_is_called */
    const int flushed = hr_engine_flush_requests(engine);
    hr_node_call_leader(engine->node);
    return flushed < 0 ? flushed : HORO_OK;
}

struct hr_request *hr_engine_find_name(struct hr_engine *engine, struct hr_wire_text name) {
    (void)pthread_mutex_lock(&engine->submission.lock);
    struct hr_request *request = hr_map_find(&engine->submission.in_flight, hr_hash(name.data, name.bytes), name.data, name.bytes);
    (void)pthread_mutex_unlock(&engine->submission.lock);
    return request;
}

void hr_engine_free_known(struct hr_engine *engine) {
    for (uint32_t slot = 0; slot < engine->announcer.capacity && engine->announcer.known_slots != NULL; slot++) {
        free(engine->announcer.known_slots[slot]);
    }
    free((void *)engine->announcer.known_slots);
    hr_map_fini(&engine->announcer.known);
}

/* The slot has a new owner: what I announced by the old id must be announced in full. */
static int forget(struct hr_engine *engine, struct hr_known *known) {
    struct hr_request *pending = known->pending;
    (void)hr_map_remove(&engine->announcer.known, known->name_hash, known->name, known->name_bytes);
    engine->announcer.known_slots[known->id % engine->announcer.capacity] = NULL;
    free(known);
    return pending == NULL ? HORO_OK : announce_full(engine, pending);
}

static int create_known(struct hr_engine *engine, const struct hr_request *request, uint32_t id) {
    struct hr_known *known = malloc(sizeof *known + request->byte_count);
    if (known == NULL) {
        return HORO_ERR_RESOURCE;
    }
    memcpy(known->bytes, request->bytes, request->byte_count);
    struct hr_wire_request decoded = {0};
    int status = hr_wire_decode_request(known->bytes, request->byte_count, &decoded);
    known->pending = NULL;
    known->name = decoded.name.data;
    known->name_bytes = decoded.name.bytes;
    known->name_hash = request->name_hash;
    known->id = id;
    known->byte_count = (uint32_t)request->byte_count;
    if (status == HORO_OK) {
        status = hr_map_insert(&engine->announcer.known, known->name_hash, known->name, known->name_bytes, known);
    }
    if (status != HORO_OK) {
        free(known);
        return status;
    }
    engine->announcer.known_slots[id % engine->announcer.capacity] = known;
    return HORO_OK;
}

static int learn(struct hr_engine *engine, const struct hr_request *request, uint32_t id) {
    if (engine->announcer.capacity == 0) {
        return HORO_ERR_INTERNAL;
    }
    struct hr_known *former = hr_map_find(&engine->announcer.known, request->name_hash, request->call.name, request->name_bytes);
    if (former != NULL) {
        former->pending = NULL; /* this very request, agreed on now */
        HR_TRY(forget(engine, former));
    }
    struct hr_known *owner = engine->announcer.known_slots[id % engine->announcer.capacity];
    if (owner != NULL) {
        HR_TRY(forget(engine, owner));
    }
    return create_known(engine, request, id);
}

int hr_engine_resolve(struct hr_engine *engine, const struct hr_wire_ref *ref, struct hr_request **request) {
    if (ref->name.bytes > 0) {
        *request = hr_engine_find_name(engine, ref->name);
        if (*request == NULL) {
            return HORO_ERR_INTERNAL;
        }
        return ref->id == 0 ? HORO_OK : learn(engine, *request, ref->id);
    }
    struct hr_known *known = engine->announcer.capacity == 0 ? NULL : engine->announcer.known_slots[ref->id % engine->announcer.capacity];
    if (known == NULL || known->id != ref->id || known->pending == NULL) {
        return HORO_ERR_INTERNAL;
    }
    *request = known->pending;
    known->pending = NULL;
    return HORO_OK;
}
