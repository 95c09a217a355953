/*
 * Broadcast: the root copies segments into its slot, the ranks of its host copy them out. Between hosts each owner passes its share of a
 * segment on, from the root's slot on the root's host, and down a tree (small) or a chain (large) of hosts.
 */
#include "collective/collective.h"
#include "collective/journey.h"
#include "collective/segment.h"

enum {
    TREE_BYTES = 1 << 18, /* up to here a binomial tree: few hops; above a chain: each link carries the data once */
};

struct call {
    struct hr_group *group;
    const struct hr_fused *fused;
    int root_rank;
    int root_host;
    int root_local; /* local index of the root on its host; only used there */
    int owners;
    enum hr_store store;
};

static int on_root_host(const struct call *call) {
    return call->group->host == call->root_host;
}

/* Where share `owner` of the segment lies on this host. */
static char *share_data(const struct call *call, int owner, unsigned parity, size_t offset) {
    const int holder = on_root_host(call) ? call->root_local : owner;
    return hr_arena_slot(&call->group->arena, holder, parity) + offset;
}

static int pass_on(const struct call *call, struct hr_range segment, unsigned parity) {
    struct hr_group *group = call->group;
    if (group->local_rank >= call->owners) {
        return HORO_OK;
    }
    const struct hr_range share = hr_share(segment.bytes, group->local_rank, call->owners);
    const struct hr_cross_call cross_call = {
        .transport = group->transport,
        .host = group->host,
        .host_count = group->host_count,
        .data = share_data(call, group->local_rank, parity, share.offset),
        .count = share.bytes,
        .dtype = HORO_UINT8,
        .root_host = call->root_host,
        .piece_bytes = HR_CROSS_PIECE_BYTES,
    };
    struct hr_cross cross;
    const struct hr_cross_ops *ops = call->fused->bytes <= TREE_BYTES ? &hr_cross_tree : &hr_cross_chain;
    HR_TRY(ops->begin(&cross, &cross_call));
    return hr_cross_run(group, &cross);
}

static void copy_out(const struct call *call, struct hr_range segment, unsigned parity) {
    for (int owner = 0; owner < call->owners; owner++) {
        const struct hr_range share = hr_share(segment.bytes, owner, call->owners);
        hr_fused_unpack(call->fused, segment.offset + share.offset, share.bytes,
                        share_data(call, owner, parity, share.offset), call->group->kernel);
    }
}

static int run_segment(const struct call *call, size_t k) {
    struct hr_group *group = call->group;
    const struct hr_range segment = hr_segment(group, call->fused->bytes, k);
    const unsigned parity = (unsigned)(group->segment++ & 1);
    const int is_root = group->rank == call->root_rank;
    HR_TRY(hr_group_await(group, HR_PHASE_DRAINED, parity)); /* the slots are free again */
    if (is_root) {
        hr_fused_pack(call->fused, segment.offset, segment.bytes, hr_arena_slot(&group->arena, group->local_rank, parity),
                      group->kernel, 1.0, call->store);
    }
    hr_group_arrive(group, HR_PHASE_FILLED, parity);
    if (group->host_count > 1) {
        if (on_root_host(call)) {
            HR_TRY(hr_group_await(group, HR_PHASE_FILLED, parity));
        }
        HR_TRY(pass_on(call, segment, parity));
        hr_group_arrive(group, HR_PHASE_REDUCED, parity);
    }
    if (!is_root) {
        const enum hr_phase full = on_root_host(call) ? HR_PHASE_FILLED : HR_PHASE_REDUCED;
        HR_TRY(hr_group_await(group, full, parity));
        copy_out(call, segment, parity);
    }
    hr_group_arrive(group, HR_PHASE_DRAINED, parity);
    return HORO_OK;
}

/* The root's own result never travels. */
static void copy_own(const struct call *call) {
    for (size_t i = 0; i < call->fused->count; i++) {
        const struct hr_piece *piece = &call->fused->pieces[i];
        if (piece->output != piece->input) {
            call->group->kernel->copy(piece->output, piece->input, piece->bytes, HR_STORE_ORDINARY);
        }
    }
}

int hr_broadcast(struct hr_group *group, const struct hr_fused *fused, int root_rank) {
    struct call call = {
        .group = group,
        .fused = fused,
        .root_rank = root_rank,
        .root_host = group->host_of_rank[root_rank],
        .owners = group->owner_count,
        .store = hr_store_choose(group, fused->bytes),
    };
    while (group->host == call.root_host && group->rank_of_local[call.root_local] != root_rank) {
        call.root_local++;
    }
    const size_t segments = group->size == 1 ? 0 : hr_segment_count(group, fused->bytes);
    for (size_t k = 0; k < segments; k++) {
        HR_TRY(run_segment(&call, k));
    }
    if (group->rank == root_rank) {
        copy_own(&call);
    }
    return HORO_OK;
}
