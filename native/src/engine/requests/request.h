/* A submitted request. */
#ifndef HR_ENGINE_REQUEST_H
#define HR_ENGINE_REQUEST_H

#include <stdatomic.h>
#include <string.h>

#include "backend/backend.h"
#include "horo_gpu.h"
#include "wire/wire.h"

/* Of a name in a team. Never 0, which stands for all names in a report. */
static inline uint64_t hr_request_pending_hash(uint64_t name_hash, int32_t team) {
    const uint64_t hash = name_hash ^ ((uint64_t)team << 32 | (uint64_t)team);
    return hash + (hash == 0);
}

struct hr_lane;
struct hr_staging;
struct hr_mark;

/* One allocation, plus the results of an allgather or alltoall and the text of an error. */
struct hr_request {
    struct hr_request *next;          /* in the submit queue */
    struct hr_request *older, *newer; /* among those not done */
    struct hr_lane *lane;             /* of its team; as long as it is not done */
    int64_t handle; /* 0 from its release on */
    /* under the lock: the table of handles, and each call that waits for it. The last one frees it, without the lock */
    int owners;
    _Atomic int status; /* HORO_IN_PROGRESS until done */
    char *error_text;
    horo_request call; /* its pointers point into this allocation, but for those of tensors that hold data */
    uint64_t name_hash;
    uint64_t pending_hash; /* of name and team */
    size_t name_bytes;
    int64_t data_bytes; /* of all its tensors here */
    int64_t submit_ns;
    uint8_t *bytes; /* canonical form on the wire; points into this allocation */
    size_t byte_count;
    struct hr_wire_rows rows;     /* allgather, alltoall: what this rank tells; in this allocation, too */
    uint32_t announced_id;        /* driver: announced by this id, 0: in full */
    int is_announced;             /* driver: it has left the queue */
    struct hr_gathered *gathered; /* allgather, alltoall: [tensor_count] */
    int64_t *splits;              /* alltoall: those of all ranks, as in struct hr_work */
    int refused;                  /* a refusal, see submit.c: the status; its reason is error_text */
    struct hr_request *behind;    /* of a refusal: the next call of its name, which is queued when this one is done */
    int is_behind;                /* under the lock: it is such a call */
    int misfit;                   /* 1 + the first tensor whose output is not as long as its result; 0: there is none */
    int is_stand_in;              /* for one of this rank, which has joined */
    void *stand_in;               /* of such a one: the memory of its tensors in the host; NULL: there is none */
    int joined_last;              /* join: the rank that joined last, once done */
    struct hr_lane *new_lane;     /* add team: this rank's part in it; NULL: it has none, or the engine has taken it */
    int team_added;               /* add team: its id, once done; else -1 */
    int team_size, team_rank;     /* of its own team, and of this rank there */
    int is_queued;                /* under the lock: it has been in the queue, or is to get there when is_behind ends */
    int is_returned;              /* under the lock: results are on their way to the GPU */
    struct hr_staging *staging;   /* of tensors on a GPU; NULL: they are in host memory, or stay on the GPU */
    /* it is done on the GPU: behind the caller's work when it was submitted, and behind its results once it is done */
    struct hr_mark *mark;
};

/*
 * HORO_OK with a new request, or a status with *error set. Checks everything a caller can get wrong, but for team and
 * root.
 */
int hr_request_create(const horo_request *call, struct hr_request **request, struct hr_error *error);
void hr_request_destroy(struct hr_request *request);
/* Before it is announced: that it is done on the GPU. */
void hr_request_set_on_gpu(struct hr_request *request);
/* Of a refusal; empty otherwise. */
static inline struct hr_wire_text hr_request_reason(const struct hr_request *request) {
    return request->refused == 0 ? (struct hr_wire_text){NULL, 0}
                                 : (struct hr_wire_text){request->error_text, strlen(request->error_text)};
}
static inline int hr_request_is_on_gpu(const struct hr_request *request) {
    return (request->call.flags & HORO_SUBMIT_ON_GPU) != 0;
}

/*
 * complete.c, with the lock held: ends the refusals of the lane behind which no call of this rank stands, only those
 * behind others or all. The last one goes first, so that none gets into the queue.
 */
void hr_engine_drop_refusals(const struct hr_lane *lane, int only_behind);

#endif
