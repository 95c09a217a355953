/* Sockets between hosts: those of all ranks, and of any team. */
#ifndef STRESS_LINKS_H
#define STRESS_LINKS_H

#include "fabric.h"

/* Two connected streams. 0, or -1 if there are none to be had. */
int links_join(int32_t *one, int32_t *other);
/*
 * All links between the hosts of a team, as horo_team_setup wants them; ends[RANKS_MAX] by rank of the job are -1
 * before. Control goes along a binomial tree among leaders, data between all members of equal local index: so few hosts
 * are all linked. 0 with *host_count, or -1.
 */
int links_make(const struct schedule *schedule, const struct team *team, struct link_fds *const *ends,
               int *host_count);
/* 0, or -1 if the system gives no descriptors. */
int links_copy(const int32_t *fds, int32_t *copies, int count);
/* As when a process ends: what was sent still arrives, and then the end of the stream. */
void links_end(const int32_t *fds, int count);
/* Closes what is open, and marks it as none. */
void links_close(int32_t *fds, int count);

#endif
