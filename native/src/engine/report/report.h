/* Reports: notices what does not go on, and says who is late and why. */
#ifndef HR_ENGINE_REPORT_REPORT_H
#define HR_ENGINE_REPORT_REPORT_H

#include "engine/engine.h"

/* Of a local member. */
static inline struct hr_arena_block *hr_block_of(const struct hr_lane *lane, int member) {
    return &lane->node->arena.blocks[lane->team->index_of_local[member]];
}

/* ---- blocked.c: threads that wait, and whether all ranks wait for one another ---- */

/* As horo_report_blocked and horo_blocked_question. */
int hr_engine_report_blocked(struct hr_engine *engine, const horo_waiting *waits, int32_t count, uint32_t question,
                             const char *others);
uint32_t hr_engine_blocked_question(const struct hr_engine *engine);
/* Tells rank 0 what callers have reported, or that it holds no more. HORO_OK or a status. */
int hr_engine_tell_blocked(struct hr_engine *engine);
/* A leader's handlers of BLOCKED, of a rank of this subtree, and of QUERY, and what passes the question down. */
int hr_blocked_handle(struct hr_lane *lane, int member, const struct hr_wire_message *message, int64_t now_ns);
int hr_blocked_handle_query(struct hr_lane *lane, int member, const struct hr_wire_message *query, int64_t now_ns);
/* Of the root of all ranks. */
extern const struct hr_part_ops hr_part_deadlock;

/* ---- stall.c: requests that have waited too long ---- */

/* A leader's handler of ASK: a leader above asks where the ranks of this subtree stand that wait for nothing. */
int hr_stall_handle_question(struct hr_lane *lane, int member, const struct hr_wire_message *message, int64_t now_ns);
extern const struct hr_part_ops hr_part_stall;

/* The only rank on other hosts, -1 if there are none or several: which of these waits for which is not known here. */
int hr_stall_find_only_other(const struct hr_team *team);

/* ---- late.c: requests that are not done in time ---- */

static inline int64_t hr_late_deadline_ns(const struct hr_request *request) {
    return request->submit_ns + (int64_t)request->call.timeout_ms * 1000000;
}
/* A leader's handler of LATE: a member, or the parent, knows of an operation that is not done in time. */
int hr_late_handle(struct hr_lane *lane, int member, const struct hr_wire_message *message, int64_t now_ns);
extern const struct hr_part_ops hr_part_late;

/* ---- stall_text.c: who has submitted what ---- */

/* The names that have waited too long for members of a team. */
struct hr_stalled {
    int total, count; /* names, and those that are kept here */
    struct hr_agree_waiting names[HR_NAMES_IN_TEXT];
    int64_t oldest_ns;
    int64_t blocked_ns; /* since when one that holds up somebody has waited; the time of the report if none has */
    int culprit;      /* a rank that has not submitted one of them, of this host if there is one; -1: none */
    int periods;      /* of patience with it, where those beside it may know better */
};

/* Ranks of one host, or that lead others, as "1, 3"; the first one, and how many. */
struct hr_rank_list {
    char numbers[HR_NAME_TEXT_BYTES];
    size_t used;
    int count, first;
};
void hr_rank_list_add(struct hr_rank_list *list, int rank);

/* A leader, which has the announcements of all. Valid until the driver goes on. */
void hr_stall_find(struct hr_lane *lane, int64_t now_ns, struct hr_stalled *stalled);
/* Whether a local member has anything pending, in whatever team. */
int hr_stall_is_waiting(const struct hr_lane *lane, int member);
/*
 * Whether a member, local or a host below, has not submitted all of it. What holds up nobody does not count
 * beside other names, nor of a local rank that has submitted any: who has not joined may wait itself for a late rank.
 */
int hr_stall_is_waited_for(const struct hr_lane *lane, const struct hr_stalled *stalled, int member);
/* A line for each rank of this host, or for those that are alike: "\n  rank 1 (h1) has submitted 'a' and not 'b'". */
void hr_stall_describe(const struct hr_lane *lane, const struct hr_stalled *stalled, char *text, size_t text_bytes);

#endif
