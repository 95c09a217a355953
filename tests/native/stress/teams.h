/* Which teams there are while a schedule is made, and the operations that add and remove them. */
#ifndef STRESS_TEAMS_H
#define STRESS_TEAMS_H

#include "chance.h"
#include "schedule.h"

/* What becomes of a team in the bunch at hand; only one that stays has operations there. */
enum fate {
    FATE_STAYS,
    FATE_COMES,
    FATE_GOES,
    FATE_IS_DISPUTED, /* the ranks do not agree on whether to remove it, so it stays */
};

struct live_teams {
    int count;
    int teams[LIVE_MAX];
    enum fate fates[LIVE_MAX];
};

/* The operation of the next bunch that adds or removes a team, if any: two at a time are refused. */
void teams_change(struct chance *chance, const struct limits *limits, struct schedule *schedule, struct bunch *bunch,
                  struct live_teams *live);
/* The bunch is made. */
void teams_settle(struct live_teams *live);
/* The team of an operation; 0 has all ranks. */
int teams_choose(struct chance *chance, const struct live_teams *live);

#endif
