#include "fabric.h"

#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "links.h"

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

/* Every rank has an eventfd of each rank of its host. */
static int make_host(struct fabric *fabric, int host) {
    const struct schedule *schedule = fabric->schedule;
    const int size = schedule->host_sizes[host];
    const int teams = 1 + schedule->teams_at_once + 1; /* one may come before another has gone */
    const size_t bytes = (size_t)horo_arena_bytes(size, schedule->segment_bytes, teams);
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
        if (i > 0 && links_join(&leader->life[i], &fabric->fds[find_rank(fabric, host, i)].life[0]) != 0) {
            return -1;
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
        .control_fds = fds->links.control,
        .data_fds = fds->links.data,
        .direct_bytes = schedule->direct_bytes,
        .fusion_bytes = schedule->fusion_bytes,
        .cache_capacity = schedule->cache_capacity,
        .spin_us = schedule->spin_us,
        .sleeps_under_contention = 1,
        .cycle_time_us = schedule->cycle_time_us,
        .peer_timeout_ms = 30000,
        .log_level = HORO_LOG_OFF,
        .tuned = schedule->is_tuned ? fabric->tuned : NULL,
    };
}

static int copy_links(const struct link_fds *links, struct link_fds *copies) {
    const int status = links_copy(links->control, copies->control, HOSTS_MAX);
    return status != 0 ? status : links_copy(links->data, copies->data, HOSTS_MAX);
}

static void end_links(const struct link_fds *links) {
    links_end(links->control, HOSTS_MAX);
    links_end(links->data, HOSTS_MAX);
}

static void close_links(struct link_fds *links) {
    links_close(links->control, HOSTS_MAX);
    links_close(links->data, HOSTS_MAX);
}

static void forget_all(struct fabric *fabric) {
    memset(fabric->fds, 0xff, sizeof fabric->fds); /* all -1 */
    memset(&fabric->copies, 0xff, sizeof fabric->copies);
    memset(fabric->team_copies, 0xff, sizeof fabric->team_copies);
    for (int team = 0; team < TEAMS_MAX; team++) {
        memset(fabric->teams[team].ends, 0xff, sizeof fabric->teams[team].ends);
    }
}

static int copy_victim(struct fabric *fabric) {
    const struct rank_fds *fds = &fabric->fds[fabric->schedule->victim];
    const int status = links_copy(fds->life, fabric->copies.life, RANKS_MAX);
    return status != 0 ? status : copy_links(&fds->links, &fabric->copies.links);
}

int fabric_make(const struct schedule *schedule, struct fabric *fabric) {
    *fabric = (struct fabric){.schedule = schedule, .lock = PTHREAD_MUTEX_INITIALIZER};
    forget_all(fabric);
    memset(fabric->tuned, 0xff, sizeof fabric->tuned); /* as the setup says */
    int seen[HOSTS_MAX] = {0};
    struct link_fds *ends[RANKS_MAX];
    for (int rank = 0; rank < schedule->size; rank++) {
        fabric->local_index[rank] = seen[host_of(fabric, rank)]++;
        fabric->host_names[rank] = names[host_of(fabric, rank)];
        ends[rank] = &fabric->fds[rank].links;
    }
    for (int host = 0; host < schedule->host_count; host++) {
        if (make_host(fabric, host) != 0) {
            return -1;
        }
    }
    int host_count;
    if (links_make(schedule, &schedule->teams[0], ends, &host_count) != 0) {
        return -1;
    }
    for (int rank = 0; rank < schedule->size; rank++) {
        fill_setup(fabric, rank);
    }
    return schedule->ending == ENDING_DEATH ? copy_victim(fabric) : 0;
}

void fabric_kill_victim(struct fabric *fabric) {
    links_end(fabric->copies.life, RANKS_MAX);
    end_links(&fabric->copies.links);
    for (int team = 0; team < TEAMS_MAX; team++) {
        end_links(&fabric->team_copies[team]);
    }
}

/* ---- Teams that are added ---- */

static int make_team(struct fabric *fabric, int team) {
    struct team_links *links = &fabric->teams[team];
    struct link_fds *ends[RANKS_MAX];
    for (int rank = 0; rank < RANKS_MAX; rank++) {
        ends[rank] = &links->ends[rank];
    }
    (void)pthread_mutex_lock(&fabric->lock);
    const int status =
        links->are_made ? 0 : links_make(fabric->schedule, &fabric->schedule->teams[team], ends, &links->host_count);
    links->are_made = 1;
    (void)pthread_mutex_unlock(&fabric->lock);
    return status;
}

static int is_doomed(const struct fabric *fabric, int rank) {
    return fabric->schedule->ending == ENDING_DEATH && fabric->schedule->victim == rank;
}

int fabric_describe_team(struct fabric *fabric, int team, int rank, horo_team_setup *setup) {
    if (make_team(fabric, team) != 0) {
        return -1;
    }
    const struct team_links *links = &fabric->teams[team];
    const struct team *members = &fabric->schedule->teams[team];
    const int has_links = links->host_count > 1 && team_has(members, rank);
    *setup = (horo_team_setup){
        .ranks = members->ranks,
        .size = members->size,
        .control_fds = has_links ? links->ends[rank].control : NULL,
        .data_fds = has_links ? links->ends[rank].data : NULL,
    };
    return is_doomed(fabric, rank) ? copy_links(&links->ends[rank], &fabric->team_copies[team]) : 0;
}

void fabric_hand_over(struct fabric *fabric, int team, int rank) {
    memset(&fabric->teams[team].ends[rank], 0xff, sizeof fabric->teams[team].ends[rank]);
}

void fabric_forget_team(struct fabric *fabric, int team, int rank) {
    if (is_doomed(fabric, rank)) {
        close_links(&fabric->team_copies[team]);
    }
}

void fabric_free(struct fabric *fabric) {
    links_close(fabric->copies.life, RANKS_MAX);
    close_links(&fabric->copies.links);
    for (int team = 0; team < TEAMS_MAX; team++) {
        close_links(&fabric->team_copies[team]);
        for (int rank = 0; rank < RANKS_MAX; rank++) {
            close_links(&fabric->teams[team].ends[rank]);
        }
    }
    for (int host = 0; host < HOSTS_MAX; host++) {
        if (fabric->arenas[host] != NULL) {
            (void)munmap(fabric->arenas[host], fabric->arena_bytes[host]);
        }
    }
}
