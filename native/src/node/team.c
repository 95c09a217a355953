#include "node/team.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

/* The lists of numbers are pieces of one. */
static int allocate(struct hr_team *team, size_t size) {
    int **const lists[] = {&team->host_of_rank,   &team->job_rank,     &team->rank_of_local,
                           &team->index_of_local, &team->rank_by_host, &team->leader_of_host,
                           &team->host_size};
    const size_t count = sizeof lists / sizeof *lists;
    team->numbers = calloc(count * size, sizeof *team->numbers);
    team->sources = calloc(size, sizeof *team->sources);
    for (size_t i = 0; i < count && team->numbers != NULL; i++) {
        *lists[i] = team->numbers + i * size;
    }
    return team->numbers != NULL && team->sources != NULL;
}

static void place(struct hr_team *team, const int32_t *host_of_rank) {
    team->host = host_of_rank[team->rank];
    for (int r = 0; r < team->size; r++) {
        const int host = host_of_rank[r];
        team->host_of_rank[r] = host;
        if (team->host_size[host]++ == 0) {
            team->leader_of_host[host] = r;
            team->host_count = host + 1;
        }
        if (host == team->host) {
            if (r == team->rank) {
                team->local_rank = team->local_size;
            }
            team->rank_of_local[team->local_size++] = r;
        }
    }
    team->owner_count = INT_MAX;
    for (int host = 0, listed = 0; host < team->host_count; host++) {
        const int end = listed + team->host_size[host];
        for (int r = team->leader_of_host[host]; listed < end; r++) {
            team->rank_by_host[listed] = r;
            listed += team->host_of_rank[r] == host;
        }
        const int members = team->host_size[host];
        team->owner_count = members < team->owner_count ? members : team->owner_count;
        team->largest_host = members > team->largest_host ? members : team->largest_host;
    }
}

const struct hr_tuning hr_tuning_defaults = {
    .flat = HR_FLAT_MAX,
    .stream = 1 << 18,
    .moved_stream = 1 << 14,
    .result_stream = 1 << 25,
    .direct_most = 1 << 25,
    .piece = 1 << 17,
    .doubling = 1 << 16,
    .tree = 1 << 18,
    .gather_doubling = 1 << 20,
    .gather_spread = 1 << 13,
    .gather_lone = 1 << 20,
    .carried = 1 << 14,
    .carried_per_host = 1 << 16,
};

hr_status hr_team_init(struct hr_team *team, struct hr_node *node, int rank, int size, const int32_t *host_of_rank,
                       size_t segment_bytes, struct hr_error *error) {
    *team = (struct hr_team){.node = node, .tuning = hr_tuning_defaults, .rank = rank, .size = size};
    team->tuning.segment = segment_bytes;
    if (size < 1 || rank < 0 || rank >= size) {
        return hr_fail(error, HORO_ERR_USAGE, "rank %d of %d ranks does not exist", rank, size);
    }
    int hosts = 0;
    for (int r = 0; r < size; r++) {
        const int host = host_of_rank[r];
        if (host < 0 || host > hosts) {
            return hr_fail(error, HORO_ERR_USAGE, "rank %d is on host %d, but hosts are numbered by their lowest rank",
                           r, host);
        }
        hosts += host == hosts;
    }
    if (!allocate(team, (size_t)size)) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for a team of %d ranks", size);
    }
    place(team, host_of_rank);
    for (int r = 0; r < size; r++) {
        team->job_rank[r] = r;
        team->index_of_local[r] = r; /* all ranks of this host are members */
    }
    return HORO_OK;
}

hr_status hr_team_init_some(struct hr_team *team, const struct hr_team *world, const int32_t *job_ranks, int size,
                            struct hr_error *error) {
    *team = (struct hr_team){.node = world->node, .tuning = hr_tuning_defaults, .size = size};
    team->tuning.segment = world->node->arena.segment_bytes;
    team->tuning.direct = world->tuning.direct;
    /* 1 + their numbers here; then that of each rank */
    int32_t *hosts = calloc((size_t)world->host_count + (size_t)size, sizeof *hosts);
    if (!allocate(team, (size_t)size) || hosts == NULL) {
        free(hosts);
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for a team of %d ranks", size);
    }
    int32_t *host_of_rank = hosts + world->host_count;
    int host_count = 0;
    for (int r = 0; r < size; r++) {
        int32_t *number = &hosts[world->host_of_rank[job_ranks[r]]];
        *number = *number == 0 ? ++host_count : *number;
        host_of_rank[r] = *number - 1;
        team->job_rank[r] = job_ranks[r];
        team->rank = job_ranks[r] == world->rank ? r : team->rank;
    }
    place(team, host_of_rank);
    free(hosts);
    for (int i = 0, index = 0; i < team->local_size; index++) { /* both ascend, and the world has all */
        if (world->rank_of_local[index] == team->job_rank[team->rank_of_local[i]]) {
            team->index_of_local[i++] = index;
        }
    }
    return HORO_OK;
}

int hr_team_member(const struct hr_team *team, int job_rank) {
    int low = 0;
    int high = team->size; /* the members ascend */
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (team->job_rank[middle] < job_rank) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < team->size && team->job_rank[low] == job_rank ? low : -1;
}

const char *hr_team_name(const struct hr_team *team, char *text) {
    enum { SHOWN = 8, TAIL_BYTES = 8 };
    size_t used = (size_t)snprintf(text, HR_TEAM_NAME_BYTES, "process set %d (rank%s ", team->number,
                                   team->size == 1 ? "" : "s");
    for (int i = 0; i < team->size && i < SHOWN && used + TAIL_BYTES < HR_TEAM_NAME_BYTES; i++) {
        used += (size_t)snprintf(text + used, HR_TEAM_NAME_BYTES - used, i == 0 ? "%d" : ", %d", team->job_rank[i]);
    }
    (void)snprintf(text + used, HR_TEAM_NAME_BYTES - used, team->size > SHOWN ? ", ...)" : ")");
    return text;
}

void hr_team_wake_all(const struct hr_team *team) {
    for (int i = 0; i < team->local_size; i++) {
        if (i != team->local_rank) {
            hr_node_wake(team->node, team->index_of_local[i]);
        }
    }
}

void hr_team_close_links(struct hr_team *team) {
    if (team->transport != NULL) {
        team->transport->ops->destroy(team->transport);
        team->transport = NULL;
    }
}

/* The memory that its transport moves data in. */
static void free_data(void *arg) {
    struct hr_team *team = arg;
    hr_partition_unmap(&team->node->arena, &team->partition);
    free(team->cross_scratch);
}

void hr_team_destroy(struct hr_team *team) {
    if (team == NULL) {
        return;
    }
    hr_team_close_links(team);
    free(team->numbers);
    free((void *)team->sources);
    hr_node_bury(team->node, team, free_data);
    free(team);
}

void hr_team_arrive(struct hr_team *team, enum hr_phase phase, unsigned parity) {
    const unsigned index = (unsigned)phase + parity;
    if (team->is_ahead) {
        return;
    }
    team->arrivals[index]++;
    if (team->node->core_choice.enabled) {
        hr_core_publish(&team->node->arena);
    }
    /* seq_cst: releases what was written before, and is the first half of the handshake with sleepers. */
    const uint64_t arrived = atomic_fetch_add(&team->partition.header->phase[index].arrived, 1) + 1;
    if (arrived % (uint64_t)team->local_size == 0) {
        hr_team_wake_all(team); /* only the last one to arrive completes anybody's wait */
    }
}

int hr_team_reached(const struct hr_team *team, enum hr_phase phase, unsigned parity) {
    const unsigned index = (unsigned)phase + parity;
    const uint64_t wanted = team->arrivals[index] * (uint64_t)team->local_size;
    return atomic_load(&team->partition.header->phase[index].arrived) >= wanted; /* partner: hr_team_arrive */
}

void hr_team_suspect_link(struct hr_team *team, int host) {
    const int is_silent = host >= 0 && team->transport->ops->loss(team->transport, host) == HR_LOSS_SILENT;
    int rank = -1;
    int seen = 0;
    for (int r = 0; r < team->size && rank < 0; r++) {
        if (team->host_of_rank[r] == host && seen++ == team->local_rank) {
            rank = team->job_rank[r]; /* links join ranks of equal local index */
        }
    }
    team->suspect = (struct hr_abort){.code = HORO_ERR_PEER_LOST,
                                       .rank = rank,
                                       .reason = is_silent ? HR_REASON_SILENT : HR_REASON_LINK};
}

int hr_hosts_are_linked(enum hr_channel channel, int host_count, int host, int other) {
    const int low = host < other ? host : other;
    const int high = host < other ? other : host;
    const int ahead = high - low;
    const int back = host_count - ahead;
    if (channel == HR_CHANNEL_CONTROL) {
        return low != high && (high & (high - 1)) == low;
    }
    return low != high && ((ahead & (ahead - 1)) == 0 || (back & (back - 1)) == 0);
}
