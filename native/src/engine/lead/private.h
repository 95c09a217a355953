/* Of control.c, which calls nothing of leader.c. */
#ifndef HR_ENGINE_LEAD_PRIVATE_H
#define HR_ENGINE_LEAD_PRIVATE_H

#include "engine/lead/leader.h"

hr_status hr_leader_open_links(struct hr_leader *leader, struct hr_error *error);
void hr_leader_close_links(struct hr_leader *leader);
/* Takes in what a member announces. */
int hr_leader_announce(struct hr_leader *leader, int member, const struct hr_wire_message *message, int64_t now_ns);
/*
 * Takes the tensor out of the agreement whose data all members have carried, if all that is complete (the root: ready)
 * is that one, and appends a DATA or, at the root, a RESULT message. HORO_OK or a status.
 */
int hr_leader_put_carried(struct hr_leader *leader, struct hr_buffer *out, int *is_put);
/* Agrees on, or reports, what all members have announced. HR_STILL, HR_MOVED or a status. */
int hr_leader_report(struct hr_leader *leader);
/* Records (framed) at the end of log_out from `mark` on also go to the child hosts. */
int hr_leader_hand_down(struct hr_leader *leader, size_t mark);
/* The next record for the log is LEAVE. */
void hr_leader_close_log(struct hr_leader *leader);

#endif
