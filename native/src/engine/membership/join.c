/*
 * Joining: what a rank does that has nothing more to submit to a team. The agreement counts it in for the others
 * (agree/join.c), and it takes part in what they do by stand-ins (stand_in.c): with values that change no result, which
 * are zeros, and for min, max and product what leaves the others' values as they are. An average is over all ranks.
 * An allgather has no rows of it; of a broadcast it drops what comes. What no rank can do for another fails on all that
 * have submitted it, with HORO_ERR_MISMATCH: a broadcast from a rank that has joined, reducescatter, alltoall, changes
 * of teams, and min, max and product with a prescale. What a rank has submitted before it joined goes on.
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

#include "base/traits.h"
#include "engine/membership/private.h"
#include "wire/frame.h"

/* ---- The callers' side, with the lock held ---- */

/* Whether this rank may join: not while a change of teams is pending. */
static hr_status check(void *owner, const struct hr_request *request, struct hr_error *error) {
    const struct hr_engine *engine = owner;
    (void)request;
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

/* Well or not. */
static void end_join(void *owner, struct hr_request *request, int status) {
    struct hr_engine *engine = owner;
    struct hr_lane *lane = request->port->lane;
    (void)status;
    request->port->state = HR_PORT_OPEN;
    lane->is_absent = 0;
    if (lane->absence != NULL) {
        engine->held_joins -= lane->absence->held != NULL;
        *lane->absence = (struct hr_absence){.stand_ins = lane->absence->stand_ins};
    }
}

int hr_join_submit(struct hr_engine *engine, int32_t team, int64_t *handle, struct hr_error *error) {
    const horo_request call = {
        .name = HR_JOIN_NAME,
        .op = HORO_JOIN,
        .flags = HORO_SUBMIT_TRANSIENT,
        .team = team,
        .prescale = 1.0,
        .postscale = 1.0,
    };
    static const struct hr_hooks hooks = {.check = check, .ended = end_join};
    return hr_requests_submit(&engine->requests, &call, (struct hr_cargo){&hooks, engine, NULL}, handle, error);
}

int hr_joined_last(struct hr_engine *engine, int64_t handle) {
    hr_drive_lock(&engine->drive);
    const struct hr_request *request = hr_requests_find(&engine->requests, handle);
    const int is_known = request != NULL && request->call.op == HORO_JOIN && atomic_load(&request->status) == HORO_OK;
    const int rank = is_known ? request->answer : HORO_ERR_USAGE;
    hr_drive_unlock(&engine->drive);
    return rank;
}

/* ---- Announcer ---- */

/*
 * Whether this rank may still have something to announce: what is held, what waits for values from a GPU,
 * or what an eviction makes it announce again.
 */
static int has_to_announce(const struct hr_lane *lane) {
    const int is_heard = lane->absence->is_heard;
    int found = 0;
    hr_drive_lock(&lane->engine->drive);
    const struct hr_request *request = NULL;
    while (!found && (request = hr_port_next(&lane->port, request)) != NULL) {
        found = request->state != HR_REQUEST_ANNOUNCED || (!is_heard && request->announced_id != 0);
    }
    hr_drive_unlock(&lane->engine->drive);
    return found;
}

hr_status hr_join_begin(struct hr_lane *lane, struct hr_request *request) {
    /* each would be announced when the one before it is over, for which ranks that do likewise would wait */
    hr_drive_lock(&lane->engine->drive);
    hr_port_drop_refusals(&lane->port, 1);
    hr_drive_unlock(&lane->engine->drive);
    HR_TRY(hr_lane_end_round(lane)); /* requests from before the call are announced before */
    if (lane->absence == NULL && (lane->absence = calloc(1, sizeof *lane->absence)) == NULL) {
        return HORO_ERR_RESOURCE;
    }
    lane->is_absent = 1;
    lane->absence->held = request;
    lane->engine->held_joins++;
    HR_TRY(hr_announcer_put(&lane->announcer, &(struct hr_wire_message){.type = HR_WIRE_JOINED,
                                                                        .rank = lane->node->rank,
                                                                        .at = (uint64_t)request->submit_ns}));
    const int announced = hr_join_go_on(lane);
    return announced < 0 ? announced : HORO_OK;
}

int hr_join_go_on(struct hr_lane *lane) {
    struct hr_absence *join = lane->absence;
    if (join == NULL || join->held == NULL || has_to_announce(lane)) {
        return HR_STILL;
    }
    struct hr_request *request = join->held;
    join->held = NULL;
    join->has_joined = 1;
    lane->engine->held_joins--;
    HR_TRY(hr_announcer_put_full(&lane->announcer, request));
    return HR_MOVED;
}

int hr_join_execute(void *owner, const struct hr_wire_message *record) {
    struct hr_lane *lane = owner;
    if (record->rank >= lane->node->size) {
        return HORO_ERR_INTERNAL;
    }
    if (record->rank == lane->node->rank) {
        HR_TRY(lane->absence == NULL ? HORO_ERR_INTERNAL : HORO_OK);
        lane->absence->is_heard = 1;
    }
    return HORO_OK;
}

/* ---- Leaders ---- */

/* At a time of this host's: when the rank called, or when the message of another host came. */
static int note_joined(struct hr_leader *leader, int rank, uint64_t at) {
    const struct hr_wire_message joined = {
        .type = HR_WIRE_JOINED, .rank = rank, .at = leader->is_root ? 0 : at}; /* a record has none */
    hr_agree_note_absence(&leader->agree, rank, at);
    return hr_frame_put(hr_leader_up(leader), &joined);
}

int hr_join_handle(void *owner, int member, const struct hr_wire_message *message, int64_t now_ns) {
    struct hr_lane *lane = owner;
    struct hr_leader *leader = &lane->leader;
    struct hr_link *link = hr_leader_link_of(leader, member);
    if (member == 0 && leader->link_count > 0) {
        /* a leader that joins after others has heard of those: it reads what its links have for it first */
        (void)hr_node_progress(lane->node);
        const int heard = hr_leader_progress_links(leader, (int64_t)message->at - 1);
        HR_TRY(heard);
    }
    if (link == NULL) {
        return note_joined(leader, message->rank, message->at);
    }
    const int is_later = message->at > link->told_at;
    link->told_at = is_later ? message->at : link->told_at;
    return note_joined(leader, message->rank, is_later ? (uint64_t)now_ns : 0);
}
