/*
 * Calls that were refused on this rank before anything of them was submitted. Other ranks, whose calls of that name are
 * in order, would wait for this one; so the refusal is announced in place of the request, and the agreement fails the
 * name for all, with the reason. Nobody waits for it here: the caller has its error already. From its submission until
 * the FAIL record it is in lane->refused; a refusal alone counts nowhere as something that is waited for.
 *
 * Calls of one name keep their order: what is submitted under it meanwhile is held until the record has come.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/op.h"
#include "engine/engine.h"

/*
 * Most bytes of refusals whose record is to come. All of them may be in the log at once while this rank, which has
 * nothing pending, reads nothing of it.
 */
enum { REFUSED_BYTES_MAX = HR_LOG_RING_BYTES / 4, RECORD_BYTES = 64, REASON_MAX = 700 };

static size_t bytes_of(const struct hr_request *refusal) {
    return refusal->name_bytes + strlen(refusal->error_text) + RECORD_BYTES;
}

/* With the lock held. */
static void push(struct hr_engine *engine, struct hr_request *refusal) {
    hr_engine_queue(engine, refusal);
    atomic_fetch_add(&engine->submission.pending, 1); /* until it is announced */
    hr_engine_kick(engine);
}

/* The lane to announce it in; NULL: nobody waits for it, or this rank's own request of that name is under way. */
static struct hr_lane *lane_of(const struct hr_engine *engine, const struct hr_request *refusal) {
    struct hr_error unused;
    unused.code = HORO_OK;
    const struct hr_team_place *place = hr_engine_find_team(engine, refusal->call.team, refusal->call.name, &unused);
    struct hr_lane *lane = place == NULL ? NULL : place->lane;
    if (lane == NULL || lane->refuses_requests || lane->is_joining || atomic_load(&engine->driver.stop) ||
        lane->refused_bytes + bytes_of(refusal) > REFUSED_BYTES_MAX ||
        hr_map_find(&lane->in_flight, refusal->name_hash, refusal->call.name, refusal->name_bytes) != NULL) {
        return NULL;
    }
    return lane;
}

/* With the lock held. 1: it is the lane's now; 0: it is not needed; or a status. */
static int enqueue(struct hr_engine *engine, struct hr_request *refusal) {
    struct hr_lane *lane = lane_of(engine, refusal);
    if (lane == NULL) {
        return 0;
    }
    struct hr_request *last =
        hr_map_find(&lane->refused, refusal->name_hash, refusal->call.name, refusal->name_bytes);
    if (last == NULL) {
        HR_TRY(
            hr_map_insert(&lane->refused, refusal->name_hash, refusal->call.name, refusal->name_bytes, refusal));
        push(engine, refusal);
    } else {
        while (last->newer != NULL) {
            last = last->newer;
        }
        last->newer = refusal;
    }
    refusal->lane = lane;
    lane->refused_bytes += bytes_of(refusal);
    return 1;
}

static int create(const struct hr_engine *engine, const horo_request *call, int status, const char *reason,
                  struct hr_request **refusal) {
    char text[HORO_MESSAGE_MAX];
    struct hr_error error;
    error.code = HORO_OK;
    const struct hr_node *node = engine->node;
    (void)snprintf(text, sizeof text, "rank %d (%.200s) has refused it: %.*s", node->rank,
                   node->host_name_of_rank[node->rank], REASON_MAX, reason);
    struct hr_request *created = NULL;
    HR_TRY(hr_request_create(call, &created, &error));
    created->refused = status;
    created->error_text = strdup(text);
    if (created->error_text == NULL) {
        hr_request_destroy(created);
        return HORO_ERR_RESOURCE;
    }
    *refusal = created;
    return HORO_OK;
}

int hr_engine_refuse(struct hr_engine *engine, int32_t team, const char *name, int32_t status, const char *reason) {
    (void)pthread_mutex_lock(&engine->submission.lock);
    const int outcome = hr_engine_refuse_locked(engine, team, name, status, reason);
    (void)pthread_mutex_unlock(&engine->submission.lock);
    return outcome < 0 ? outcome : HORO_OK;
}

int hr_engine_refuse_locked(struct hr_engine *engine, int32_t team, const char *name, int32_t status,
                            const char *reason) {
    if (status != HORO_ERR_USAGE && status != HORO_ERR_UNSUPPORTED && status != HORO_ERR_RESOURCE) {
        return HORO_ERR_USAGE;
    }
    if (hr_engine_end(engine).code != HORO_OK || strcmp(name, HR_JOIN_NAME) == 0) {
        return 0;
    }
    /* The form of a request without tensors, of which there is nothing to refuse. */
    const horo_request call = {.name = name, .op = HORO_BARRIER, .prescale = 1.0, .postscale = 1.0, .team = team};
    struct hr_request *refusal = NULL;
    HR_TRY(create(engine, &call, status, reason, &refusal));
    const int outcome = enqueue(engine, refusal);
    if (outcome != 1) {
        hr_request_destroy(refusal);
    }
    return outcome;
}

int hr_lane_announce_refusal(struct hr_lane *lane, const struct hr_request *refusal) {
    const struct hr_wire_text reason = {refusal->error_text, strlen(refusal->error_text)};
    const struct hr_wire_rows no_rows = {0};
    int status;
    if (lane->is_leader) {
        struct hr_wire_message message = {
            .type = HR_WIRE_REQUEST, .rank = lane->node->rank, .status = refusal->refused, .text = reason};
        HR_TRY(hr_wire_decode_request(refusal->bytes, refusal->byte_count, &message.request));
        status = hr_agree_announce_request(&lane->leader.agree, 0, &message, refusal->submit_ns);
    } else {
        size_t mark;
        HR_TRY(hr_frame_begin(&lane->announcer.request_out, &mark));
        HR_TRY(hr_wire_put_request(&lane->announcer.request_out, lane->node->rank, refusal->refused, reason, no_rows,
                                   refusal->bytes, refusal->byte_count));
        hr_frame_end(&lane->announcer.request_out, mark);
        status = HORO_OK;
    }
    atomic_fetch_sub(&lane->engine->submission.pending, 1);
    return status;
}

int hr_lane_is_refused(struct hr_lane *lane, const struct hr_request *request) {
    if (lane->refused_bytes == 0) { /* earlier refusals have been seen with the queue */
        return 0;
    }
    (void)pthread_mutex_lock(&lane->engine->submission.lock);
    const int found =
        hr_map_find(&lane->refused, request->name_hash, request->call.name, request->name_bytes) != NULL;
    (void)pthread_mutex_unlock(&lane->engine->submission.lock);
    return found;
}

int hr_lane_end_refusal(struct hr_lane *lane, struct hr_wire_text name) {
    const uint64_t hash = hr_hash(name.data, name.bytes);
    struct hr_request *held = NULL;
    int status = HORO_OK;
    (void)pthread_mutex_lock(&lane->engine->submission.lock);
    struct hr_request *refusal = hr_map_remove(&lane->refused, hash, name.data, name.bytes);
    if (refusal != NULL) {
        struct hr_request *next = refusal->newer;
        lane->refused_bytes -= bytes_of(refusal);
        if (next == NULL) {
            held = hr_map_find(&lane->in_flight, hash, name.data, name.bytes);
            held = held != NULL && held->is_held ? held : NULL; /* else it is still in the queue, or on its way there */
        } else {
            status = hr_map_insert(&lane->refused, hash, next->call.name, next->name_bytes, next);
            push(lane->engine, next);
        }
    }
    (void)pthread_mutex_unlock(&lane->engine->submission.lock);
    if (refusal == NULL) {
        return 0;
    }
    hr_request_destroy(refusal);
    HR_TRY(status);
    if (held != NULL) {
        held->is_held = 0;
        HR_TRY(hr_lane_announce_request(lane, held));
        HR_TRY(hr_lane_write_ids(lane));
    }
    return 1;
}

void hr_lane_drop_refusals(struct hr_lane *lane) {
    for (size_t i = 0; i < lane->refused.capacity; i++) {
        struct hr_request *refusal = lane->refused.slots[i].value;
        while (refusal != NULL) {
            struct hr_request *next = refusal->newer;
            hr_request_destroy(refusal);
            refusal = next;
        }
    }
    hr_map_fini(&lane->refused);
}
