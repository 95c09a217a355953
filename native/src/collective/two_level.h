/* The parts of allreduce and allgather that are for several hosts. */
#ifndef HR_COLLECTIVE_TWO_LEVEL_H
#define HR_COLLECTIVE_TWO_LEVEL_H

#include "collective/collective.h"

/* Makes run->segments ready for hr_segments_begin, by what is in run->stages and run->fused. HORO_OK or HORO_ERR_RESOURCE. */
int hr_two_level_begin(struct hr_allreduce *run);

/* Begins what hr_allgather_begin has filled in. HORO_OK or HORO_ERR_RESOURCE. */
int hr_two_level_gather_begin(struct hr_allgather *run);

#endif
