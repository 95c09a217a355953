/*
 * Ring allreduce: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J.
 * Parallel Distrib. Comput. 69 (2009), doi:10.1016/j.jpdc.2008.09.002.
 *
 * The data is cut into h parts. In the first h-1 steps part i travels once round the ring from member i on and each
 * member adds its own values; in the other h-1 steps the finished parts travel round. Every member sends and receives
 * 2(h-1)/h of the bytes, the least that is possible, in 2(h-1) steps.
 *
 * Part i is summed in the order i, i+1, ... i+h-1 (mod h), at one member only; so all hold the same bits.
 */
#include "cross/pipeline.h"

static void ring_step(const struct hr_cross *state, int index, struct hr_step *step) {
    const int h = state->call.host_count;
    const int host = state->call.host;
    const int reducing = index < h - 1;
    /*
     * The part that is sent goes down by one each step; gathering begins with the part that this member has finished.
     */
    const int sent = reducing ? host - index : host + 1 - (index - (h - 1));
    step->send_peer = (host + 1) % h;
    step->recv_peer = (host + h - 1) % h;
    step->send_part = (size_t)((sent + h) % h);
    step->recv_part = (size_t)((sent - 1 + h) % h);
    step->arrival = reducing ? HR_ARRIVAL_IS_LEFT : HR_ARRIVAL_REPLACES;
}

static size_t ring_scratch_bytes(int host_count, size_t block_bytes, size_t bytes, size_t piece_bytes) {
    /* A part is at most one block longer than the mean. */
    return hr_pipeline_scratch_bytes(host_count, block_bytes, bytes / (size_t)host_count + block_bytes, piece_bytes);
}

static hr_status ring_plan(const struct hr_cross_call *call, struct hr_plan *plan) {
    plan->step_count = 2 * (call->host_count - 1);
    plan->part_count = (size_t)call->host_count;
    /* Gathering step t receives the part that reducing step t sent. */
    plan->reuse_distance = call->host_count - 1;
    return HORO_OK;
}

const struct hr_cross_ops hr_cross_ring = {
    .name = "ring", .scratch_bytes = ring_scratch_bytes, .plan = ring_plan, .step = ring_step};
