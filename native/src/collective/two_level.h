/* The parts of allreduce and allgather that are for several hosts. */
#ifndef HR_COLLECTIVE_TWO_LEVEL_H
#define HR_COLLECTIVE_TWO_LEVEL_H

#include "collective/collective.h"

/*
 * Makes run->segments ready for hr_segments_begin, by what is in run->stages and run->fused. HORO_OK or
 * HORO_ERR_RESOURCE.
 */
int hr_two_level_begin(struct hr_allreduce *run);

/* What a share of so many bytes travels by. */
const struct hr_cross_ops *hr_two_level_cross(const struct hr_tuning *tuning, size_t share_bytes);

/* Scratch for any share of any segment of at most `segment_bytes`, in blocks of `block_bytes`, for so many owners. */
size_t hr_two_level_scratch_bytes(const struct hr_tuning *tuning, int host_count, int owners, size_t block_bytes,
                                  size_t segment_bytes);

/* Begins what hr_allgather_begin has filled in. HORO_OK or HORO_ERR_RESOURCE. */
int hr_two_level_gather_begin(struct hr_allgather *run);

#endif
