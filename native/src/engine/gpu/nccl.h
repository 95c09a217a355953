/* Between nccl.c, which has the communicators, and nccl_order.c, which puts batches onto the stream. */
#ifndef HR_ENGINE_NCCL_H
#define HR_ENGINE_NCCL_H

#include "backend/nccl.h"
#include "engine/gpu/gpu.h"

enum {
    HR_NCCL_LOOK_SOON_NS = 50000, /* for what holds up a request */
    HR_NCCL_LOOK_NS = 1000000,    /* for failures of what runs on the GPU, which holds up nobody here */
    HR_NCCL_BATCHES_MAX = 64,     /* on the stream and not known to have run */
};

/* See nccl_order.c. NONE: no batch is on its way. */
enum hr_nccl_phase { HR_NCCL_NO_BATCH, HR_NCCL_ORDERING, HR_NCCL_WAITING, HR_NCCL_HELD, HR_NCCL_OUT };

/* A batch on its way to the stream. It and its arrays are the lane's, and stay until it is over. */
struct hr_nccl_batch {
    enum hr_nccl_phase phase;
    /* the cargo of each is a mark: behind the caller's work, and once it is done, behind its results */
    struct hr_request *const *requests;
    size_t count;
    struct hr_work work;
    int weight;     /* OUT: what it puts on the stream */
    int64_t number; /* its place in the order; ORDERING: what this rank proposes, which it is at least */
    int64_t agreed; /* the result of all proposals */
    struct hr_operand operand;
};

/* Of a team whose ranks NCCL connects or has connected, also when the team is gone, until all has come to its end. */
struct hr_gpu_team {
    struct hr_backend base; /* first */
    struct hr_engine *engine;
    struct hr_lane *lane; /* NULL: not attached yet, or the team is gone */
    struct hr_gpu_team *next;
    struct hr_nccl_comm comm;
    struct hr_nccl_batch batch;
    char name[HR_TEAM_NAME_BYTES]; /* for messages; empty: the world */
    int has_moved;   /* a batch has changed the communicator */
    int is_told;     /* the group has been told that it is BROKEN */
    int64_t look_ns; /* when to look again at what runs on the GPU */
    int64_t tell_ns; /* BROKEN: when the group is told; 0: not known yet */
};

/* The batches that are on the stream, from the oldest one on: the mark behind each, and what it has put there. */
struct hr_nccl_in_flight {
    struct hr_mark *marks[HR_NCCL_BATCHES_MAX];
    int weights[HR_NCCL_BATCHES_MAX];
    unsigned first, count;
    int weight;
};

struct hr_on_gpu {
    struct hr_nccl nccl;
    struct hr_device *device; /* of all communicators, as is the stream */
    void *stream;
    struct hr_gpu_team *connecting; /* a caller's: for the world, or for the team that is added next */
    struct hr_gpu_team *_Atomic teams; /* attached; taken from there by the driver alone */
    /* of the driver */
    struct hr_nccl_in_flight in_flight;
    int64_t clock; /* no batch has a higher number here */
    _Atomic int is_busy; /* something that was launched may still run, or a communicator has not come to its end */
};

/* nccl.c: looks after it, once something runs. */
extern const struct hr_part_ops hr_part_gpu;

/* nccl_order.c */
extern const struct hr_backend_ops hr_nccl_ops;
/* The driver: something may run on the GPU from now on, so the part looks after it. */
void hr_gpu_become_busy(struct hr_engine *engine);
void hr_nccl_drop_marks(struct hr_nccl_in_flight *in_flight);

#endif
