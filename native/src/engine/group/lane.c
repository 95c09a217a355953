#include "engine/group/lane.h"

#include <stdlib.h>

#include "engine/drive/drive.h"

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
    created->leader.batch_due_ns = HR_NEVER;
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

/* ---- The lane as a part ---- */

enum {
    STAGES_PER_TURN = 3, /* at most, as long as nothing has to be waited for: small ones take less than a whole turn */
    LOOKS_PER_TURN = 2,  /* at a task that waits for a word in memory, as it does on one host most of the time */
};

static int is_at_task(enum hr_execution state) {
    return state == HR_EXECUTION_RUNNING || state == HR_EXECUTION_CHANGING;
}

static int execute(struct hr_lane *lane) {
    int moved = HR_STILL;
    int looks = lane->team->transport == NULL ? LOOKS_PER_TURN : 1;
    for (int stages = 0; stages < STAGES_PER_TURN && looks > 0;) {
        const int executed = hr_lane_execute(lane);
        HR_TRY(executed);
        if (executed == HR_STILL) {
            looks = moved || !is_at_task(lane->executor.state) ? 0 : looks - 1;
            continue;
        }
        moved = HR_MOVED;
        stages++;
        if (lane->executor.state == HR_EXECUTION_IDLE) {
            break; /* a caller may have got what it waits for */
        }
        (void)hr_node_progress(lane->node); /* the links go on between two stages */
    }
    return moved;
}

/* Whether this rank has nothing under way in the team; others may, and then a message comes on a link. */
static int is_quiet(const struct hr_lane *lane) {
    return atomic_load_explicit(&lane->pending, memory_order_relaxed) == 0 &&
           lane->executor.state == HR_EXECUTION_IDLE && hr_buffer_size(&lane->announcer.request_out) == 0 &&
           (!lane->is_leader || (lane->leader.agree.active == 0 && !hr_leader_sends_left(lane)));
}

static void note_quiet(struct hr_lane *lane) {
    const int quiet = lane->engine->lane_count > 1 && is_quiet(lane);
    lane->part.is_quiet = quiet && lane->team->number != 0;
    if (lane->team->transport != NULL) {
        lane->team->transport->is_quiet = quiet;
    }
}

static int turn(struct hr_part *part) {
    struct hr_lane *lane = part->owner;
    const int joined = lane->announcer.join.held != NULL ? hr_lane_go_on_joining(lane) : HR_STILL;
    HR_TRY(joined);
    const int flushed = hr_lane_flush_requests(lane);
    HR_TRY(flushed);
    const int led = lane->is_leader ? hr_lane_lead(lane) : HR_STILL;
    HR_TRY(led);
    const int executed = execute(lane);
    HR_TRY(executed);
    note_quiet(lane);
    return joined | flushed | led | executed;
}

/* Times that have come are a matter of the next turn. */
static int64_t due(struct hr_part *part, int64_t now_ns) {
    struct hr_lane *lane = part->owner;
    const int64_t times_ns[] = {
        hr_lone_due_ns(lane, now_ns),
        lane->is_leader ? lane->leader.batch_due_ns : HR_NEVER,
        lane->executor.state == HR_EXECUTION_LOST ? lane->executor.confirm_ns : HR_NEVER,
    };
    int64_t next_ns = HR_NEVER;
    for (size_t i = 0; i < sizeof times_ns / sizeof *times_ns; i++) {
        next_ns = times_ns[i] > now_ns && times_ns[i] < next_ns ? times_ns[i] : next_ns;
    }
    return next_ns;
}

static int needs(const struct hr_part *part) {
    const struct hr_lane *lane = part->owner;
    return lane->leader.link_count > 0 && hr_leader_sends_left(lane);
}

static void end(struct hr_part *part, int has_failed) {
    (void)has_failed;
    hr_lane_cancel(part->owner);
}

const struct hr_part_ops hr_part_lane = {
    .rank = HR_PART_LANE, .turn = turn, .due = due, .needs = needs, .end = end};
