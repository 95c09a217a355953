/*
 * Allreduce over several hosts (two-level form): the owner's share stays in its slot, is reduced with the same owner's share on the
 * other hosts by ring or recursive doubling, and is then gathered from the slots. So a link carries 2(h-1)/h of the data once,
 * whatever the number of ranks per host.
 *
 * A rank that is alone on its host has nobody to share memory with: where a segment lies in one tensor it travels from and to
 * the output itself, and no slot is used. That is nobody else's business: what travels is the same.
 */
#include "collective/two_level.h"

#include "base/cut.h"
#include "collective/collective.h"
#include "collective/journey.h"

enum { DOUBLING_BYTES = 1 << 16 }; /* between hosts: latency counts up to here, bandwidth above */

/* One allreduce. */
struct run {
    struct hr_stages *stages;
    size_t segments;
    size_t scratch_bytes; /* of one that travels */
};

static struct hr_range own_share(const struct hr_stages *call, size_t k) {
    const struct hr_range segment = hr_segment(call->group, call->fused->bytes, k);
    return hr_share(segment.bytes, call->group->local_rank, call->owners);
}

const struct hr_cross_ops *hr_two_level_cross(size_t share_bytes) {
    return share_bytes <= DOUBLING_BYTES ? &hr_cross_doubling : &hr_cross_ring;
}

size_t hr_two_level_scratch_bytes(int host_count, int owners, size_t segment_bytes) {
    const size_t most = hr_share_most(segment_bytes, owners);
    const size_t small_most = most < DOUBLING_BYTES ? most : DOUBLING_BYTES; /* the last segment may have a small share only */
    const size_t small = hr_cross_doubling.scratch_bytes(host_count, small_most, HR_CROSS_PIECE_BYTES);
    const size_t large = hr_two_level_cross(most)->scratch_bytes(host_count, most, HR_CROSS_PIECE_BYTES);
    return hr_round_up(small > large ? small : large, HR_CROSS_ALIGNMENT);
}

/* Room for two of the largest shares, before anything travels: it cannot be moved then. Small data gets one: it is one segment. */
static int reserve_scratch(struct run *run) {
    const struct hr_stages *call = run->stages;
    const size_t segment_bytes = hr_segment(call->group, call->fused->bytes, 0).bytes;
    run->scratch_bytes = hr_two_level_scratch_bytes(call->group->host_count, call->owners, segment_bytes);
    return hr_cross_reserve(call->group, run->segments == 1 ? run->scratch_bytes : HR_TRAVELLING_MAX * run->scratch_bytes);
}

/* The piece of which segment k is a part, if it travels without a slot; else NULL. What is converted needs one. */
static const struct hr_piece *whole_piece(const struct hr_stages *call, size_t k) {
    if (call->group->local_size > 1 || call->fused->wide_dtype != 0 || call->partial_scale != 1.0) {
        return NULL;
    }
    const struct hr_range segment = hr_segment(call->group, call->fused->bytes, k);
    const struct hr_piece *piece = &call->fused->pieces[hr_fused_find(call->fused, segment.offset)];
    return segment.offset + segment.bytes <= piece->offset + piece->bytes ? piece : NULL;
}

/* Where my share of segment k travels from and to. */
static char *travelling(const struct hr_stages *call, size_t k) {
    const struct hr_piece *piece = whole_piece(call, k);
    return piece == NULL ? hr_stages_slot(call, call->group->local_rank, k) + own_share(call, k).offset
                         : piece->output + (hr_segment(call->group, call->fused->bytes, k).offset - piece->offset);
}

static int fill(void *arg, size_t k) {
    struct hr_stages *call = ((struct run *)arg)->stages;
    const struct hr_piece *piece = whole_piece(call, k);
    if (piece == NULL) {
        return hr_stages_fill(call, k);
    }
    if (piece->output != piece->input || call->prescale != 1.0) {
        const struct hr_range segment = hr_segment(call->group, call->fused->bytes, k);
        hr_fused_pack(call->fused, segment.offset, segment.bytes, travelling(call, k), call->group->kernel, call->prescale,
                      HR_STORE_ORDINARY);
    }
    return HORO_OK;
}

static int reduce(void *arg, size_t k) {
    struct hr_stages *call = ((struct run *)arg)->stages;
    return whole_piece(call, k) == NULL ? hr_stages_reduce(call, k) : HORO_OK;
}

static int begin(void *arg, size_t k, struct hr_cross *cross) {
    const struct run *run = arg;
    const struct hr_stages *call = run->stages;
    struct hr_group *group = call->group;
    const struct hr_range share = own_share(call, k);
    const struct hr_cross_call cross_call = {
        .transport = group->transport,
        .host = group->host,
        .host_count = group->host_count,
        .data = travelling(call, k),
        .count = share.bytes / call->element,
        .dtype = call->fused->dtype,
        .reduce_op = call->reduce_op,
        .kernel = group->kernel,
        .piece_bytes = HR_CROSS_PIECE_BYTES,
        .scratch = group->cross_scratch + k % HR_TRAVELLING_MAX * run->scratch_bytes * (run->segments > 1),
    };
    return hr_two_level_cross(share.bytes)->begin(cross, &cross_call);
}

static void finish(void *arg, size_t k) {
    struct hr_stages *call = ((struct run *)arg)->stages;
    if (hr_stages_owns(call) && hr_scale_changes(call->postscale)) {
        char *data = travelling(call, k);
        call->group->kernel->scale(call->fused->dtype, data, data, own_share(call, k).bytes / call->element, call->postscale,
                                   HR_STORE_ORDINARY);
    }
    if (whole_piece(call, k) == NULL) {
        hr_group_arrive(call->group, HR_PHASE_REDUCED, hr_stages_parity(call, k));
    }
}

static int drain(void *arg, size_t k) {
    struct hr_stages *call = ((struct run *)arg)->stages;
    return whole_piece(call, k) == NULL ? hr_stages_drain(call, k) : HORO_OK;
}

static const struct hr_journey_ops journey_ops = {
    .fill = fill, .reduce = reduce, .begin = begin, .finish = finish, .drain = drain};

int hr_two_level(struct hr_stages *call, size_t segments) {
    struct run run = {.stages = call, .segments = segments};
    HR_TRY(reserve_scratch(&run));
    struct hr_journey journey = {
        .group = call->group,
        .ops = &journey_ops,
        .call = &run,
        .segments = segments,
        .first = call->first,
        .carries = hr_stages_owns(call),
    };
    return hr_journey_run(&journey);
}
