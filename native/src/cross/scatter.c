/*
 * Reduce-scatter: each member has a part of its own length, and gets its part of the sum.
 *
 * Ring: the first half of the ring allreduce (ring.c), one member further round. In step t a member sends what it has
 * of the part of the member t + 1 places behind it, and adds its own values to the part that comes. h - 1 steps, and
 * every link carries each part but that of the member that it leaves, once.
 *
 * Part i is summed in the order i+1, i+2, ... i+h (mod h).
 */
#include "cross/pipeline.h"

static void ring_step(const struct hr_cross *state, int index, struct hr_step *step) {
    const int h = state->call.host_count;
    const int host = state->call.host;
    step->send_peer = (host + 1) % h;
    step->recv_peer = (host + h - 1) % h;
    step->send_part = (size_t)((host - 1 - index + h) % h);
    step->recv_part = (size_t)((host - 2 - index + 2 * h) % h);
    step->arrival = HR_ARRIVAL_IS_LEFT;
}

static hr_status ring_plan(const struct hr_cross_call *call, struct hr_plan *plan) {
    plan->step_count = call->host_count - 1;
    plan->part_count = (size_t)call->host_count;
    return call->parts != NULL ? HORO_OK : HORO_ERR_INTERNAL;
}

const struct hr_cross_ops hr_cross_scatter_ring = {
    .name = "scatter ring", .scratch_bytes = hr_pipeline_scratch_bytes, .plan = ring_plan, .step = ring_step};
