/* Reports: notices what does not go on, and says who is late and why. */
#ifndef HR_ENGINE_REPORT_REPORT_H
#define HR_ENGINE_REPORT_REPORT_H

#include "engine/engine.h"

/* ---- blocked.c: threads that wait, and whether all ranks wait for one another ---- */

/* As horo_report_blocked and horo_blocked_question. */
int hr_engine_report_blocked(struct hr_engine *engine, const horo_waiting *waits, int32_t count, uint32_t question,
                             const char *others);
uint32_t hr_engine_blocked_question(const struct hr_engine *engine);
/* Tells rank 0 what callers have reported, or that it holds no more. HORO_OK or a status. */
int hr_engine_tell_blocked(struct hr_engine *engine);
/* A leader's handlers of BLOCKED, of a rank of this subtree, and of QUERY, and what passes the question down. */
int hr_blocked_handle(void *lane, int member, const struct hr_wire_message *message, int64_t now_ns);
int hr_blocked_handle_query(void *lane, int member, const struct hr_wire_message *message, int64_t now_ns);
/* Of the root of all ranks. */
extern const struct hr_part_ops hr_part_deadlock;

/* ---- stall.c: requests that have waited too long ---- */

/* A leader's handler of ASK: a leader above asks where the ranks of this subtree stand that wait for nothing. */
int hr_stall_handle_question(void *lane, int member, const struct hr_wire_message *message, int64_t now_ns);
extern const struct hr_part_ops hr_part_stall;

#endif
