/*
 * Recursive doubling: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in
 * MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), doi:10.1177/1094342005051521.
 *
 * With h = 2^k + extra members, the last ones fold: member 2^k + i hands its data to member i, sits out, and gets the
 * result at the end. The 2^k others exchange everything with the partner at distance 1, 2, 4 ... and reduce: k steps
 * (+2), each of all bytes. (The paper folds neighbours. Like this every distance is a power of two, as in the other
 * algorithms, so few links are enough: see node/linked.h.)
 *
 * Both partners put the values of the lower member to the left, so they compute the same bits: after each step all
 * members of a group hold the same.
 */
#include "cross/pipeline.h"

/* My place among the members that exchange. */
struct role {
    int rounds;   /* k */
    int sits_out;
    int partner;  /* with whom I fold; -1: nobody */
};

static struct role role_of(int host, int host_count) {
    struct role role = {.partner = -1};
    while (2 << role.rounds <= host_count) {
        role.rounds++;
    }
    const int exchanging = 1 << role.rounds;
    role.sits_out = host >= exchanging;
    if (role.sits_out) {
        role.partner = host - exchanging;
    } else if (host + exchanging < host_count) {
        role.partner = host + exchanging;
    }
    return role;
}

static void doubling_step(const struct hr_cross *state, int index, struct hr_step *step) {
    const int host = state->call.host;
    const struct role role = role_of(host, state->call.host_count);
    const int round = index - (role.partner >= 0);
    if (role.sits_out) {
        step->send_peer = index == 0 ? role.partner : -1;
        step->recv_peer = index == 0 ? -1 : role.partner;
    } else if (round < 0) {
        step->recv_peer = role.partner;
        step->arrival = HR_ARRIVAL_IS_RIGHT;
    } else if (round == role.rounds) {
        step->send_peer = role.partner;
    } else {
        const int partner = host ^ (1 << round);
        step->send_peer = partner;
        step->recv_peer = partner;
        step->arrival = partner < host ? HR_ARRIVAL_IS_LEFT : HR_ARRIVAL_IS_RIGHT;
    }
}

static hr_status doubling_plan(const struct hr_cross_call *call, struct hr_plan *plan) {
    const struct role role = role_of(call->host, call->host_count);
    plan->step_count = role.sits_out ? 2 : role.rounds + 2 * (role.partner >= 0);
    plan->part_count = 1;
    /* a host that sits out gets the result where its own values were */
    plan->reuse_distance = 1;
    plan->reduces_what_it_sends = 1;
    return HORO_OK;
}

const struct hr_cross_ops hr_cross_doubling = {
    .name = "doubling", .scratch_bytes = hr_pipeline_scratch_bytes, .plan = doubling_plan, .step = doubling_step};
