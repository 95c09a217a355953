/* The memory, wake descriptors, life lines and links of all ranks of a schedule, as the bootstrap would hand them over. */
#ifndef STRESS_FABRIC_H
#define STRESS_FABRIC_H

#include "schedule.h"

/* The descriptors of one rank, in the arrays that its setup points to. */
struct rank_fds {
    int32_t wake[RANKS_MAX], life[RANKS_MAX];
    int32_t control[HOSTS_MAX], data[HOSTS_MAX];
};

struct fabric {
    const struct schedule *schedule;
    void *arenas[HOSTS_MAX];
    size_t arena_bytes[HOSTS_MAX];
    const char *host_names[RANKS_MAX];
    int local_index[RANKS_MAX];
    struct rank_fds fds[RANKS_MAX];
    struct rank_fds copies; /* of those of the victim that dies */
    horo_setup setups[RANKS_MAX];
};

/* 0, or -1 if the system gives no memory or descriptors. A setup whose context exists has lost its descriptors to that. */
int fabric_make(const struct schedule *schedule, struct fabric *fabric);
/* The streams of the victim end without a goodbye, as when the kernel closes them for a dead process. */
void fabric_kill_victim(struct fabric *fabric);
/* When all contexts are destroyed. */
void fabric_free(struct fabric *fabric);

#endif
