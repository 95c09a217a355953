/*
 * Broadcasts. Members are counted from the root: member v is host (root + v) mod h.
 *
 * Binomial tree (Thakur et al. 2005, see doubling.c): v hears from v without its lowest bit and passes on to v + m for
 * every power of two m below that bit, largest first, since the largest has most members behind it. ceil(log2 h) steps;
 * the root sends all bytes as many times.
 *
 * Chain: v hears from v - 1 and passes on to v + 1. h - 1 hops; all bytes cross each link once, and with pieces in
 * flight on all links the time for large data is that of one link.
 */
#include "cross/pipeline.h"

static int host_at(const struct hr_cross_call *call, int v) {
    return (call->root_host + v) % call->host_count;
}

static int place_of(const struct hr_cross_call *call) {
    return (call->host - call->root_host + call->host_count) % call->host_count;
}

/* The distance to child number `index`, 0 if there are fewer. */
static int child_distance(int v, int host_count, int index) {
    int distance = 1;
    while ((v & distance) == 0 && distance < host_count) {
        distance *= 2;
    }
    do { /* from below the lowest bit of v on, or for the root from the largest power of two below h */
        distance /= 2;
    } while (distance > 0 && v + distance >= host_count);
    return distance >> index;
}

static void tree_step(const struct hr_cross *state, int index, struct hr_step *step) {
    const struct hr_cross_call *call = &state->call;
    const int v = place_of(call);
    if (v != 0 && index == 0) {
        step->recv_peer = host_at(call, v & (v - 1));
    } else {
        const int child = v + child_distance(v, call->host_count, v == 0 ? index : index - 1);
        step->send_peer = host_at(call, child);
    }
}

static void chain_step(const struct hr_cross *state, int index, struct hr_step *step) {
    const struct hr_cross_call *call = &state->call;
    const int v = place_of(call);
    if (v != 0 && index == 0) {
        step->recv_peer = host_at(call, v - 1);
    } else {
        step->send_peer = host_at(call, v + 1);
    }
}

static hr_status tree_plan(const struct hr_cross_call *call, struct hr_plan *plan) {
    const int v = place_of(call);
    int children = 0;
    while (child_distance(v, call->host_count, children) > 0) {
        children++;
    }
    plan->step_count = (v != 0) + children;
    plan->part_count = 1;
    return HORO_OK;
}

static hr_status chain_plan(const struct hr_cross_call *call, struct hr_plan *plan) {
    const int v = place_of(call);
    plan->step_count = (v != 0) + (v != call->host_count - 1);
    plan->part_count = 1;
    return HORO_OK;
}

const struct hr_cross_ops hr_cross_tree = {.name = "tree", .plan = tree_plan, .step = tree_step};
const struct hr_cross_ops hr_cross_chain = {.name = "chain", .plan = chain_plan, .step = chain_step};
