/*
 * Recursive doubling: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH",
 * Int. J. High Perform. Comput. Appl. 19 (2005), doi:10.1177/1094342005051521.
 *
 * With h = 2^k + extra members, the first 2 * extra fold in pairs: the even one hands its data to the odd one, sits out, and
 * gets the result at the end. The 2^k others exchange everything with the partner at distance 1, 2, 4 ... and reduce: k steps
 * (+2), each of all bytes.
 *
 * Both partners put the values of the lower members to the left, so they compute the same bits: after each step all members
 * of a group hold the same.
 */
#include "cross/pipeline.h"

/* My place among the members that exchange. */
struct role {
    int extra;   /* members that sit out */
    int rounds;  /* k */
    int folded;  /* I am one of a pair */
    int sits_out;
    int number;  /* 0 .. 2^k - 1, in member order */
};

static struct role role_of(int host, int host_count) {
    struct role role = {0};
    while (2 << role.rounds <= host_count) {
        role.rounds++;
    }
    role.extra = host_count - (1 << role.rounds);
    role.folded = host < 2 * role.extra;
    role.sits_out = role.folded && host % 2 == 0;
    role.number = role.folded ? host / 2 : host - role.extra;
    return role;
}

static void doubling_step(const struct hr_cross *state, int index, struct hr_step *step) {
    const int host = state->call.host;
    const struct role role = role_of(host, state->call.host_count);
    const int round = index - role.folded;
    if (role.sits_out) {
        step->send_peer = index == 0 ? host + 1 : -1;
        step->recv_peer = index == 0 ? -1 : host + 1;
    } else if (round < 0) {
        step->recv_peer = host - 1;
        step->arrival = HR_ARRIVAL_IS_LEFT;
    } else if (round == role.rounds) {
        step->send_peer = host - 1;
    } else {
        const int number = role.number ^ (1 << round);
        const int partner = number < role.extra ? 2 * number + 1 : number + role.extra;
        step->send_peer = partner;
        step->recv_peer = partner;
        step->arrival = partner < host ? HR_ARRIVAL_IS_LEFT : HR_ARRIVAL_IS_RIGHT;
    }
}

static size_t doubling_scratch_bytes(int host_count, size_t block_bytes, size_t bytes, size_t piece_bytes) {
    (void)host_count;
    return hr_pipeline_scratch_bytes(block_bytes, bytes, piece_bytes);
}

static void doubling_plan(const struct hr_cross_call *call, struct hr_plan *plan) {
    const struct role role = role_of(call->host, call->host_count);
    plan->step_count = role.sits_out ? 2 : role.rounds + 2 * role.folded;
    plan->part_count = 1;
    /* Who sits out gets the result where its own values were. */
    plan->reuse_distance = 1;
    plan->reduces_what_it_sends = 1;
    plan->step = doubling_step;
}

static int doubling_begin(struct hr_cross *state, const struct hr_cross_call *call) {
    return hr_pipeline_begin(state, &hr_cross_doubling, call, doubling_plan);
}

const struct hr_cross_ops hr_cross_doubling = {
    .name = "doubling",
    .scratch_bytes = doubling_scratch_bytes,
    .begin = doubling_begin,
    .progress = hr_pipeline_progress,
};
