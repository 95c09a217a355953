/*
 * Allgathers: each member has a part of its own length, and all of them want all.
 *
 * Ring: in step t a member passes on the part that came in step t - 1, its own first. It sends and receives at once,
 * and every link carries each part but one, however different they are in length. h - 1 hops.
 *
 * Doubling: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby, "Efficient algorithms for all-to-all communications
 * in multiport message-passing systems", IEEE Trans. Parallel Distrib. Syst. 8 (1997), doi:10.1109/71.642949. In round
 * j a member that knows the 2^j parts from its own on gets the 2^j parts behind these from the member 2^j places ahead,
 * the last time as many as are missing: ceil(log2 h) hops, and parts may stay where they are. A step here is one part,
 * so that rounds need not be waited for to their end.
 */
#include "cross/pipeline.h"

static int at(const struct hr_cross *state, int place) {
    const int h = state->call.host_count;
    return (state->call.host + place + h) % h;
}

static void ring_step(const struct hr_cross *state, int index, struct hr_step *step) {
    step->send_peer = at(state, 1);
    step->recv_peer = at(state, -1);
    step->send_part = (size_t)at(state, -index);
    step->recv_part = (size_t)at(state, -index - 1);
}

/* Step `index` brings the part index + 1 places ahead. */
static void doubling_step(const struct hr_cross *state, int index, struct hr_step *step) {
    int known = 1;
    while (2 * known <= index + 1) {
        known *= 2;
    }
    step->send_peer = at(state, -known);
    step->recv_peer = at(state, known);
    step->send_part = (size_t)at(state, index + 1 - known);
    step->recv_part = (size_t)at(state, index + 1);
    step->after = index - known;
}

static hr_status gather_plan(const struct hr_cross_call *call, struct hr_plan *plan) {
    plan->step_count = call->host_count - 1;
    plan->part_count = (size_t)call->host_count;
    return hr_cross_has_byte_parts(call) ? HORO_OK : HORO_ERR_INTERNAL;
}

const struct hr_cross_ops hr_cross_gather_ring = {.name = "gather ring", .plan = gather_plan, .step = ring_step};
const struct hr_cross_ops hr_cross_gather_doubling = {
    .name = "gather doubling", .plan = gather_plan, .step = doubling_step};
