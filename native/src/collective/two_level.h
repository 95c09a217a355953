#ifndef HR_COLLECTIVE_TWO_LEVEL_H
#define HR_COLLECTIVE_TWO_LEVEL_H

#include "collective/stages.h"

/* The whole of an allreduce of `segments` segments over several hosts. HORO_OK, or the code with which the group ended. */
int hr_two_level(struct hr_stages *call, size_t segments);

/* The whole of an allgather over several hosts. */
int hr_two_level_gather(struct hr_group *group, const struct hr_fused *by_rank);

#endif
