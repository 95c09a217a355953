/*
 * Allreduce over several hosts (two-level form): the owner's share stays in its slot, is reduced with the same owner's share on the
 * other hosts by ring or recursive doubling, and is then gathered from the slots. So a link carries 2(h-1)/h of the data once,
 * whatever the number of ranks per host, and segment k travels while k + 1 is filled and reduced.
 */
#include "collective/two_level.h"

#include <stdlib.h>

#include "collective/collective.h"

enum {
    DOUBLING_BYTES = 1 << 16,   /* between hosts: latency counts up to here, bandwidth above */
    SCRATCH_ALIGNMENT = 64,
};

static int cross_ready(struct hr_group *group, void *arg) {
    (void)group;
    struct hr_cross *cross = arg;
    return cross->ops->progress(cross) != HORO_IN_PROGRESS;
}

int hr_cross_run(struct hr_group *group, struct hr_cross *cross) {
    const int ended = hr_group_finish(group, cross_ready, cross);
    if (ended != HORO_OK) {
        hr_group_abandon_data(group);
        return ended;
    }
    const int status = cross->ops->progress(cross);
    if (status == HORO_ERR_PEER_LOST) {
        hr_group_suspect_link(group);
        hr_group_abandon_data(group); /* the transport still moves what other peers send */
    }
    return status;
}

static int reserve_scratch(struct hr_group *group, size_t bytes) {
    if (bytes <= group->cross_scratch_bytes) {
        return HORO_OK;
    }
    free(group->cross_scratch);
    group->cross_scratch_bytes = 0;
    group->cross_scratch = aligned_alloc(SCRATCH_ALIGNMENT, (bytes + SCRATCH_ALIGNMENT - 1) & ~(size_t)(SCRATCH_ALIGNMENT - 1));
    if (group->cross_scratch == NULL) {
        return HORO_ERR_RESOURCE;
    }
    group->cross_scratch_bytes = bytes;
    return HORO_OK;
}

static int cross_begin(struct hr_stages *call, struct hr_cross *cross, size_t k) {
    struct hr_group *group = call->group;
    if (!hr_stages_owns(call)) {
        return HORO_OK;
    }
    const struct hr_range segment = hr_segment(group, call->fused->bytes, k);
    const struct hr_range share = hr_share(segment.bytes, group->local_rank, call->owners);
    const struct hr_cross_ops *ops = share.bytes <= DOUBLING_BYTES ? &hr_cross_doubling : &hr_cross_ring;
    HR_TRY(reserve_scratch(group, ops->scratch_bytes(group->host_count, share.bytes, HR_CROSS_PIECE_BYTES)));
    const struct hr_cross_call cross_call = {
        .transport = group->transport,
        .host = group->host,
        .host_count = group->host_count,
        .data = hr_stages_slot(call, group->local_rank, k) + share.offset,
        .count = share.bytes / call->element,
        .dtype = call->fused->dtype,
        .reduce_op = call->reduce_op,
        .piece_bytes = HR_CROSS_PIECE_BYTES,
        .scratch = group->cross_scratch,
    };
    return ops->begin(cross, &cross_call);
}

static int cross_finish(struct hr_stages *call, struct hr_cross *cross, size_t k) {
    struct hr_group *group = call->group;
    if (!hr_stages_owns(call)) {
        return HORO_OK;
    }
    HR_TRY(hr_cross_run(group, cross));
    if (call->postscale != 1.0) {
        const struct hr_range segment = hr_segment(group, call->fused->bytes, k);
        const struct hr_range share = hr_share(segment.bytes, group->local_rank, call->owners);
        char *data = hr_stages_slot(call, group->local_rank, k) + share.offset;
        group->kernel->scale(call->fused->dtype, data, data, share.bytes / call->element, call->postscale,
                             HR_STORE_ORDINARY);
    }
    return HORO_OK;
}

int hr_two_level(struct hr_stages *call, size_t segments) {
    struct hr_cross cross;
    HR_TRY(hr_stages_fill(call, 0));
    HR_TRY(hr_stages_reduce(call, 0));
    HR_TRY(cross_begin(call, &cross, 0));
    for (size_t k = 0; k < segments; k++) {
        if (k + 1 < segments) {
            HR_TRY(hr_stages_fill(call, k + 1));
            HR_TRY(hr_stages_reduce(call, k + 1));
        }
        HR_TRY(cross_finish(call, &cross, k));
        if (k + 1 < segments) {
            HR_TRY(cross_begin(call, &cross, k + 1));
        }
        hr_group_arrive(call->group, HR_PHASE_REDUCED, hr_stages_parity(call, k));
        HR_TRY(hr_stages_drain(call, k));
    }
    return HORO_OK;
}
