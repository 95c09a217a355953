/* The parts that collectives on several hosts, or in several runs over the slots, share. */
#ifndef HR_COLLECTIVE_TWO_LEVEL_H
#define HR_COLLECTIVE_TWO_LEVEL_H

#include "collective/collective.h"

/* The algorithm by which a share of so many bytes travels. */
const struct hr_cross_ops *hr_two_level_cross(const struct hr_tuning *tuning, size_t share_bytes);

/* Scratch for any share of any segment of at most `segment_bytes`, in blocks of `block_bytes`, for so many owners. */
size_t hr_two_level_scratch_bytes(const struct hr_tuning *tuning, int host_count, int owners, size_t block_bytes,
                                  size_t segment_bytes);

/* The next ranks, at most so many (>= 1) at once; 0 if all have had their run. */
static inline int hr_members_advance(struct hr_members *members, const struct hr_team *team, size_t at_once) {
    const size_t left = (size_t)(team->size - members->next);
    members->ranks = team->rank_by_host + members->next;
    members->count = (int)(left < at_once ? left : at_once);
    members->next += members->count;
    return members->count;
}

/*
 * Goes through what one owner carries in one segment: whose share it is, which bytes of that rank's part, where it lies
 * behind the first one. Zeroed but for the first five.
 */
struct hr_walk {
    const struct hr_fused *by_rank;
    const struct hr_members *members;
    size_t unit, share_count; /* of shares */
    size_t index;             /* of the share in each part */
    int next;                 /* of members->ranks */
    int rank;
    struct hr_range share;
    size_t at;
};

/* 1, or 0 behind the last one. */
static inline int hr_walk_on(struct hr_walk *walk) {
    if (walk->next == walk->members->count) {
        return 0;
    }
    walk->at += walk->share.bytes;
    walk->rank = walk->members->ranks[walk->next++];
    walk->share = hr_units(walk->unit, walk->by_rank[walk->rank].bytes, walk->index, walk->share_count);
    return 1;
}

/* Begins what hr_allgather_begin has filled in. HORO_OK or HORO_ERR_RESOURCE. */
hr_status hr_two_level_gather_begin(struct hr_allgather *run);

/* The bytes that s has for d and that pass a slot. */
static inline size_t hr_alltoall_bytes(const struct hr_alltoall *run, int s, int d) {
    return s == d ? 0 : run->bytes[(size_t)s * (size_t)run->segments.team->size + (size_t)d];
}

/* Begins what hr_alltoall_begin has filled in. HORO_OK or HORO_ERR_RESOURCE. */
hr_status hr_two_level_exchange_begin(struct hr_alltoall *run);

#endif
