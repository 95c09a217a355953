/*
 * A lane: one rank's part in one team, from the announcements to the batches. Every team has a log of its own, which
 * its members agree on and execute in order; nothing in a lane waits for another lane. The driver of the engine goes
 * round all of them (drive.c). All of a lane is the driver's, unless a line says otherwise.
 */
#ifndef HR_ENGINE_LANE_H
#define HR_ENGINE_LANE_H

#include "engine/announce/announcer.h"
#include "engine/execute/executor.h"
#include "engine/drive/drive.h"
#include "engine/lead/leader.h"
#include "engine/requests/port.h"
#include "engine/round/round.h"
#include "node/team.h"

struct hr_engine;

/* The memory of the check for stalls; stall.c. */
struct hr_stall {
    int64_t check_ns; /* when to look for stalls again; 0: not known */
    uint64_t moves;   /* hr_part_lane.moves when it last looked */
    int64_t moved_ns; /* when it last found that this had changed */
    uint64_t all_moves;   /* likewise of all lanes */
    int64_t all_moved_ns;
    int64_t answers_ns; /* when ranks here that were asked should have answered; 0: none was */
};

/* Of a rank that joins the team; membership/join.c. */
struct hr_absence {
    struct hr_part part;     /* while a JOIN is held */
    struct hr_request *held; /* the JOIN that is to be announced */
    int is_heard;            /* the record JOINED of this rank has been executed */
    int is_announced;        /* JOIN is: this rank has joined */
};

/* The values that all lanes of a rank begin with. */
struct hr_lane_setup {
    struct hr_engine *engine;
    struct hr_leader_setup leader;
    const struct hr_executor_ops *executor_ops;
    struct hr_requests *requests;
    uint32_t cache_capacity;
    const int *lane_count; /* of the rank, now */
    int may_count; /* operations that are alone, if the team allows it: callers spin, and no batch waits for a cycle */
};

struct hr_lane {
    struct hr_engine *engine;
    struct hr_node *node;
    struct hr_team *team;
    struct hr_backend *backend;
    struct hr_backend *_Atomic on_gpu; /* NCCL's; NULL: all tensors on GPUs are staged */
    int is_leader; /* of the team on this host */
    const int *lane_count;   /* see struct hr_lane_setup, as for may_count */
    int may_count;
    int has_asked_to_leave;  /* the world's: LEAVE is announced */
    struct hr_port port;
    struct hr_part part;
    struct hr_announcer announcer;
    struct hr_absence absence;
    struct hr_round round;
    struct hr_leader leader; /* unused on other ranks */
    struct hr_executor executor;
    struct hr_stall stall;
};

/*
 * A lane takes over its team, also where it fails. The team has its links, if it needs any. The world's is open;
 * another lane is opened by the driver, when all ranks have agreed on its id, to run with these values (NULL: with its
 * own). HORO_OK, or a status with *error set.
 */
int hr_lane_create(const struct hr_lane_setup *setup, struct hr_team *team, struct hr_lane **lane,
                   struct hr_error *error);
int hr_lane_open(struct hr_lane *lane, int32_t id, const uint64_t *values, struct hr_error *error);
/* The driver, when the team is removed: nothing more is moved on its links, and its partition is left. */
void hr_lane_close(struct hr_lane *lane);
/* Closes its links too. */
void hr_lane_destroy(struct hr_lane *lane);

/*
 * A request that has been taken from the queue: counts this rank in, or announces it. end_round: before what must come
 * behind it, announces one that this rank is counted in for, unless all are. HORO_OK or a status.
 */
int hr_lane_announce(struct hr_lane *lane, struct hr_request *request);
int hr_lane_end_round(struct hr_lane *lane);

/* Its moves: a record, a stage of a task, a piece between hosts; its end gives up what is under way. */
extern const struct hr_part_ops hr_part_lane;

/* Whether the lane can run with these values; runs with them from now on, between two tasks: HORO_ERR_INTERNAL: not. */
int hr_lane_fits(const struct hr_lane *lane, const uint64_t *values);
int hr_lane_tune(struct hr_lane *lane, const uint64_t *values);

#endif
