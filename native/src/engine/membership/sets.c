/*
 * Adding and removing teams: operations of all ranks, agreed on in the log of the world, so that every rank gives a new
 * team the same id and lets go of a removed one at the same place. A rank that announces a removal has nothing
 * pending in the team; so when all have, nothing of it is left to be done anywhere.
 */
#include <stdlib.h>

#include "base/traits.h"
#include "engine/gpu/gpu.h"
#include "engine/membership/membership.h"

/* ---- The callers' side ---- */

static void destroy_lane(void *lane) {
    if (lane != NULL) {
        hr_lane_destroy(lane);
    }
}

static const struct hr_hooks addition = {.freed = destroy_lane};

const struct hr_lane *hr_sets_lane_of(const struct hr_request *request) {
    return request != NULL && request->cargo.hooks == &addition ? request->cargo.data : NULL;
}

static int submit(struct hr_engine *engine, int op, const int32_t *values, int count, struct hr_cargo cargo,
                  int64_t *handle, struct hr_error *error) {
    const int64_t extent = count;
    const horo_tensor tensor = {.input = values, .shape = &extent, .ndim = 1, .dtype = HORO_INT32};
    const horo_request call = {.name = HR_CHANGE_NAME, .op = op, .flags = HORO_SUBMIT_TRANSIENT, .prescale = 1.0,
                               .postscale = 1.0, .tensors = &tensor, .tensor_count = 1};
    return hr_requests_submit(&engine->requests, &call, cargo, handle, error);
}

int hr_sets_add(struct hr_engine *engine, const horo_team_setup *setup, int64_t *handle, struct hr_error *error) {
    struct hr_lane *lane = NULL; /* this rank's part in the team, with its links */
    const int32_t *ranks = setup->ranks;
    const int job_size = engine->node->size;
    int host_count = 0;
    int is_member = 0;
    if (setup->size < 1 || setup->size > job_size) {
        return hr_fail(error, HORO_ERR_USAGE, "a process set of %d ranks is impossible in a job of %d", setup->size,
                       job_size);
    }
    for (int i = 0; i < setup->size; i++) {
        if (ranks[i] < 0 || ranks[i] >= job_size || (i > 0 && ranks[i] <= ranks[i - 1])) {
            return hr_fail(error, HORO_ERR_USAGE,
                           "the ranks of a process set must be ascending and from 0 to %d, but number %d of them is %d",
                           job_size - 1, i, ranks[i]);
        }
        is_member |= ranks[i] == engine->node->rank;
    }
    if (is_member) {
        struct hr_team *team = calloc(1, sizeof *team);
        int status = team == NULL
                         ? hr_fail(error, HORO_ERR_RESOURCE, "out of memory for a team of %d ranks", setup->size)
                         : hr_team_init_some(team, engine->lanes[0]->team, ranks, setup->size, error);
        if (status == HORO_OK && team->host_count > 1) {
            status = hr_node_connect_team(team, setup->control_fds, setup->data_fds, error);
            host_count = team->host_count;
        }
        if (status != HORO_OK) {
            hr_team_destroy(team);
            return status;
        }
        HR_TRY(hr_lane_create(&engine->lane_setup, team, &lane, error));
    }
    HR_TRY(submit(engine, HORO_ADD_TEAM, ranks, setup->size, (struct hr_cargo){&addition, lane}, handle, error));
    /* the transport has its own */
    hr_node_close_links(engine->node, host_count, setup->control_fds, setup->data_fds);
    return HORO_OK;
}

/* With the lock held: from here on nothing can be submitted to the team, of which this rank may be no member. */
static int begin_removal(const struct hr_engine *engine, int32_t id, struct hr_lane **lane, struct hr_error *error) {
    struct hr_port *port;
    char name[HR_TEAM_NAME_BYTES];
    int pending = 0;
    if (id == 0) {
        return hr_fail(error, HORO_ERR_USAGE, "process set 0 has all ranks and cannot be removed");
    }
    HR_TRY(hr_port_find(&engine->requests, id, NULL, &port, error));
    if (port == NULL) {
        return HORO_OK;
    }
    if (port->state == HR_PORT_REMOVING) {
        return hr_fail(error, HORO_ERR_USAGE, "%s is being removed already", hr_team_name(port->team, name));
    }
    for (const struct hr_request *request = NULL; (request = hr_port_next(port, request)) != NULL;) {
        pending += request->refused == 0;
    }
    if (pending > 0) {
        return hr_fail(error, HORO_ERR_USAGE,
                       "%s cannot be removed: %d of its operations are not done on rank %d; wait for them",
                       hr_team_name(port->team, name), pending, engine->node->rank);
    }
    port->state = HR_PORT_REMOVING;
    *lane = port->lane;
    return HORO_OK;
}

/* From now on it may end on other ranks. */
static int announce_removal(struct hr_request *request) {
    struct hr_lane *lane = request->cargo.data;
    if (lane != NULL) {
        lane->leader.expects_removal = 1;
    }
    return hr_lane_announce(request->port->lane, request);
}

/* With the lock held: if it has failed, for whatever reason, the team can be submitted to again. */
static void end_removal(struct hr_request *request, int status) {
    struct hr_lane *lane = request->cargo.data;
    if (status != HORO_OK && lane != NULL) {
        lane->port.state = HR_PORT_OPEN;
        lane->leader.expects_removal = 0;
    }
}

int hr_sets_remove(struct hr_engine *engine, int32_t team, int64_t *handle, struct hr_error *error) {
    static const struct hr_hooks removal = {.announce = announce_removal, .ended = end_removal};
    struct hr_lane *lane = NULL;
    hr_drive_lock(&engine->drive);
    const int begun = begin_removal(engine, team, &lane, error);
    hr_drive_unlock(&engine->drive);
    HR_TRY(begun);
    const struct hr_cargo cargo = {&removal, lane};
    const hr_status status = submit(engine, HORO_REMOVE_TEAM, &team, 1, cargo, handle, error);
    if (status != HORO_OK && lane != NULL) { /* it could not even be submitted */
        lane->port.state = HR_PORT_OPEN;
    }
    return status;
}

/* ---- The driver's side ---- */

/* After a change of lanes, with the lock held: whether other hosts need this rank. */
static void choose_driver(struct hr_engine *engine) {
    int leads = 0;
    for (int i = 0; i < engine->lane_count; i++) {
        leads |= engine->lanes[i]->is_leader && engine->lanes[i]->team->transport != NULL;
    }
    atomic_store(&engine->drive.serves_hosts, leads);
}

static int add(struct hr_engine *engine, struct hr_request *request, int team, int has_local) {
    struct hr_place *place = &engine->requests.places[team];
    struct hr_lane *lane = request->cargo.data;
    struct hr_error error = {0};
    /* partner: hr_partition_leave */
    if (has_local && atomic_load(&engine->node->arena.header->cleanings[team]) != place->cleanings) {
        return HR_STILL;
    }
    const uint64_t *values = engine->tuned.is_on ? engine->tuned.settled : NULL;
    if (lane != NULL && hr_lane_open(lane, place->id, values, &error) != HORO_OK) {
        hr_log(&engine->node->log, HORO_LOG_ERROR, "process set %d: %s", team, error.text);
        return error.code;
    }
    if (lane != NULL) {
        hr_gpu_attach(engine, lane);
    }
    hr_drive_lock(&engine->drive);
    request->cargo.data = NULL;
    request->answer = place->id;
    place->is_used = 1;
    place->has_local = has_local;
    place->port = lane == NULL ? NULL : &lane->port;
    if (lane != NULL) {
        engine->lanes[engine->lane_count++] = lane;
        hr_drive_add(&engine->drive, &lane->part, &hr_part_lane, lane);
        choose_driver(engine);
    }
    hr_drive_unlock(&engine->drive);
    return HR_DONE;
}

static void remove_team(struct hr_engine *engine, int team) {
    struct hr_place *place = &engine->requests.places[team];
    struct hr_lane *lane = place->port == NULL ? NULL : place->port->lane;
    hr_drive_lock(&engine->drive);
    place->cleanings += place->has_local != 0;
    place->is_used = 0;
    place->id = place->id <= INT32_MAX - HORO_TEAM_ID_STEP ? place->id + HORO_TEAM_ID_STEP : -1;
    place->port = NULL;
    if (lane != NULL) {
        int i = 1;
        while (engine->lanes[i] != lane) {
            i++;
        }
        engine->lanes[i] = engine->lanes[--engine->lane_count];
        hr_drive_remove(&engine->drive, &lane->part);
        hr_port_drop_refusals(&lane->port, 0); /* nothing else is pending there */
        choose_driver(engine);
    }
    hr_drive_unlock(&engine->drive);
    if (lane != NULL) {
        hr_gpu_detach(engine, lane);
        hr_lane_close(lane);
        hr_team_close_links(lane->team); /* which lets go of posted receives before their memory is freed */
        hr_membership_forget(lane);
        hr_lane_destroy(lane);
    }
}

int hr_membership_change(struct hr_lane *lane, struct hr_request *request, struct hr_error *error) {
    struct hr_engine *engine = lane->engine;
    struct hr_wire_request decoded;
    HR_TRY(hr_wire_decode_request(request->bytes, request->byte_count, &decoded));
    if (hr_op_is(request->call.op, HR_OP_LAST)) { /* the record says who joined last */
        return request->answer >= 0 && request->answer < engine->node->size ? HR_DONE : HORO_ERR_INTERNAL;
    }
    if (request->answer >= 0) {
        return HORO_ERR_INTERNAL;
    }
    if (request->call.op == HORO_ADD_TEAM) {
        const struct hr_place *places = engine->requests.places;
        const struct hr_team *world = engine->lanes[0]->team;
        int has_local = 0; /* there are members on this host */
        int team = 1;      /* the lowest number that is free */
        for (uint32_t i = 0; i < decoded.value_count; i++) {
            has_local |= world->host_of_rank[hr_wire_u32(decoded.values, i)] == world->host;
        }
        while (team < HR_TEAMS_MAX && (places[team].is_used || places[team].id < 0)) {
            team++;
        }
        if (team < HR_TEAMS_MAX) {
            return add(engine, request, team, has_local);
        }
        (void)hr_fail(error, HORO_ERR_RESOURCE,
                      "there are %d process sets already, and no more are possible: remove one that is not needed",
                      team);
        return HR_DONE;
    }
    const int32_t id = (int)hr_wire_u32(decoded.values, 0);
    struct hr_port *port;
    if (id == 0 || hr_port_find(&engine->requests, id, NULL, &port, error) != HORO_OK) { /* it was there before */
        return HORO_ERR_INTERNAL;
    }
    remove_team(engine, hr_team_number(id));
    return HR_DONE;
}
