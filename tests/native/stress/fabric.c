#include "fabric.h"

#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

static const char *const names[HOSTS_MAX] = {"host0", "host1", "host2", "host3"};

static int host_of(const struct fabric *fabric, int rank) {
    return fabric->schedule->host_of_rank[rank];
}

static int find_rank(const struct fabric *fabric, int host, int local_index) {
    int rank = 0;
    while (host_of(fabric, rank) != host || fabric->local_index[rank] != local_index) {
        rank++;
    }
    return rank;
}

static int join(int32_t *one, int32_t *other) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
        return -1;
    }
    *one = ends[0];
    *other = ends[1];
    return 0;
}

/* Every rank has an eventfd of each rank of its host. */
static int make_host(struct fabric *fabric, int host) {
    const struct schedule *schedule = fabric->schedule;
    const int size = schedule->host_sizes[host];
    const size_t bytes = (size_t)horo_arena_bytes(size, schedule->segment_bytes, 1);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return -1;
    }
    fabric->arenas[host] = memory;
    fabric->arena_bytes[host] = bytes;
    struct rank_fds *leader = &fabric->fds[find_rank(fabric, host, 0)];
    for (int i = 0; i < size; i++) {
        leader->wake[i] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (leader->wake[i] < 0) {
            return -1;
        }
        for (int other = 1; other < size; other++) {
            struct rank_fds *fds = &fabric->fds[find_rank(fabric, host, other)];
            fds->wake[i] = dup(leader->wake[i]);
            if (fds->wake[i] < 0) {
                return -1;
            }
        }
        if (i > 0 && join(&leader->life[i], &fabric->fds[find_rank(fabric, host, i)].life[0]) != 0) {
            return -1;
        }
    }
    return 0;
}

static int owner_count(const struct schedule *schedule) {
    int least = RANKS_MAX;
    for (int host = 0; host < schedule->host_count; host++) {
        least = schedule->host_sizes[host] < least ? schedule->host_sizes[host] : least;
    }
    return least;
}

/* Control along a binomial tree among leaders; data between all ranks of equal local index: so few hosts are all linked. */
static int join_hosts(struct fabric *fabric) {
    const int owners = owner_count(fabric->schedule);
    for (int host = 1; host < fabric->schedule->host_count; host++) {
        const int parent = host & (host - 1);
        struct rank_fds *leader = &fabric->fds[find_rank(fabric, host, 0)];
        if (join(&leader->control[parent], &fabric->fds[find_rank(fabric, parent, 0)].control[host]) != 0) {
            return -1;
        }
        for (int other = 0; other < host; other++) {
            for (int i = 0; i < owners; i++) {
                struct rank_fds *one = &fabric->fds[find_rank(fabric, host, i)];
                if (join(&one->data[other], &fabric->fds[find_rank(fabric, other, i)].data[host]) != 0) {
                    return -1;
                }
            }
        }
    }
    return 0;
}

static void fill_setup(struct fabric *fabric, int rank) {
    const struct schedule *schedule = fabric->schedule;
    const struct rank_fds *fds = &fabric->fds[rank];
    fabric->setups[rank] = (horo_setup){
        .rank = rank,
        .size = schedule->size,
        .host_of_rank = schedule->host_of_rank,
        .host_name_of_rank = fabric->host_names,
        .arena_fd = -1,
        .arena_memory = fabric->arenas[host_of(fabric, rank)],
        .arena_memory_bytes = fabric->arena_bytes[host_of(fabric, rank)],
        .segment_bytes = schedule->segment_bytes,
        .wake_fds = fds->wake,
        .life_fds = fds->life,
        .control_fds = fds->control,
        .data_fds = fds->data,
        .fusion_bytes = schedule->fusion_bytes,
        .cache_capacity = schedule->cache_capacity,
        .spin_us = schedule->spin_us,
        .cycle_time_us = schedule->cycle_time_us,
        .peer_timeout_ms = 30000,
        .log_level = HORO_LOG_OFF,
    };
}

static int copy_fds(const int32_t *fds, int32_t *copies, int count) {
    for (int i = 0; i < count; i++) {
        copies[i] = fds[i] < 0 ? -1 : dup(fds[i]);
        if (fds[i] >= 0 && copies[i] < 0) {
            return -1;
        }
    }
    return 0;
}

static void forget(struct rank_fds *fds) {
    memset(fds, 0xff, sizeof *fds); /* all -1 */
}

int fabric_make(const struct schedule *schedule, struct fabric *fabric) {
    *fabric = (struct fabric){.schedule = schedule};
    int seen[HOSTS_MAX] = {0};
    for (int rank = 0; rank < schedule->size; rank++) {
        fabric->local_index[rank] = seen[host_of(fabric, rank)]++;
        fabric->host_names[rank] = names[host_of(fabric, rank)];
        forget(&fabric->fds[rank]);
    }
    forget(&fabric->copies);
    for (int host = 0; host < schedule->host_count; host++) {
        if (make_host(fabric, host) != 0) {
            return -1;
        }
    }
    if (join_hosts(fabric) != 0) {
        return -1;
    }
    for (int rank = 0; rank < schedule->size; rank++) {
        fill_setup(fabric, rank);
    }
    if (schedule->ending != ENDING_DEATH) {
        return 0;
    }
    const struct rank_fds *fds = &fabric->fds[schedule->victim];
    return copy_fds(fds->life, fabric->copies.life, RANKS_MAX) != 0 ||
                   copy_fds(fds->control, fabric->copies.control, HOSTS_MAX) != 0 ||
                   copy_fds(fds->data, fabric->copies.data, HOSTS_MAX) != 0
               ? -1
               : 0;
}

static void end_streams(const int32_t *fds, int count) {
    for (int i = 0; i < count; i++) {
        if (fds[i] >= 0) {
            (void)shutdown(fds[i], SHUT_WR);
        }
    }
}

void fabric_kill_victim(struct fabric *fabric) {
    end_streams(fabric->copies.life, RANKS_MAX);
    end_streams(fabric->copies.control, HOSTS_MAX);
    end_streams(fabric->copies.data, HOSTS_MAX);
}

static void close_all(const int32_t *fds, int count) {
    for (int i = 0; i < count; i++) {
        if (fds[i] >= 0) {
            (void)close(fds[i]);
        }
    }
}

void fabric_free(struct fabric *fabric) {
    close_all(fabric->copies.life, RANKS_MAX);
    close_all(fabric->copies.control, HOSTS_MAX);
    close_all(fabric->copies.data, HOSTS_MAX);
    for (int host = 0; host < HOSTS_MAX; host++) {
        if (fabric->arenas[host] != NULL) {
            (void)munmap(fabric->arenas[host], fabric->arena_bytes[host]);
        }
    }
}
