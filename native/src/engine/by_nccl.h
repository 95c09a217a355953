/*
 * Requests with tensors on GPUs that NCCL does (docs/adr/0044-nccl-does-what-all-ranks-agree-on.md). Every team has a
 * communicator of its own, all on one GPU of this rank and on one stream there.
 *
 *     stage      | what has happened                               | records of the team's log that are for NCCL
 *     -----------+-------------------------------------------------+-------------------------------------------------
 *     ASKED      | nothing                                         | the first one makes the ranks tell
 *     TELLING    | each rank tells the others what it has          | wait, and with them what stands behind them
 *     CONNECTING | all ranks can, NCCL connects them; each that    | wait
 *                | is connected tells the others                   |
 *     READY      | all ranks are connected                         | are NCCL's
 *     REFUSED    | not all ranks can                               | are done in host memory, once the values of what
 *                |                                                 | was submitted before are there
 *
 * A request is announced as one for NCCL by what is known at its submission: NCCL can do it, and its tensors are on the
 * GPU that NCCL uses here. So ranks that do not mean the same, or refuse it, fail at once, whatever the stage is; and a
 * record for NCCL means that all ranks have the tensors on their GPUs. Since all ranks execute one log, all tell at the
 * same place of it, and come to the same end.
 *
 * Kernels of two communicators that are launched in different orders on two ranks may wait for one another for ever. So
 * batches take turns, in one order on all ranks.
 */
#ifndef HR_ENGINE_BY_NCCL_H
#define HR_ENGINE_BY_NCCL_H

#include "backend/nccl_backend.h"
#include "device/mark.h"
#include "device/staging.h"
#include "engine/drive.h"

enum hr_by_nccl_stage {
    HR_BY_NCCL_ASKED,
    HR_BY_NCCL_TELLING,
    HR_BY_NCCL_CONNECTING,
    HR_BY_NCCL_READY,
    HR_BY_NCCL_REFUSED,
};

enum {
    HR_NCCL_TEXT_BYTES = 96,
    HR_NCCL_LOOK_SOON_NS = 50000, /* for what holds up a request: a launch, or the connecting */
    HR_NCCL_LOOK_NS = 1000000,    /* for failures of what runs on the GPU, which holds up nobody here */
    HR_NCCL_RARE_LOOK_NS = 100000000, /* likewise at most, for the end of what is left of a team */
    HR_NCCL_NAME_BYTES = 64,      /* of a request, in messages */
    HR_NCCL_LAST_BYTES = HR_NCCL_NAME_BYTES + 32,
    /* To connect. NCCL gives up by itself much sooner, but for a network that swallows everything. */
    HR_NCCL_WITHIN_MS = 300000,
};

/* The report of a rank on itself. */
struct hr_nccl_report {
    int32_t is_able;
    int32_t version;
    char uuid[HR_CUDA_UUID_BYTES]; /* of its GPU */
    struct hr_nccl_id id;          /* of the team's root: where the ranks meet */
    char lack[HR_NCCL_TEXT_BYTES]; /* why it is not able */
};

enum hr_nccl_phase { HR_NCCL_ORDERING, HR_NCCL_WAITING, HR_NCCL_HELD, HR_NCCL_OUT };

/*
 * A batch on its way to the stream, as a backend whose work it is; see nccl_turn.c. The batch and its arrays are the
 * lane's, and stay until it is over.
 */
struct hr_nccl_turn {
    struct hr_backend base; /* first */
    struct hr_engine *engine;
    const struct hr_lane *lane; /* NULL: no batch is on its way */
    enum hr_nccl_phase phase;
    struct hr_request *const *requests;
    size_t count;
    size_t awaited; /* HELD: requests for whose marks the stream waits already */
    struct hr_work work;
    int64_t number;          /* its place in the order; ORDERING: what this rank proposes, which it is at least */
    int64_t agreed;          /* the result of all proposals */
    struct hr_operand operand;
    size_t row_bytes;
};

/* Of a team. */
struct hr_nccl_team {
    /* written under the lock of submission */
    _Atomic int stage;
    _Atomic int awaited; /* requests for NCCL whose values are on their way to the host, since it was refused */
    _Atomic int has_values; /* they have come, and the driver has not seen it */
    /* of the driver */
    struct hr_request *unstaged; /* the next one to be staged that was submitted for NCCL; NULL: there is none */
    struct hr_nccl_report *reports; /* TELLING: [size] this rank's among zeros, then those of all; until it is over */
    struct hr_operand told; /* these, or a part of them, as what is exchanged */
    size_t told_bytes;
    struct hr_nccl_comm comm;
    struct hr_nccl_backend *backend;
    struct hr_nccl_turn turn;
    int last_op;        /* of the last batch that has begun to go onto the stream: its last request, */
    char last_name[HR_NCCL_NAME_BYTES]; /* and the beginning of that one's name; empty: there has been none */
    int64_t look_ns;    /* when to look again at what runs on the GPU */
    int has_moved;      /* a look during a wait has changed the communicator */
    int holds_record;   /* one in the team's log waits in front of its batch */
    int64_t tell_ns;    /* BROKEN: when the group is told; 0: not known yet */
    int is_told;        /* the group has been told that it is BROKEN */
    /* of those whose teams are gone, and which are not at their end yet */
    struct hr_nccl_team *next;
    int64_t gone_ns;   /* since when */
    int64_t report_ns; /* when it is to be told of that it has not ended; 0: never */
    char name[HR_TEAM_NAME_BYTES]; /* the team's */
};

struct hr_by_nccl {
    /* written under staging_lock */
    struct hr_nccl nccl;
    struct hr_nccl_report able; /* the beginning of a report */
    struct hr_device *gpu;
    _Atomic int device; /* its number; -1: not known yet */
    /* of the driver */
    void *stream; /* of all communicators; NULL: there has been none */
    struct hr_backlog backlog; /* of that stream */
    int64_t clock; /* no batch has a higher number here */
    int is_stranded; /* MPI may touch what a turn has exchanged */
    struct hr_nccl_team *ending;
    _Atomic int is_busy; /* something that was launched may still run, or a communicator has not come to its end */
    struct hr_nccl_team teams[HR_TEAMS_MAX]; /* by number */
};

/* NULL: nobody has called horo_use_nccl. */
static inline struct hr_nccl_team *hr_nccl_team_of(const struct hr_engine *engine, const struct hr_lane *lane) {
    struct hr_by_nccl *by = atomic_load(&engine->by_nccl);
    return by == NULL ? NULL : &by->teams[lane->team->number];
}

/* Whether it is known that the team's ranks do such requests for NCCL in host memory. */
static inline int hr_nccl_is_refused(const struct hr_nccl_team *team) {
    return atomic_load(&team->stage) == HR_BY_NCCL_REFUSED;
}

/* nccl_setup.c: what all ranks together can, by what each has told; empty: all are able. */
void hr_nccl_judge(const struct hr_nccl_report *reports, const struct hr_team *ranks, char *text, size_t text_bytes);
/* nccl_gone.c: looks at a communicator that no launch has, of which during a launch its task does: 1: it has moved. */
int hr_nccl_look(struct hr_nccl_team *team);
/* It is BROKEN: the group is told when it is time, and 1. `of`: the process set; empty for the world. */
int hr_nccl_turn_broken(struct hr_engine *engine, struct hr_nccl_team *team, const char *of);
/* Goes on with those of teams that are gone: 1 if one has moved. And whether one is to be told of. */
int hr_nccl_turn_gone(struct hr_engine *engine, struct hr_by_nccl *by);
int hr_nccl_is_gone_late(const struct hr_nccl_team *team);
/* Gives the time between two looks at one, which grows with what it has taken already: nobody here waits for it. */
int64_t hr_nccl_gone_within_ns(const struct hr_nccl_team *team, int64_t now_ns);
/* The last operation that was begun, as "allreduce 'x'". Returns text, which has HR_NCCL_LAST_BYTES. */
char *hr_nccl_name_last(const struct hr_nccl_team *team, char *text);
/* The driver: ends the group if values that are awaited never come. */
void hr_nccl_check_values(struct hr_engine *engine, const struct hr_lane *lane);
/*
 * The driver: whether the next one can be staged that was submitted for NCCL; stages all that can. They can when their
 * marks have been reached, since copies wait for the bus alone then, and not all at once. Behind other marks, hundreds
 * of copies would fill their stream while the program's stands still, and the driver would have to wait for that.
 */
int hr_nccl_may_stage(const struct hr_nccl_team *team);
void hr_nccl_stage(struct hr_engine *engine, const struct hr_lane *lane);


#endif
