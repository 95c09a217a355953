/*
 * Changes of who takes part: process sets that are added and removed (sets.c), ranks that join (join.c),
 * and ranks that leave (leave.c).
 */
#ifndef HR_ENGINE_MEMBERSHIP_MEMBERSHIP_H
#define HR_ENGINE_MEMBERSHIP_MEMBERSHIP_H

#include "engine/engine.h"

/* ---- sets.c ---- */

/* As horo_add_team and horo_remove_team. */
int hr_sets_add(struct hr_engine *engine, const horo_team_setup *setup, int64_t *handle, struct hr_error *error);
int hr_sets_remove(struct hr_engine *engine, int32_t team, int64_t *handle, struct hr_error *error);
/* The lane of the process set that a request adds; NULL: there is none, or it has been taken over. */
const struct hr_lane *hr_sets_lane_of(const struct hr_request *request);
/* The executor of the world: the batch of a change of teams or of a join, see struct hr_executor_ops. */
int hr_membership_change(struct hr_lane *lane, struct hr_request *request, struct hr_error *error);

/* ---- leave.c ---- */

extern const struct hr_part_ops hr_part_end;
/* Whether a rank is lost or its program has failed: what it has left undone on GPUs never comes. */
int hr_leave_has_failed(const struct hr_engine *engine);

/* ---- join.c ---- */

/* A leader's handler of JOINED: a rank of its subtree joins, of which the root hears before of what others then do. */
int hr_join_handle(struct hr_lane *lane, int member, const struct hr_wire_message *message, int64_t now_ns);
/* As horo_join. */
int hr_join_submit(struct hr_engine *engine, int32_t team, int64_t *handle, struct hr_error *error);
/* The executor's handler of the record JOINED. */
int hr_join_execute(struct hr_lane *lane, const struct hr_wire_message *record);

/* The executor's: see absent in struct hr_executor_ops; a stand-in is the port's until its batch is over. */
int hr_stand_in_for(struct hr_lane *lane, struct hr_wire_text bytes, struct hr_request **request);
/* The executor's handler of the record REQUEST: makes one, unless this rank has submitted the request itself. */
int hr_stand_in_describe(struct hr_lane *lane, const struct hr_wire_message *record);
/* The lane goes, and nothing touches the memory of stand-ins any more. */
void hr_membership_forget(struct hr_lane *lane);

#endif
