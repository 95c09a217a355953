#include "engine/lane.h"

#include <stdlib.h>

#include "engine/engine.h"

static void free_parts(struct hr_lane *lane) {
    hr_team_close_links(lane->team); /* which lets go of posted receives before their memory is freed */
    if (lane->is_leader) {
        hr_lane_fini_leader(lane);
    }
    hr_lane_free_known(lane);
    hr_lone_fini(lane);
    hr_lane_free_batch(lane);
    hr_lane_free_stand_ins(lane);
    hr_buffer_fini(&lane->announcer.request_out);
    hr_buffer_fini(&lane->executor.log_in);
    hr_map_fini(&lane->in_flight);
    hr_backend_destroy(lane->backend);
    hr_team_destroy(lane->team);
    free(lane);
}

int hr_lane_create(struct hr_engine *engine, struct hr_team *team, struct hr_backend *backend, struct hr_lane **lane,
                   struct hr_error *error) {
    struct hr_lane *created = calloc(1, sizeof *created);
    if (created == NULL) {
        (void)hr_fail(error, HORO_ERR_RESOURCE, "out of memory for a process set of %d ranks", team->size);
        hr_backend_destroy(backend);
        hr_team_destroy(team);
        return HORO_ERR_RESOURCE;
    }
    created->engine = engine;
    created->node = engine->node;
    created->team = team;
    created->backend = backend;
    created->is_leader = team->local_rank == 0;
    created->is_root = team->rank == 0;
    created->announcer.capacity = engine->cache_capacity;
    created->announcer.known_slots = calloc(engine->cache_capacity + 1, sizeof *created->announcer.known_slots);
    created->leader.cycle_ns = engine->cycle_ns;
    int status = created->announcer.known_slots == NULL ? HORO_ERR_RESOURCE : HORO_OK;
    if (status != HORO_OK) {
        (void)hr_fail(error, status, "out of memory for a cache of %u tensors", engine->cache_capacity);
    } else if (created->is_leader) {
        status = hr_lane_init_leader(created, engine->fusion_bytes, error);
    }
    if (status != HORO_OK) {
        free_parts(created);
        return status;
    }
    *lane = created;
    return HORO_OK;
}

int hr_lane_open(struct hr_lane *lane, int32_t id, struct hr_error *error) {
    struct hr_node *node = lane->node;
    struct hr_team *team = lane->team;
    team->id = id;
    team->number = hr_team_number(id);
    HR_TRY(hr_partition_map(&node->arena, team->number, &team->partition, error));
    if (team->transport != NULL) {
        if (hr_node_add_transport(node, team->transport, team->host_count) != HORO_OK) {
            return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for links to %d hosts", team->host_count);
        }
    }
    hr_partition_join(&node->arena, team->number);
    if (lane->engine->tuned.is_on && hr_lane_tune(lane, lane->engine->tuned.settled) != HORO_OK) {
        return hr_fail(error, HORO_ERR_INTERNAL, "its ranks cannot run with what all ranks run with");
    }
    return HORO_OK;
}

void hr_lane_close(struct hr_lane *lane) {
    if (lane->team->transport != NULL) {
        hr_node_drop_transport(lane->node, lane->team->transport, lane->team->host_count);
    }
    if (hr_partition_leave(&lane->node->arena, lane->team->number, &lane->team->partition)) {
        hr_node_wake_all(lane->node); /* one that adds a team of this number may have waited for it */
    }
}

void hr_lane_destroy(struct hr_lane *lane) {
    free_parts(lane);
}
