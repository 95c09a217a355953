#include "engine/announce/announcer.h"

#include <stdlib.h>
#include <string.h>

#include "backend/carried.h"
#include "wire/frame.h"

/* The knowledge of this rank of a tensor with an id, in one allocation. */
struct hr_known {
    struct hr_request *pending; /* announced by this id and not done */
    uint64_t hash;              /* of its key, which is all of bytes */
    int is_call;
    uint32_t id;
    uint32_t byte_count; /* at most HR_WIRE_MESSAGE_MAX */
    uint8_t bytes[];     /* canonical form */
};

int hr_announcer_init(struct hr_announcer *announcer, struct hr_team *team, uint32_t capacity) {
    *announcer = (struct hr_announcer){
        .team = team, .capacity = capacity, .slots = calloc((size_t)capacity + 1, sizeof *announcer->slots)};
    return announcer->slots == NULL ? HORO_ERR_RESOURCE : HORO_OK;
}

static void give_back(struct hr_announcer *announcer, struct hr_known *known) {
    if (known != NULL) {
        hr_pool_give(&announcer->pool, known, sizeof *known + known->byte_count);
    }
}

void hr_announcer_fini(struct hr_announcer *announcer) {
    for (uint32_t slot = 0; slot < announcer->capacity && announcer->slots != NULL; slot++) {
        give_back(announcer, announcer->slots[slot]);
    }
    hr_pool_fini(&announcer->pool);
    free((void *)announcer->slots);
    hr_map_fini(&announcer->known);
    hr_buffer_fini(&announcer->out);
}

/* ---- Announcing ---- */

int hr_announcer_is_idle(const struct hr_announcer *announcer) {
    return announcer->id_count == 0 && hr_buffer_size(&announcer->out) == 0;
}

/* Of the canonical form: that of the name, which is there already, tells most of them apart. */
static uint64_t hash_of(const struct hr_request *request) {
    return hr_request_is_call(request) ? hr_hash((const char *)request->bytes, request->byte_count)
                                       : request->name_hash;
}

static struct hr_known *find(const struct hr_announcer *announcer, const struct hr_request *request) {
    return hr_map_find(&announcer->known, hash_of(request), (const char *)request->bytes, request->byte_count);
}

int hr_announcer_knows(struct hr_announcer *announcer, struct hr_request *request) {
    struct hr_known *known = find(announcer, request);
    if (known == NULL || request->refused != 0) {
        return 0;
    }
    request->announced_id = known->id;
    known->pending = request;
    return 1;
}

int hr_announcer_put_id(struct hr_announcer *announcer, const struct hr_request *request, size_t carried) {
    if (carried > 0) { /* the values are packed where they travel */
        struct hr_buffer *out = &announcer->out;
        HR_TRY(hr_announcer_write_ids(announcer)); /* ordered calls are counted as they come */
        HR_TRY(hr_frame_put(out, &(struct hr_wire_message){
            .type = HR_WIRE_DATA, .id = request->announced_id, .data_bytes = carried}));
        hr_carried_pack(announcer->team, &request->call, out->data + out->end - carried);
        return HORO_OK;
    }
    if (request->rows.count > 0) {
        HR_TRY(hr_announcer_write_ids(announcer));
        return hr_frame_put(&announcer->out, &(struct hr_wire_message){
            .type = HR_WIRE_ROWS, .id = request->announced_id, .rows = request->rows});
    }
    announcer->ids[announcer->id_count++] = request->announced_id;
    return announcer->id_count == HR_IDS_MAX ? hr_announcer_write_ids(announcer) : HORO_OK;
}

int hr_announcer_put_full(struct hr_announcer *announcer, struct hr_request *request) {
    const char *reason = request->refused == 0 ? "" : request->error_text;
    request->announced_id = 0;
    return hr_announcer_put(announcer, &(struct hr_wire_message){
        .type = HR_WIRE_REQUEST, .rank = announcer->team->node->rank, .status = request->refused,
        .text = {reason, strlen(reason)}, .rows = request->rows,
        .request = {.bytes = request->bytes, .byte_count = request->byte_count}});
}

int hr_announcer_put(struct hr_announcer *announcer, const struct hr_wire_message *message) {
    HR_TRY(hr_announcer_write_ids(announcer));
    return hr_frame_put(&announcer->out, message);
}

int hr_announcer_write_ids(struct hr_announcer *announcer) {
    return hr_frame_put_ids(&announcer->out, announcer->ids, &announcer->id_count);
}

int hr_announcer_flush(struct hr_announcer *announcer) {
    struct hr_buffer *out = &announcer->out;
    HR_TRY(hr_announcer_write_ids(announcer));
    if (hr_buffer_size(out) == 0) {
        return HR_STILL;
    }
    const struct hr_team *team = announcer->team;
    const int local_rank = team->node->local_rank;
    const struct hr_partition *partition = &team->partition;
    struct hr_partition_block *block = &partition->blocks[local_rank];
    atomic_store(&block->wants_room, 1); /* before looking for room: a leader that makes some wakes us */
    const uint64_t read = atomic_load(&block->requests_read); /* partner: the leader's store after reading */
    const size_t written = hr_ring_write(&block->requests, hr_partition_request_ring(partition, local_rank),
                                         HR_REQUEST_RING_BYTES, read, hr_buffer_front(out), hr_buffer_size(out));
    hr_buffer_consume(out, written);
    if (hr_buffer_size(out) == 0) {
        atomic_store(&block->wants_room, 0);
    }
    if (written == 0) {
        return HR_STILL;
    }
    atomic_fetch_add(&partition->header->announced, 1); /* partner: hr_leader_collect */
    hr_team_wake_leader(team);
    return HR_MOVED;
}

/* ---- What records say ---- */

/* The slot of an id; NULL: nothing here has it. */
static struct hr_known *find_id(const struct hr_announcer *announcer, uint32_t id) {
    struct hr_known *known = announcer->capacity == 0 ? NULL : announcer->slots[id % announcer->capacity];
    return known == NULL || known->id != id ? NULL : known;
}

struct hr_request *hr_announcer_pending(const struct hr_announcer *announcer, uint32_t id) {
    const struct hr_known *known = find_id(announcer, id);
    return known == NULL ? NULL : known->pending;
}

int hr_announcer_take(struct hr_announcer *announcer, struct hr_port *port, uint32_t id, struct hr_request **request,
                      struct hr_wire_text *bytes) {
    struct hr_known *known = find_id(announcer, id);
    if (known == NULL) {
        return HORO_ERR_INTERNAL;
    }
    *bytes = (struct hr_wire_text){(const char *)known->bytes, known->byte_count};
    if (known->is_call) { /* several may be announced by this id: the next call is meant */
        *request = hr_port_take_call(port);
        known->pending = known->pending == *request ? NULL : known->pending;
        return *request != NULL && (*request)->byte_count == known->byte_count &&
                       memcmp((*request)->bytes, known->bytes, known->byte_count) == 0
                   ? HORO_OK
                   : HORO_ERR_INTERNAL;
    }
    *request = known->pending;
    known->pending = NULL;
    return HORO_OK;
}

void hr_announcer_drop(const struct hr_announcer *announcer, const struct hr_request *request) {
    for (uint32_t slot = 0; slot < announcer->capacity; slot++) {
        struct hr_known *known = announcer->slots[slot];
        if (known != NULL && (request == NULL || known->pending == request)) {
            known->pending = NULL;
        }
    }
}

static int forget(struct hr_announcer *announcer, struct hr_known *known) {
    struct hr_request *pending = known->pending;
    (void)hr_map_remove(&announcer->known, known->hash, (const char *)known->bytes, known->byte_count);
    announcer->slots[known->id % announcer->capacity] = NULL;
    give_back(announcer, known);
    return pending == NULL ? HORO_OK : hr_announcer_put_full(announcer, pending);
}

int hr_announcer_learn(struct hr_announcer *announcer, const struct hr_request *request, uint32_t id) {
    if (announcer->capacity == 0) {
        return HORO_ERR_INTERNAL;
    }
    struct hr_known *former = find(announcer, request);
    if (former != NULL) {
        former->pending = NULL; /* this very request, agreed on now */
        HR_TRY(forget(announcer, former));
    }
    struct hr_known *owner = announcer->slots[id % announcer->capacity];
    HR_TRY(owner == NULL ? HORO_OK : forget(announcer, owner));
    struct hr_known *known = hr_pool_take(&announcer->pool, sizeof *known + request->byte_count);
    if (known == NULL) {
        return HORO_ERR_RESOURCE;
    }
    *known = (struct hr_known){.hash = hash_of(request),
                               .is_call = hr_request_is_call(request),
                               .id = id,
                               .byte_count = (uint32_t)request->byte_count};
    memcpy(known->bytes, request->bytes, request->byte_count);
    const char *key = (const char *)known->bytes;
    if (hr_map_insert(&announcer->known, known->hash, key, known->byte_count, known) != HORO_OK) {
        give_back(announcer, known);
        return HORO_ERR_RESOURCE;
    }
    announcer->slots[id % announcer->capacity] = known;
    return HORO_OK;
}
