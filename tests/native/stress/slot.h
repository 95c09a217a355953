/* An operation as one rank has it under way. */
#ifndef STRESS_SLOT_H
#define STRESS_SLOT_H

#include "rank.h"

struct slot {
    const struct operation *operation;
    size_t number;
    int64_t handle; /* 0: done and released */
    int status;
    int team_number; /* of a team that has been added */
    int dtype;
    horo_tensor tensors[TENSORS_MAX];
    int64_t shapes[TENSORS_MAX][2];
    int64_t splits[RANKS_MAX]; /* alltoall */
    char *memory; /* of all tensors; the owner of the slot frees it */
    char sentence[HORO_MESSAGE_MAX];
};

/* How it is submitted: by horo_run, or for a wait that comes soon, or neither. */
enum haste { NO_HASTE, WAITS_SOON, AT_ONCE };

/* Whether a rank takes part in an operation: it is in the team and has not joined it, and the team is there. */
int slot_is_mine(const struct rank *rank, const struct operation *operation);
/* Joins all teams that this rank joins after a bunch, which is not the last one of the join. */
void slot_join_after(struct rank *rank, size_t bunch);
void slot_begin(struct rank *rank, struct slot *slot, size_t number, enum haste haste);
/* Waits in one of several ways until the operation is over, and releases it. */
void slot_await(struct rank *rank, struct slot *slot, uint32_t way);
/* Of an operation that is over, and well: what came out of it is what must. */
void slot_check(struct rank *rank, struct slot *slot);

#endif
