/* Between join.c and stand_in.c. */
#ifndef HR_ENGINE_MEMBERSHIP_PRIVATE_H
#define HR_ENGINE_MEMBERSHIP_PRIVATE_H

#include "engine/membership/membership.h"

/* Of a rank that joins a team, or has done so at some time. The driver's. */
struct hr_absence {
    struct hr_request *held;  /* the JOIN that is to be announced */
    int is_heard;             /* the record JOINED of this rank has been executed */
    int has_joined;           /* JOIN is announced */
    struct hr_map stand_ins;  /* name -> request that stands in for one */
};

static inline int hr_has_joined(const struct hr_lane *lane) {
    return lane->absence != NULL && lane->absence->has_joined;
}

#endif
