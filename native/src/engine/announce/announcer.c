/* A rank's own announcements, and what it remembers of tensors that have an id. Driver only. */
#include <stdlib.h>
#include <string.h>

#include "backend/carried.h"
#include "engine/drive/drive.h"
#include "wire/frame.h"

/* From how many bytes on what is announced goes before all of it is. */
enum { FLUSH_BYTES = 1024 };

static struct hr_request *take_queue(struct hr_engine *engine) {
    (void)pthread_mutex_lock(&engine->submission.lock);
    struct hr_request *head = engine->submission.queue_head;
    engine->submission.queue_head = NULL;
    engine->submission.queue_tail = &engine->submission.queue_head;
    atomic_store(&engine->submission.queued, 0);
    (void)pthread_mutex_unlock(&engine->submission.lock);
    return head;
}

static void tell_leader(struct hr_lane *lane) {
    atomic_fetch_add(&lane->team->partition.header->announced, 1); /* partner: collect_local */
    hr_team_wake_leader(lane->team);
}

int hr_lane_announce_full(struct hr_lane *lane, struct hr_request *request) {
    request->announced_id = 0;
    if (lane->is_leader) {
        return hr_lane_announce_own(lane, request, 0);
    }
    size_t mark;
    HR_TRY(hr_frame_begin(&lane->announcer.request_out, &mark));
    HR_TRY(hr_wire_put(
        &lane->announcer.request_out,
        &(struct hr_wire_message){.type = HR_WIRE_REQUEST,
                                  .rank = lane->node->rank,
                                  .status = request->refused,
                                  .text = hr_request_reason(request),
                                  .rows = request->rows,
                                  .request = {.bytes = request->bytes, .byte_count = request->byte_count}}));
    hr_frame_end(&lane->announcer.request_out, mark);
    return HORO_OK;
}

int hr_lane_flush_requests(struct hr_lane *lane) {
    struct hr_buffer *out = &lane->announcer.request_out;
    if (hr_buffer_size(out) == 0) {
        return HR_STILL;
    }
    const int local_rank = lane->node->local_rank;
    const struct hr_partition *partition = &lane->team->partition;
    struct hr_partition_block *block = &partition->blocks[local_rank];
    atomic_store(&block->wants_room, 1); /* before looking for room: a leader that makes some wakes us */
    const uint64_t read = atomic_load(&block->requests_read); /* partner: the leader's store after reading */
    const size_t written = hr_ring_write(&block->requests, hr_partition_request_ring(partition, local_rank),
                                         HR_REQUEST_RING_BYTES, read, hr_buffer_front(out), hr_buffer_size(out));
    hr_buffer_consume(out, written);
    if (hr_buffer_size(out) == 0) {
        atomic_store(&block->wants_room, 0);
    }
    if (written > 0) {
        tell_leader(lane);
    }
    return written > 0 ? HR_MOVED : HR_STILL;
}

int hr_lane_write_ids(struct hr_lane *lane) {
    struct hr_announcer *announcer = &lane->announcer;
    if (announcer->id_count == 0) {
        return HORO_OK;
    }
    size_t mark;
    HR_TRY(hr_frame_begin(&announcer->request_out, &mark));
    HR_TRY(hr_wire_put_ids(&announcer->request_out, announcer->ids, announcer->id_count));
    hr_frame_end(&announcer->request_out, mark);
    announcer->id_count = 0;
    return HORO_OK;
}

static int announce_data(struct hr_lane *lane, const struct hr_request *request, uint32_t id, size_t bytes) {
    uint8_t packed[HR_CARRIED_MAX];
    size_t mark;
    hr_carried_pack(lane->team, &request->call, packed);
    HR_TRY(hr_frame_begin(&lane->announcer.request_out, &mark));
    HR_TRY(hr_wire_put(&lane->announcer.request_out,
                       &(struct hr_wire_message){.type = HR_WIRE_DATA, .id = id, .data = packed, .data_bytes = bytes}));
    hr_frame_end(&lane->announcer.request_out, mark);
    return HORO_OK;
}

static int announce_rows(struct hr_lane *lane, const struct hr_request *request, uint32_t id) {
    size_t mark;
    HR_TRY(hr_frame_begin(&lane->announcer.request_out, &mark));
    HR_TRY(hr_wire_put(&lane->announcer.request_out,
                       &(struct hr_wire_message){.type = HR_WIRE_ROWS, .id = id, .rows = request->rows}));
    hr_frame_end(&lane->announcer.request_out, mark);
    return HORO_OK;
}

int hr_lane_announce_id(struct hr_lane *lane, const struct hr_request *request, uint32_t id) {
    const size_t carried = hr_lane_carries(lane, request);
    if (lane->is_leader) {
        if (carried > 0) {
            hr_carry_add_own(lane, request, id, carried);
        }
        return hr_lane_announce_own(lane, request, id);
    }
    if (carried > 0) {
        return announce_data(lane, request, id, carried);
    }
    if (request->rows.count > 0) {
        return announce_rows(lane, request, id);
    }
    lane->announcer.ids[lane->announcer.id_count++] = id;
    return lane->announcer.id_count == HR_IDS_MAX ? hr_lane_write_ids(lane) : HORO_OK;
}

static int announce_known(struct hr_lane *lane, struct hr_request *request, struct hr_known *known) {
    request->announced_id = known->id;
    known->pending = request;
    atomic_fetch_add_explicit(&lane->engine->counts.cache_hits, 1, memory_order_relaxed);
    return hr_lone_enter(lane, request, known->id) ? HORO_OK : hr_lane_announce_id(lane, request, known->id);
}

int hr_lane_announce_request(struct hr_lane *lane, struct hr_request *request) {
    if (request->call.op == HORO_JOIN) {
        return hr_lane_begin_join(lane, request);
    }
    struct hr_known *known =
        hr_map_find(&lane->announcer.known, request->name_hash, request->call.name, request->name_bytes);
    const int same = known != NULL && request->refused == 0 && known->byte_count == request->byte_count &&
                     memcmp(known->bytes, request->bytes, request->byte_count) == 0;
    HR_TRY(same ? announce_known(lane, request, known) : hr_lane_announce_full(lane, request));
    return hr_buffer_size(&lane->announcer.request_out) < FLUSH_BYTES ? HORO_OK : hr_lane_flush_requests(lane);
}

/* Of two statuses, of which a negative one is an error, the first error. */
static int worse(int first, int second) {
    return first < 0 ? first : second;
}

int hr_engine_announce(struct hr_engine *engine) {
    if (atomic_load(&engine->submission.queued) == 0) {
        return HR_STILL;
    }
    /* the last report about this rank holds no more */
    int status = engine->submission.blocked.is_told ? hr_engine_tell_blocked(engine) : HORO_OK;
    struct hr_lane *lane = NULL;
    struct hr_request *next = NULL;
    for (struct hr_request *request = take_queue(engine); request != NULL; request = next) {
        next = request->next;
        if (lane != NULL && lane != request->lane) {
            status = worse(status, hr_lane_write_ids(lane));
        }
        lane = request->lane;
        lane->part.is_quiet = 0;
        hr_engine_expect_removal(engine, request);
        request->is_announced = 1;
        if (status >= 0) { /* the others are no longer in the queue either, and fail with the group */
            status = hr_lane_announce_request(lane, request);
        }
    }
    atomic_store_explicit(&engine->node->arena.blocks[engine->node->local_rank].pending,
                          atomic_load(&engine->submission.pending), memory_order_relaxed);
    status = lane == NULL ? status : worse(status, hr_lane_write_ids(lane));
    return status < 0 ? status : HR_MOVED;
}

static int turn(struct hr_part *part) {
    struct hr_engine *engine = part->owner;
    int told = HR_STILL;
    if (atomic_load_explicit(&engine->submission.blocked.is_new, memory_order_relaxed)) {
        HR_TRY(hr_engine_tell_blocked(engine));
        told = HR_MOVED;
    }
    const int announced = hr_engine_announce(engine);
    return announced < 0 ? announced : told | announced;
}

static int needs(const struct hr_part *part) {
    const struct hr_engine *engine = part->owner;
    return atomic_load(&engine->submission.pending) > 0;
}

const struct hr_part_ops hr_part_submissions = {.rank = HR_PART_SUBMISSIONS, .turn = turn, .needs = needs};

int hr_lane_ask_to_leave(struct hr_lane *world, int leaver, int status, struct hr_wire_text words) {
    HR_TRY(hr_lone_give_up(world));
    world->announcer.has_asked_to_leave = 1;
    if (world->is_leader) {
        return hr_leader_note_leaver(world, leaver, status, words);
    }
    size_t mark;
    HR_TRY(hr_frame_begin(&world->announcer.request_out, &mark));
    HR_TRY(
        hr_wire_put(&world->announcer.request_out,
                    &(struct hr_wire_message){.type = HR_WIRE_LEAVE, .rank = leaver, .status = status, .text = words}));
    hr_frame_end(&world->announcer.request_out, mark);
    /* The leader may be parked: its program computes, and nobody there waits for anything. */
    /* partner: the first part's needs */
    atomic_store(&world->node->arena.header->wants_leave, 1);
    const int flushed = hr_lane_flush_requests(world);
    hr_node_call(world->node, 0);
    return flushed < 0 ? flushed : HORO_OK;
}

struct hr_request *hr_lane_find_name(struct hr_lane *lane, struct hr_wire_text name) {
    (void)pthread_mutex_lock(&lane->engine->submission.lock);
    struct hr_request *request = hr_map_find(&lane->in_flight, hr_hash(name.data, name.bytes), name.data, name.bytes);
    (void)pthread_mutex_unlock(&lane->engine->submission.lock);
    return request;
}

static void give_back(struct hr_lane *lane, struct hr_known *known) {
    if (known != NULL) {
        hr_pool_give(&lane->announcer.pool, known, sizeof *known + known->byte_count);
    }
}

void hr_lane_free_known(struct hr_lane *lane) {
    for (uint32_t slot = 0; slot < lane->announcer.capacity && lane->announcer.known_slots != NULL; slot++) {
        give_back(lane, lane->announcer.known_slots[slot]);
    }
    hr_pool_fini(&lane->announcer.pool);
    free((void *)lane->announcer.known_slots);
    hr_map_fini(&lane->announcer.known);
}

/* The slot has a new owner: what I announced by the old id must be announced in full. */
static int forget(struct hr_lane *lane, struct hr_known *known) {
    struct hr_request *pending = known->pending;
    (void)hr_map_remove(&lane->announcer.known, known->name_hash, known->name, known->name_bytes);
    lane->announcer.known_slots[known->id % lane->announcer.capacity] = NULL;
    give_back(lane, known);
    return pending == NULL ? HORO_OK : hr_lane_announce_full(lane, pending);
}

static int create_known(struct hr_lane *lane, const struct hr_request *request, uint32_t id) {
    struct hr_known *known = hr_pool_take(&lane->announcer.pool, sizeof *known + request->byte_count);
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
        status = hr_map_insert(&lane->announcer.known, known->name_hash, known->name, known->name_bytes, known);
    }
    if (status != HORO_OK) {
        give_back(lane, known);
        return status;
    }
    lane->announcer.known_slots[id % lane->announcer.capacity] = known;
    return HORO_OK;
}

static int learn(struct hr_lane *lane, const struct hr_request *request, uint32_t id) {
    if (lane->announcer.capacity == 0) {
        return HORO_ERR_INTERNAL;
    }
    struct hr_known *former =
        hr_map_find(&lane->announcer.known, request->name_hash, request->call.name, request->name_bytes);
    if (former != NULL) {
        former->pending = NULL; /* this very request, agreed on now */
        HR_TRY(forget(lane, former));
    }
    struct hr_known *owner = lane->announcer.known_slots[id % lane->announcer.capacity];
    if (owner != NULL) {
        HR_TRY(forget(lane, owner));
    }
    return create_known(lane, request, id);
}

struct hr_request *hr_lane_find_id(const struct hr_lane *lane, uint32_t id) {
    const uint32_t capacity = lane->announcer.capacity;
    const struct hr_known *known = capacity == 0 ? NULL : lane->announcer.known_slots[id % capacity];
    return known == NULL || known->id != id ? NULL : known->pending;
}

int hr_lane_resolve(struct hr_lane *lane, const struct hr_wire_ref *ref, struct hr_request **request) {
    if (ref->name.bytes > 0) {
        *request = hr_lane_find_name(lane, ref->name);
        if (*request == NULL) {
            *request = hr_lane_find_stand_in(lane, ref->name);
        }
        if (*request == NULL) {
            return HORO_ERR_INTERNAL;
        }
        return ref->id == 0 ? HORO_OK : learn(lane, *request, ref->id);
    }
    const uint32_t capacity = lane->announcer.capacity;
    struct hr_known *known = capacity == 0 ? NULL : lane->announcer.known_slots[ref->id % capacity];
    if (known == NULL || known->id != ref->id) {
        return HORO_ERR_INTERNAL;
    }
    if (known->pending == NULL) {
        return hr_lane_make_stand_in(lane, known->bytes, known->byte_count, request);
    }
    *request = known->pending;
    known->pending = NULL;
    return HORO_OK;
}
