/* Ranks that join a team while others go on with it, and what that changes in the operations of the others. */
#ifndef STRESS_JOINS_H
#define STRESS_JOINS_H

#include "chance.h"
#include "schedule.h"
#include "teams.h"

/*
 * While a schedule is made: the bunch at hand begins joins of teams, or is the last one of them, which then has the
 * operation that all members wait for. 1 while any team is being joined: no team comes or goes meanwhile.
 */
int joins_change(struct chance *chance, const struct limits *limits, struct schedule *schedule, struct bunch *bunch,
                 const struct live_teams *live);
/* Whether the bunch at hand is the last one of a join of this team; what is submitted behind it would be refused. */
int joins_end_here(const struct schedule *schedule, int team);
/* How many operations are still to come that end joins, at most. */
size_t joins_count_open(const struct schedule *schedule);
/* The bunch at hand ends all joins. */
void joins_end_all(struct schedule *schedule, struct bunch *bunch);
/* That an operation is one of a bunch in which members of its team may have joined. */
void joins_note(const struct schedule *schedule, struct operation *operation);

/* Those that have not joined. */
void joins_list(const struct schedule *schedule, const struct operation *operation, struct team *active);
int joins_has(const struct schedule *schedule, const struct operation *operation, int rank);
/* Whether a rank submits something else than the others, of which there are some, or refuses its call. */
int joins_differs(const struct schedule *schedule, const struct operation *operation, int rank);
/*
 * Whether it may end so on a rank that takes part. Where one rank refuses what nobody can do for one that has joined,
 * it may fail for either reason, for the same on all others.
 */
int joins_may_end(const struct schedule *schedule, const struct operation *operation, int rank, int status);

#endif
