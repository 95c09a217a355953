/*
 * Broadcast between hosts: the root copies segments into its slot, the ranks of its host copy them out. Each owner
 * passes its share of a segment on, from the root's slot on the root's host, and down a tree (small) or a chain (large)
 * of hosts.
 */
#include "collective/collective.h"

static int on_root_host(const struct hr_broadcast *run) {
    return run->segments.team->host == run->root_host;
}

static struct hr_range segment_of(const struct hr_broadcast *run, size_t k) {
    return hr_segment(run->segments.team->tuning.segment, run->fused.bytes, k);
}

/* The place of share `owner` of segment k on this host; `offset` is the share's in the segment. */
static char *share_data(const struct hr_broadcast *run, int owner, size_t k, size_t offset) {
    const int holder = on_root_host(run) ? run->root_local : owner;
    return hr_segments_slot(&run->segments, holder, k) + offset;
}

static void fill(struct hr_segments *segments, size_t k) {
    const struct hr_broadcast *run = (struct hr_broadcast *)segments;
    struct hr_team *team = segments->team;
    if (team->rank == run->root_rank) {
        const struct hr_range segment = segment_of(run, k);
        hr_fused_pack(&run->fused, segment.offset, segment.bytes, hr_segments_slot(segments, team->local_rank, k),
                      team->node->kernel, 1.0, HR_STORE_ORDINARY);
    }
}

static void begin(struct hr_segments *segments, size_t k, struct hr_cross *cross) {
    const struct hr_broadcast *run = (struct hr_broadcast *)segments;
    const struct hr_team *team = segments->team;
    const struct hr_range share = hr_share(segment_of(run, k).bytes, team->local_rank, run->owners);
    struct hr_cross_call call = hr_cross_call_of(team, run->fused.codec);
    call.data = share_data(run, team->local_rank, k, share.offset);
    call.count = share.bytes;
    call.root_host = run->root_host;
    const struct hr_cross_ops *ops = run->fused.bytes <= team->tuning.tree ? &hr_cross_tree : &hr_cross_chain;
    hr_cross_begin(ops, cross, &call);
}

static void drain(struct hr_segments *segments, size_t k) {
    const struct hr_broadcast *run = (struct hr_broadcast *)segments;
    const struct hr_team *team = segments->team;
    const struct hr_range segment = segment_of(run, k);
    for (int owner = 0; owner < run->owners && team->rank != run->root_rank; owner++) {
        const struct hr_range share = hr_share(segment.bytes, owner, run->owners);
        hr_fused_unpack(&run->fused, segment.offset + share.offset, share.bytes,
                        share_data(run, owner, k, share.offset), team->node->kernel, HR_STORE_ORDINARY);
    }
}

static const struct hr_segments_ops broadcast_ops = {.fill = fill, .begin = begin, .drain = drain};

void hr_broadcast_begin(struct hr_broadcast *run, struct hr_team *team, const struct hr_fused *fused, int root_rank) {
    *run = (struct hr_broadcast){
        .segments = {.team = team},
        .fused = *fused,
        .root_rank = root_rank,
        .root_host = team->host_of_rank[root_rank],
        .owners = team->owner_count,
    };
    while (team->host == run->root_host && team->rank_of_local[run->root_local] != root_rank) {
        run->root_local++;
    }
    if (team->rank == root_rank) {
        /* the root's own result never travels */
        hr_fused_unpack(fused, 0, fused->bytes, NULL, team->node->kernel, HR_STORE_ORDINARY);
    }
    run->segments.carries = team->local_rank < run->owners;
    run->segments.begins_alone = !on_root_host(run); /* data that comes there goes into the owners' own slots */
    hr_segments_begin(&run->segments, &broadcast_ops, on_root_host(run) ? HR_PHASE_FILLED : HR_PHASE_REDUCED,
                      hr_divide_up(fused->bytes, team->tuning.segment));
}
