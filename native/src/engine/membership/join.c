/*
 * Joining (docs/adr/0037-a-joined-rank-stands-in.md): what a rank does that has nothing more to submit to a team. The
 * agreement counts it in for the others, or refuses what no rank can do for another (agree/join.c). It takes part by
 * stand-ins: requests of its own, made of the bytes that they have agreed on, with values that change no result, which
 * is dropped here. What a rank has submitted before it joined goes on.
 *
 *     the rank          JOINED to its leader, and so to the root, which from then on writes down in full what has no
 *                       id, and evicts no id
 *     the root          the record JOINED: no eviction comes behind it until all have joined
 *     the rank          the request JOIN, in full, once it has executed that record, or nothing of it is pending by id
 *     all have          the record BATCH of the request, as of any other, with the rank that joined last: by the clock
 *                       of its host, which JOINED has, and between hosts in the order in which JOINED comes
 *
 * The JOIN waits for the record because of evictions under way. What this rank has announced by an id that is evicted
 * meanwhile, it announces again; were its JOIN in front of that, others might have done the operation without it, and
 * the repeated announcement would begin a round that nobody wants.
 */
#include <stdlib.h>
#include <string.h>

#include "base/cut.h"
#include "base/traits.h"
#include "engine/membership/membership.h"
#include "wire/frame.h"

enum { ALIGNMENT = 64, ELEMENT_MAX = 16 };

/* ---- The request to join ---- */

/* With the lock held: whether this rank may join: not while a change of teams is pending. */
static hr_status check(const struct hr_request *request, struct hr_error *error) {
    const struct hr_engine *engine = request->port->lane->engine;
    const struct hr_request *change = hr_map_find(&engine->lanes[0]->port.names,
                                                  hr_hash(HR_CHANGE_NAME, sizeof HR_CHANGE_NAME - 1), HR_CHANGE_NAME,
                                                  sizeof HR_CHANGE_NAME - 1);
    if (change != NULL && (change->refused == 0 || change->behind != NULL)) {
        return hr_fail(error, HORO_ERR_USAGE,
                       "join: a change of process sets is pending on rank %d, and all ranks must take part in it; "
                       "join when it is done",
                       engine->node->rank);
    }
    return HORO_OK;
}

/*
 * Announces the JOIN that is held, unless this rank may still have something to announce: what waits for values from a
 * GPU, or what an eviction makes it announce again.
 */
static int turn(struct hr_part *part) {
    struct hr_lane *lane = part->owner;
    struct hr_drive *drive = &lane->engine->drive;
    struct hr_absence *absence = &lane->absence;
    int waits = 0;
    hr_drive_lock(drive);
    for (const struct hr_request *request = NULL; !waits && (request = hr_port_next(&lane->port, request)) != NULL;) {
        waits = request->state != HR_REQUEST_ANNOUNCED || (!absence->is_heard && request->announced_id != 0);
    }
    if (!waits) {
        hr_drive_remove(drive, part);
    }
    hr_drive_unlock(drive);
    if (waits) {
        return HR_STILL;
    }
    struct hr_request *request = absence->held;
    absence->held = NULL;
    absence->is_announced = 1;
    HR_TRY(hr_announcer_put_full(&lane->announcer, request));
    return HR_MOVED;
}

static const struct hr_part_ops part_of_absence = {.rank = HR_PART_ABSENCE, .turn = turn};

static int announce(struct hr_request *request) {
    struct hr_lane *lane = request->port->lane;
    struct hr_drive *drive = &lane->engine->drive;
    HR_TRY(hr_lane_end_round(lane)); /* requests from before the call are announced before */
    lane->absence = (struct hr_absence){.held = request};
    hr_drive_lock(drive);
    /* each would be announced when the one before it is over, for which ranks that do likewise would wait */
    hr_port_drop_refusals(&lane->port, 1);
    hr_drive_add(drive, &lane->absence.part, &part_of_absence, lane);
    hr_drive_unlock(drive);
    return hr_announcer_put(&lane->announcer, &(struct hr_wire_message){
        .type = HR_WIRE_JOINED, .rank = lane->node->rank, .at = (uint64_t)request->submit_ns});
}

/* Well or not. */
static void end_join(struct hr_request *request, int status) {
    struct hr_lane *lane = request->port->lane;
    struct hr_absence *absence = &lane->absence;
    (void)status;
    request->port->state = HR_PORT_OPEN;
    if (absence->held != NULL) {
        hr_drive_remove(&lane->engine->drive, &absence->part);
    }
    *absence = (struct hr_absence){.part = absence->part};
}

int hr_join_submit(struct hr_engine *engine, int32_t team, int64_t *handle, struct hr_error *error) {
    const horo_request call = {.name = HR_JOIN_NAME, .op = HORO_JOIN, .flags = HORO_SUBMIT_TRANSIENT, .team = team,
                               .prescale = 1.0, .postscale = 1.0};
    static const struct hr_hooks hooks = {.check = check, .announce = announce, .ended = end_join};
    return hr_requests_submit(&engine->requests, &call, (struct hr_cargo){&hooks, NULL}, handle, error);
}

int hr_join_execute(struct hr_lane *lane, const struct hr_wire_message *record) {
    lane->absence.is_heard |= record->rank == lane->node->rank;
    return record->rank < lane->node->size ? HORO_OK : HORO_ERR_INTERNAL;
}

/* ---- Leaders ---- */

int hr_join_handle(struct hr_lane *lane, int member, const struct hr_wire_message *message, int64_t now_ns) {
    struct hr_leader *leader = &lane->leader;
    struct hr_link *link = hr_leader_link_of(leader, member);
    uint64_t at = message->at; /* a time of this host's: when the rank called, or when the message of another came */
    if (member == 0 && leader->link_count > 0) {
        /* a leader that joins after others has heard of those: it reads what its links have for it first */
        (void)hr_node_progress(lane->node);
        HR_TRY(hr_leader_progress_links(leader, (int64_t)message->at - 1));
    }
    if (link != NULL) {
        const int is_later = message->at > link->told_at;
        link->told_at = is_later ? message->at : link->told_at;
        at = is_later ? (uint64_t)now_ns : 0;
    }
    hr_agree_note_absence(&leader->agree, message->rank, at);
    return hr_leader_tell_up(leader, &(struct hr_wire_message){
        .type = HR_WIRE_JOINED, .rank = message->rank, .at = leader->is_root ? 0 : at}); /* a record has none */
}

/* ---- Stand-ins ---- */

/* The bits of the lowest and the highest value of a dtype, of floats the infinities, and of its 1. */
static const struct {
    uint64_t lowest, highest, one;
} VALUES[HR_REDUCED_DTYPE_COUNT] = {
    [HORO_INT8] = {0x80, 0x7f, 1},
    [HORO_INT16] = {0x8000, 0x7fff, 1},
    [HORO_INT32] = {0x80000000, 0x7fffffff, 1},
    [HORO_INT64] = {0x8000000000000000, 0x7fffffffffffffff, 1},
    [HORO_FLOAT16] = {0xfc00, 0x7c00, 0x3c00},
    [HORO_BFLOAT16] = {0xff80, 0x7f80, 0x3f80},
    [HORO_FLOAT32] = {0xff800000, 0x7f800000, 0x3f800000},
    [HORO_FLOAT64] = {0xfff0000000000000, 0x7ff0000000000000, 0x3ff0000000000000},
    [HORO_BOOL] = {0, 1, 1}, [HORO_UINT8] = {0, 0xff, 1}, [HORO_UINT16] = {0, 0xffff, 1},
    [HORO_UINT32] = {0, 0xffffffff, 1}, [HORO_UINT64] = {0, UINT64_MAX, 1},
};

/*
 * The bits of the value of a dtype that changes no result of a reduction; 0 for one that has none, which is refused
 * before it is run. Of a complex 1 those of its real part, which comes first: all behind them are 0. No complex number
 * leaves a product as it is beside an infinite or NaN part: 1 does for all others, but for the sign of a zero.
 */
static uint64_t neutral_element(int dtype, int reduce_op) {
    if (!hr_dtype_reducible(dtype, reduce_op)) {
        return 0;
    }
    switch (reduce_op) {
    case HORO_MIN: return VALUES[dtype].highest;
    case HORO_MAX: return VALUES[dtype].lowest;
    case HORO_BAND: return dtype == HORO_BOOL ? 1 : UINT64_MAX; /* cut to its bytes */
    case HORO_PRODUCT: return VALUES[hr_dtype_real(dtype)].one;
    default: return 0;
    }
}

/* The call that theirs is, without values. Its tensors, shapes and name are in *memory, which is the caller's. */
static int draft(const struct hr_lane *lane, const struct hr_wire_request *request, horo_request *call, void **memory) {
    const size_t count = request->tensor_count;
    horo_tensor *tensors =
        calloc(1, count * (sizeof *tensors + sizeof(struct hr_wire_tensor)) + request->name.bytes + 1);
    struct hr_wire_tensor *decoded = (struct hr_wire_tensor *)(void *)(tensors + count);
    char *name = (char *)(decoded + count);
    if (tensors == NULL) {
        return HORO_ERR_RESOURCE;
    }
    memcpy(name, request->name.data, request->name.bytes);
    const uint8_t *cursor = request->tensors;
    for (size_t i = 0; i < count; i++) {
        hr_wire_next_tensor(&cursor, &decoded[i]);
        tensors[i] = (horo_tensor){.shape = decoded[i].shape, .ndim = decoded[i].ndim, .dtype = decoded[i].dtype,
                                   .wire_dtype = decoded[i].wire_dtype};
    }
    *call = (horo_request){
        .name = name, .op = request->op, .reduce_op = request->reduce_op, .root_rank = request->root_rank,
        .flags = request->transient ? HORO_SUBMIT_TRANSIENT : 0, .team = lane->team->id,
        .prescale = request->prescale, .postscale = request->postscale,
        .tensors = tensors, .tensor_count = (int32_t)count,
    };
    *memory = tensors;
    return HORO_OK;
}

/* In place. Of an allgather there is nothing: the extents agreed on are those of no rows. */
static int give_values(struct hr_request *made) {
    const horo_request *call = &made->call;
    horo_tensor *tensors = (horo_tensor *)(void *)(made + 1); /* those of its call */
    size_t total = 1;
    for (int32_t i = 0; i < call->tensor_count; i++) {
        if (__builtin_add_overflow(total, hr_round_up(hr_tensor_bytes(&tensors[i]), ALIGNMENT), &total)) {
            return HORO_ERR_RESOURCE;
        }
    }
    uint8_t *at = calloc(total, 1); /* pages of zeros that nobody has touched yet, where it is large */
    if (at == NULL) {
        return HORO_ERR_RESOURCE;
    }
    made->cargo.data = at;
    for (int32_t i = 0; i < call->tensor_count; i++) {
        const size_t bytes = hr_tensor_bytes(&tensors[i]);
        const size_t width = hr_dtype_bytes(tensors[i].dtype);
        const int reduces = hr_op_is(call->op, HR_OP_REDUCTION);
        const uint64_t bits = reduces ? neutral_element(tensors[i].dtype, call->reduce_op) : 0;
        uint8_t element[ELEMENT_MAX] = {0};
        (void)hr_store_u64(element, bits); /* values in memory are little-endian, as on the wire */
        for (size_t done = 0; bits != 0 && done < bytes; done += width) {
            memcpy(at + done, element, width);
        }
        tensors[i].input = at;
        tensors[i].output = at;
        at += hr_round_up(bytes, ALIGNMENT);
    }
    return HORO_OK;
}

static void end_stand_in(struct hr_request *request, int status) {
    (void)status;
    (void)hr_map_remove(&request->port->names, request->name_hash, request->call.name, request->name_bytes);
    hr_request_destroy(request);
}

/*
 * Makes one from the canonical bytes of theirs, for the record that comes next. HORO_OK, HORO_ERR_RESOURCE, or
 * HORO_ERR_INTERNAL where this rank has not joined, or nobody can stand in: the others have refused that.
 */
static int make(struct hr_lane *lane, const void *bytes, size_t byte_count, struct hr_request **request) {
    static const struct hr_hooks hooks = {.ended = end_stand_in, .freed = free};
    struct hr_wire_request decoded;
    HR_TRY(hr_wire_decode_request(bytes, byte_count, &decoded));
    const int op = decoded.op;
    const int can_stand_in = op == HORO_ALLREDUCE || op == HORO_ALLGATHER || op == HORO_BARRIER ||
                             (op == HORO_BROADCAST && hr_team_member(lane->team, decoded.root_rank) >= 0);
    if (!lane->absence.is_announced || !can_stand_in || decoded.on_gpu) {
        return HORO_ERR_INTERNAL;
    }
    horo_request call;
    void *memory;
    struct hr_request *made = NULL;
    HR_TRY(draft(lane, &decoded, &call, &memory));
    int status = hr_request_create(&call, &made, NULL);
    free(memory);
    HR_TRY(status);
    made->port = &lane->port;
    made->team_size = lane->team->size;
    made->state = HR_REQUEST_STANDS_IN;
    made->cargo = (struct hr_cargo){&hooks, NULL};
    status = give_values(made);
    if (status == HORO_OK) {
        hr_drive_lock(&lane->engine->drive);
        status = hr_map_insert(&lane->port.names, made->name_hash, made->call.name, made->name_bytes, made);
        hr_drive_unlock(&lane->engine->drive);
    }
    if (status != HORO_OK) {
        hr_request_destroy(made);
        return status;
    }
    *request = made;
    return HORO_OK;
}

int hr_stand_in_for(struct hr_lane *lane, struct hr_wire_text bytes, struct hr_request **request) {
    if (bytes.bytes > 0) {
        return make(lane, bytes.data, bytes.bytes, request);
    }
    return lane->absence.is_announced ? HORO_OK : HORO_ERR_INTERNAL;
}

int hr_stand_in_describe(struct hr_lane *lane, const struct hr_wire_message *record) {
    const struct hr_wire_request *request = &record->request;
    struct hr_request *made;
    return hr_port_find_name(&lane->port, request->name) != NULL /* submitted here, too */
               ? HORO_OK
               : make(lane, request->bytes, request->byte_count, &made);
}

static void destroy(void *request) {
    hr_request_destroy(request);
}

void hr_membership_forget(struct hr_lane *lane) {
    const struct hr_map *names = &lane->port.names;
    for (size_t i = 0; i < names->capacity; i++) { /* nothing else is pending there */
        if (names->slots[i].value != NULL) {
            hr_node_bury(lane->node, names->slots[i].value, destroy);
        }
    }
}
