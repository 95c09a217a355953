#ifndef HR_COLLECTIVE_TWO_LEVEL_H
#define HR_COLLECTIVE_TWO_LEVEL_H

#include "collective/cross.h"
#include "collective/stages.h"

/* The whole of an allreduce of `segments` segments over several hosts. HORO_OK, or the code with which the group ended. */
int hr_two_level(struct hr_stages *call, size_t segments);

/* What a share of so many bytes travels by. */
const struct hr_cross_ops *hr_two_level_cross(size_t share_bytes);

/* Scratch for any share of any segment of at most `segment_bytes`, cut for so many owners. */
size_t hr_two_level_scratch_bytes(int host_count, int owners, size_t segment_bytes);

/* The whole of an allgather over several hosts. */
int hr_two_level_gather(struct hr_group *group, const struct hr_fused *by_rank);

#endif
