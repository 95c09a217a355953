/*
 * Requests with tensors on GPUs that NCCL does, of the world (docs/adr/0044-nccl-does-what-all-ranks-agree-on.md).
 *
 *     stage      | what has happened                            | requests that NCCL can do
 *     -----------+----------------------------------------------+----------------------------------------------------
 *     ASKED      | horo_use_nccl                                | the first begins the exchange
 *     GATHERING  | this rank tells the others what it has       | are held: not announced
 *     CONNECTING | all ranks can, NCCL connects them            | are held
 *     READY      | this rank is connected                       | are announced as NCCL's
 *     REFUSED    | not all ranks can                            | are staged
 *
 * Ranks come to READY or REFUSED at different times, but all to the same one: what they are told is the same. A request
 * that all have announced as NCCL's is one that all can do.
 */
#ifndef HR_ENGINE_BY_NCCL_H
#define HR_ENGINE_BY_NCCL_H

#include "backend/nccl_backend.h"
#include "device/room.h"
#include "engine/engine.h"

enum hr_by_nccl_stage {
    HR_BY_NCCL_ASKED,
    HR_BY_NCCL_GATHERING,
    HR_BY_NCCL_CONNECTING,
    HR_BY_NCCL_READY,
    HR_BY_NCCL_REFUSED,
};

enum { HR_NCCL_TEXT_BYTES = 96 };

/* What a rank tells of itself: the rows of the exchange. */
struct hr_nccl_report {
    int32_t is_able;
    int32_t version;
    char uuid[HR_CUDA_UUID_BYTES]; /* of its GPU */
    struct hr_nccl_id id;          /* of rank 0: where the ranks meet */
    char lack[HR_NCCL_TEXT_BYTES]; /* why it is not able */
};

struct hr_by_nccl {
    /* written before other threads see it */
    struct hr_nccl nccl;
    struct hr_nccl_report mine;
    /* written under the lock of submission */
    _Atomic int stage;
    int until_join;  /* REFUSED only until all ranks have joined: one had, when the others were asked */
    _Atomic int device; /* the number of this rank's GPU; -1: not known yet */
    const struct hr_request *exchange;
    struct hr_request *held_first, **held_last;
    _Atomic int held;
    /* of the driver */
    struct hr_nccl_comm comm;
    struct hr_backend *backend;
    struct hr_room *room; /* of the batch that is begun */
    int has_moved;      /* a look during a wait has changed the communicator */
    int64_t connect_ns; /* CONNECTING: when it has taken too long */
    int64_t tell_ns;    /* BROKEN: when the group is told; 0: not known yet */
    int is_told;        /* the group has been told that it is BROKEN */
    _Atomic int is_busy; /* something that was launched may still run */
};

/* nccl_setup.c: what all ranks together can, by what each has told; empty: all are able. `rows`: of each rank. */
void hr_nccl_judge(const struct hr_nccl_report *reports, const int64_t *rows, int size, int *has_joined, char *text,
                   size_t text_bytes);
/* Before anything is submitted. HORO_OK, or a status with *error set. Without the lock. */
int hr_nccl_begin_setup(struct hr_engine *engine, int device, struct hr_error *error);
/* Driver: goes on with it. 1 if something moved, else 0. */
int hr_nccl_turn_setup(struct hr_engine *engine, struct hr_by_nccl *by);
/* Driver: NCCL has failed on this rank; the group ends, unless somebody tells of the cause in a moment. */
void hr_nccl_break(struct hr_by_nccl *by, const struct hr_error *error);

#endif
