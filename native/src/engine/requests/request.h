/* A submitted request. */
#ifndef HR_ENGINE_REQUEST_H
#define HR_ENGINE_REQUEST_H

#include <stdatomic.h>

#include "backend/backend.h"
#include "horo_gpu.h"
#include "wire/wire.h"

struct hr_port;
struct hr_request;

/*
 *     state     | meaning                                        | next, and by whom
 *     ----------+------------------------------------------------+----------------------------------------------------
 *     QUEUED    | in the queue, or behind refusals of its name:  | ANNOUNCED: the driver takes the queue
 *               | no other rank knows of it                      |
 *     STAGING   | its values are on their way from a GPU         | QUEUED: a thread of the GPU's, when they are there
 *     ANNOUNCED | what the driver has taken out of the queue     | its record, or the end of the group, completes it
 *     STANDS_IN | made for one that this rank, which has joined, | its record completes it
 *               | does not submit: known by name, not pending    |
 *
 * All but the first is written with the lock held. It is over when `status` says so, which is written last.
 */
enum hr_request_state { HR_REQUEST_QUEUED, HR_REQUEST_STAGING, HR_REQUEST_ANNOUNCED, HR_REQUEST_STANDS_IN };

/* Of whoever makes a request that is more than the collective. NULL: there is nothing to be done. */
struct hr_hooks {
    /* With the lock held: whether it may be submitted now. HORO_OK, or a status with *error set. */
    hr_status (*check)(const struct hr_request *request, struct hr_error *error);
    /* The driver: announces it, as any other if NULL. HORO_OK or a status. */
    int (*announce)(struct hr_request *request);
    /* With the lock held: it is over with this status, which nobody has seen yet. */
    void (*ended)(struct hr_request *request, int status);
    /* Without the lock: it goes, and its cargo with it. */
    void (*freed)(void *data);
    /* The same for cargo that its batch, which was cut off, may still work on: see hr_node_bury. NULL: it stays. */
    void (*buried)(void *data);
};

/* The luggage of a request: a group that is not there yet, a staging, a mark, the memory of a stand-in. */
struct hr_cargo {
    const struct hr_hooks *hooks; /* NULL: there is none */
    void *data;
};

void hr_cargo_drop(const struct hr_cargo *cargo);

/* One allocation, plus the results of an allgather or alltoall and the text of an error. */
struct hr_request {
    struct hr_request *next;          /* in the submit queue */
    struct hr_request *older, *newer; /* among those not done */
    struct hr_port *port;             /* as long as it is not done; NULL: it is between two ranks alone (pairs.h) */
    struct hr_cargo cargo;
    int64_t handle; /* 0 from its release on */
    /* under the lock: the table of handles, and each call that waits for it. The last one frees it, without the lock */
    int owners;
    enum hr_request_state state;
    _Atomic int status; /* HORO_IN_PROGRESS until done */
    char *error_text;
    horo_request call; /* its pointers point into this allocation, but for those of tensors that hold data */
    struct hr_request *next_call; /* of an ordered one: the next ordered call of its port that is not done */
    uint64_t name_hash;
    size_t name_bytes;
    int64_t data_bytes; /* of all its tensors here */
    int64_t submit_ns;
    uint8_t *bytes; /* canonical form on the wire; points into this allocation */
    size_t byte_count;
    struct hr_wire_rows rows;     /* allgather, alltoall: what this rank tells; in this allocation, too */
    uint32_t announced_id;        /* driver: announced by this id, 0: in full */
    struct hr_gathered *gathered; /* allgather, alltoall: [tensor_count] */
    int64_t *splits;              /* alltoall: those of all ranks, as in struct hr_work */
    int refused;                  /* a refusal, see submit.c: the status; its reason is error_text */
    struct hr_request *behind;    /* of a refusal: the next call of its name, which is queued when this one is done */
    int is_behind;                /* under the lock: it is such a call */
    int misfit;                   /* 1 + the first tensor whose output is not as long as its result; 0: there is none */
    int answer; /* once done: see horo_answer; -1: none */
    int team_size, team_rank; /* of its own team, and of this rank there */
    int is_returned;          /* under the lock of stagings: results are on their way to the GPU */
};

/*
 * HORO_OK with a new request, or a status with *error set. Checks everything a caller can get wrong, but for team and
 * root.
 */
hr_status hr_request_create(const horo_request *call, struct hr_request **request, struct hr_error *error);
void hr_request_destroy(struct hr_request *request);
/* Gives up the results of a request that is to get them anew. */
void hr_request_drop_results(struct hr_request *request);
/*
 * One that has ended can do for another call (the spare of struct hr_requests). is_like: the call differs from its own
 * by the memory of the tensor alone. renew: it is that call's, as if made anew.
 */
int hr_request_is_like(const struct hr_request *request, const horo_request *call);
void hr_request_renew(struct hr_request *request, const horo_request *call);
/* Whether it is known by its number, not by a name. */
int hr_request_is_call(const struct hr_request *request);
/* Before it is announced: that it is done on the GPU. */
void hr_request_set_on_gpu(struct hr_request *request);

#endif
