/*
 * The memory, wake descriptors, life lines and links of all ranks of a schedule, as the bootstrap would hand them over.
 */
#ifndef STRESS_FABRIC_H
#define STRESS_FABRIC_H

#include <pthread.h>

#include "schedule.h"

/* One end each of the links between the hosts of a team, by the number of the host there. */
struct link_fds {
    int32_t control[HOSTS_MAX], data[HOSTS_MAX];
};

/* The descriptors of one rank, in the arrays that its setup points to. */
struct rank_fds {
    int32_t wake[RANKS_MAX], life[RANKS_MAX];
    struct link_fds links;
};

/* The links of a team that is added; made when the first rank wants them. */
struct team_links {
    int are_made, host_count;
    struct link_fds ends[RANKS_MAX]; /* by rank; all -1 once they have been handed over */
};

struct fabric {
    const struct schedule *schedule;
    void *arenas[HOSTS_MAX];
    size_t arena_bytes[HOSTS_MAX];
    const char *host_names[RANKS_MAX];
    int local_index[RANKS_MAX];
    struct rank_fds fds[RANKS_MAX];
    pthread_mutex_t lock; /* of making links */
    struct team_links teams[TEAMS_MAX];
    struct rank_fds copies; /* of those of the victim that dies */
    struct link_fds team_copies[TEAMS_MAX];
    horo_setup setups[RANKS_MAX];
    uint64_t tuned[HORO_KNOB_COUNT];
};

/*
 * 0, or -1 if the system gives no memory or descriptors. A setup whose context exists has lost its descriptors to that.
 */
int fabric_make(const struct schedule *schedule, struct fabric *fabric);
/* The streams of the victim end without a goodbye, as when the kernel closes them for a dead process. */
void fabric_kill_victim(struct fabric *fabric);
/*
 * What a rank hands to horo_add_team; points into the fabric. 0, or -1 if the system gives no descriptors. When that
 * call has succeeded, the descriptors are no longer the fabric's; when the team has been removed, the victim's copies
 * have no use any more.
 */
int fabric_describe_team(struct fabric *fabric, int team, int rank, horo_team_setup *setup);
void fabric_hand_over(struct fabric *fabric, int team, int rank);
void fabric_forget_team(struct fabric *fabric, int team, int rank);
/* When all contexts are destroyed. */
void fabric_free(struct fabric *fabric);

#endif
