/*
 * Allgather over several hosts (two-level form). The part of every rank is cut into `share_count` shares, an equal number for each
 * owner and segment: share j belongs to segment j / owners and lies in the slot of owner j % owners, all parts in order of their hosts
 * one behind the other. So the ranks of a host write what they have into their owners' slots; each owner gathers its slot with its
 * like on the other hosts, host by host a contiguous part; and everybody copies everything out of the slots of its host. The links
 * of all owners carry the same, whoever has how much.
 *
 * Small results travel by doubling, large ones round a ring, where each link carries all but one host's data once, in both directions
 * at once.
 *
 * A rank that is alone on its host needs no slot for a share that is one host's own and lies in one tensor: it travels from and to
 * the result. That is nobody else's business: what travels is the same.
 */
#include "collective/two_level.h"

#include <string.h>

#include "base/cut.h"
#include "collective/collective.h"
#include "collective/journey.h"
#include "collective/pipeline.h"

enum {
    DOUBLING_BYTES = 1 << 20,     /* of the result: latency counts up to here, bandwidth above */
    SPREAD_BYTES = 1 << 13,       /* of the result: up to here one owner carries it all */
    ROUNDING_BYTES = 2 * HR_LINE, /* a share is at most so much longer than the mean */
    LONE_PART_BYTES = 1 << 20,    /* of each rank in a segment that needs no slots: each is a start from nothing for all links */
};

/* One allgather of the parts of some ranks. */
struct run {
    struct hr_group *group;
    const struct hr_fused *by_rank;
    const int *members; /* whose parts, in order of hosts */
    int member_count;
    int owners;
    size_t share_count;
    const struct hr_cross_ops *cross;
    enum hr_store store;
    uint64_t first;
    struct hr_cross_part *parts; /* [HR_TRAVELLING_MAX][host_count] */
};

static unsigned parity(const struct run *run, size_t k) {
    return (unsigned)((run->first + k) & 1);
}

/* Where a share travels from and to without a slot, or NULL. */
static char *direct_place(const struct run *run, int rank, struct hr_range share) {
    const struct hr_group *group = run->group;
    if (group->local_size > 1 || group->host_size[group->host_of_rank[rank]] > 1 || share.bytes == 0) {
        return NULL;
    }
    const struct hr_fused *part = &run->by_rank[rank];
    const struct hr_piece *piece = &part->pieces[hr_fused_find(part, share.offset)];
    const size_t skip = share.offset - piece->offset;
    return skip + share.bytes <= piece->bytes ? piece->output + skip : NULL;
}

/* Goes through what one owner carries in one segment: whose share it is, which bytes of that rank's part, where it lies here. */
struct walk {
    const struct run *run;
    size_t k;
    int owner;
    int next; /* of run->members */
    size_t slot_offset;
    int rank;
    struct hr_range share;
    char *place;
    int is_direct;
};

/* 1, or 0 behind the last one. */
static int walk_on(struct walk *walk) {
    const struct run *run = walk->run;
    if (walk->next == run->member_count) {
        return 0;
    }
    walk->slot_offset += walk->share.bytes;
    walk->rank = run->members[walk->next++];
    const size_t index = walk->k * (size_t)run->owners + (size_t)walk->owner;
    walk->share = hr_lines(run->by_rank[walk->rank].bytes, index, run->share_count);
    char *direct = direct_place(run, walk->rank, walk->share);
    walk->is_direct = direct != NULL;
    walk->place = direct != NULL ? direct : hr_arena_slot(&run->group->arena, walk->owner, parity(run, walk->k)) + walk->slot_offset;
    return 1;
}

static int fill(void *arg, size_t k) {
    const struct run *run = arg;
    struct hr_group *group = run->group;
    for (int owner = 0; owner < run->owners; owner++) {
        struct walk walk = {.run = run, .k = k, .owner = owner};
        while (walk_on(&walk)) {
            if (walk.rank == group->rank) {
                hr_fused_pack(&run->by_rank[walk.rank], walk.share.offset, walk.share.bytes, walk.place, group->kernel, 1.0,
                              run->store);
            }
        }
    }
    hr_group_arrive(group, HR_PHASE_FILLED, parity(run, k));
    return HORO_OK;
}

static int begin(void *arg, size_t k, struct hr_cross *cross) {
    const struct run *run = arg;
    struct hr_group *group = run->group;
    struct hr_cross_part *parts = run->parts + k % HR_TRAVELLING_MAX * (size_t)group->host_count;
    memset(parts, 0, (size_t)group->host_count * sizeof *parts);
    struct walk walk = {.run = run, .k = k, .owner = group->local_rank};
    while (walk_on(&walk)) {
        struct hr_cross_part *part = &parts[group->host_of_rank[walk.rank]];
        part->data = part->bytes == 0 ? walk.place : part->data;
        part->bytes += walk.share.bytes;
    }
    const struct hr_cross_call call = {
        .transport = group->transport,
        .host = group->host,
        .host_count = group->host_count,
        .parts = parts,
        .dtype = HORO_UINT8,
        .piece_bytes = HR_CROSS_PIECE_BYTES,
    };
    return run->cross->begin(cross, &call);
}

static void finish(void *arg, size_t k) {
    const struct run *run = arg;
    hr_group_arrive(run->group, HR_PHASE_REDUCED, parity(run, k));
}

static int drain(void *arg, size_t k) {
    const struct run *run = arg;
    for (int owner = 0; owner < run->owners; owner++) {
        struct walk walk = {.run = run, .k = k, .owner = owner};
        while (walk_on(&walk)) {
            if (!walk.is_direct) {
                hr_fused_unpack(&run->by_rank[walk.rank], walk.share.offset, walk.share.bytes, walk.place, run->group->kernel);
            }
        }
    }
    hr_group_arrive(run->group, HR_PHASE_DRAINED, parity(run, k));
    return HORO_OK;
}

static const struct hr_journey_ops journey_ops = {.fill = fill, .begin = begin, .finish = finish, .drain = drain};

/* How much of all parts one segment takes. */
static size_t segment_bytes(const struct run *run) {
    const struct hr_group *group = run->group;
    int needs_slots = group->size > group->host_count;
    for (int i = 0; i < run->member_count; i++) {
        needs_slots |= run->by_rank[run->members[i]].count > 1;
    }
    return needs_slots ? (group->arena.segment_bytes - (size_t)run->member_count * ROUNDING_BYTES) * (size_t)run->owners
                       : (size_t)run->member_count * LONE_PART_BYTES;
}

/* The parts of `count` ranks from place `first` in the order of hosts on. */
static int gather_members(struct hr_group *group, const struct hr_fused *by_rank, int first, int count) {
    const int *members = group->rank_by_host + first;
    size_t total = 0;
    for (int i = 0; i < count; i++) {
        total += by_rank[members[i]].bytes;
    }
    struct run run = {
        .group = group,
        .by_rank = by_rank,
        .members = members,
        .member_count = count,
        .owners = total <= SPREAD_BYTES ? 1 : group->owner_count,
        .cross = total <= DOUBLING_BYTES ? &hr_cross_gather_doubling : &hr_cross_gather_ring,
        .store = group->local_size == 1 ? HR_STORE_ORDINARY : hr_store_choose(group, by_rank[group->rank].bytes),
        .first = group->segment,
        .parts = (struct hr_cross_part *)(void *)group->cross_scratch,
    };
    const size_t segments = hr_divide_up(total, segment_bytes(&run));
    run.share_count = segments * (size_t)run.owners;
    struct hr_journey journey = {
        .group = group,
        .ops = &journey_ops,
        .call = &run,
        .segments = segments,
        .first = group->segment,
        .carries = group->local_rank < run.owners,
    };
    group->segment += segments;
    return hr_journey_run(&journey);
}

int hr_two_level_gather(struct hr_group *group, const struct hr_fused *by_rank) {
    HR_TRY(hr_cross_reserve(group, HR_TRAVELLING_MAX * (size_t)group->host_count * sizeof(struct hr_cross_part)));
    /* So many that half of a slot is enough for all the rounding; nearly always that is everybody. */
    const size_t at_once = group->arena.segment_bytes / (2 * ROUNDING_BYTES);
    for (int first = 0; first < group->size;) {
        const int left = group->size - first;
        const int count = (size_t)left < at_once ? left : (int)at_once;
        HR_TRY(gather_members(group, by_rank, first, count));
        first += count;
    }
    return HORO_OK;
}
