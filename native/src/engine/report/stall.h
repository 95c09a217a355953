/* Of stall_text.c, for stall.c: who has submitted what. */
#ifndef HR_ENGINE_STALL_H
#define HR_ENGINE_STALL_H

#include "engine/engine.h"

/* A name that some members of a team have announced and others not. */
struct hr_stalled_name {
    const char *name;
    int is_excused; /* it holds nobody up: a JOIN, or refused by all that have submitted it */
    const uint64_t *announced; /* see hr_agree_waiting */
};

/* The names that have waited too long for members of a team. */
struct hr_stalled {
    int total, count; /* names, and those that are kept here */
    struct hr_stalled_name names[HR_NAMES_IN_TEXT];
    int64_t oldest_ns;
    int64_t blocked_ns; /* since when one that is not excused has waited; the time of the report if none has */
    int culprit;      /* a rank that has not submitted one of them, of this host if there is one; -1: none */
    int is_elsewhere; /* it is on another host, where they may know better */
};

/* A leader, which has the announcements of all. Valid until the driver goes on. */
void hr_stall_find(struct hr_lane *lane, int64_t now_ns, struct hr_stalled *stalled);
/* Whether a local member has anything pending, in whatever team. */
int hr_stall_is_waiting(const struct hr_lane *lane, int member);
/*
 * Whether a member, local or a host below, has not submitted all of it. What is excused does not count
 * beside other names, nor of a local rank that has submitted any: who has not joined may wait itself for a late rank.
 */
int hr_stall_is_waited_for(const struct hr_lane *lane, const struct hr_stalled *stalled, int member);
/* A line for each rank of this host, or for those that are alike: "\n  rank 1 (h1) has submitted 'a' and not 'b'". */
void hr_stall_describe(const struct hr_lane *lane, const struct hr_stalled *stalled, char *text, size_t text_bytes);

#endif
