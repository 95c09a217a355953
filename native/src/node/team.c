#include "node/team.h"

#include <limits.h>
#include <stdlib.h>

static int check(int rank, int size, const int32_t *host_of_rank, struct hr_error *error) {
    if (size < 1 || rank < 0 || rank >= size) {
        return hr_fail(error, HORO_ERR_USAGE, "rank %d of %d ranks does not exist", rank, size);
    }
    int hosts = 0;
    for (int r = 0; r < size; r++) {
        const int host = host_of_rank[r];
        if (host < 0 || host > hosts) {
            return hr_fail(error, HORO_ERR_USAGE, "rank %d is on host %d, but hosts are numbered by their lowest rank", r, host);
        }
        hosts += host == hosts;
    }
    return HORO_OK;
}

static void list_by_host(struct hr_team *team) {
    int listed = 0;
    for (int host = 0; host < team->host_count; host++) {
        const int end = listed + team->host_size[host];
        for (int r = team->leader_of_host[host]; listed < end; r++) {
            team->rank_by_host[listed] = r;
            listed += team->host_of_rank[r] == host;
        }
    }
}

static int allocate(struct hr_team *team, size_t size) {
    team->host_of_rank = calloc(size, sizeof *team->host_of_rank);
    team->rank_of_local = calloc(size, sizeof *team->rank_of_local);
    team->rank_by_host = calloc(size, sizeof *team->rank_by_host);
    team->leader_of_host = calloc(size, sizeof *team->leader_of_host);
    team->host_size = calloc(size, sizeof *team->host_size);
    team->sources = calloc(size, sizeof *team->sources);
    return team->host_of_rank != NULL && team->rank_of_local != NULL && team->rank_by_host != NULL &&
           team->leader_of_host != NULL && team->host_size != NULL && team->sources != NULL;
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
    list_by_host(team);
    team->owner_count = INT_MAX;
    for (int h = 0; h < team->host_count; h++) {
        team->owner_count = team->host_size[h] < team->owner_count ? team->host_size[h] : team->owner_count;
    }
}

const struct hr_tuning hr_tuning_defaults = {
    .flat = HR_FLAT_MAX,
    .stream = 1 << 18,
    .piece = 1 << 17,
    .doubling = 1 << 16,
    .tree = 1 << 18,
    .gather_doubling = 1 << 20,
    .gather_spread = 1 << 13,
    .gather_lone = 1 << 20,
    .mpi_alone = 1 << 20,
    .mpi_packed = 1 << 24,
};

int hr_team_init(struct hr_team *team, struct hr_node *node, int rank, int size, const int32_t *host_of_rank,
                 size_t segment_bytes, struct hr_error *error) {
    *team = (struct hr_team){.node = node, .tuning = hr_tuning_defaults, .rank = rank, .size = size};
    team->tuning.segment = segment_bytes;
    HR_TRY(check(rank, size, host_of_rank, error));
    if (!allocate(team, (size_t)size)) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for a team of %d ranks", size);
    }
    place(team, host_of_rank);
    return HORO_OK;
}

void hr_team_fini(struct hr_team *team) {
    free(team->host_of_rank);
    free(team->rank_of_local);
    free(team->rank_by_host);
    free(team->leader_of_host);
    free(team->host_size);
    free((void *)team->sources);
    if (team->node != NULL && atomic_load(&team->node->mpi.stranded) == 0) {
        free(team->cross_scratch);
    } /* else MPI may still touch it: better lost than written to when it is somebody else's */
    *team = (struct hr_team){0};
}

void hr_team_arrive(struct hr_team *team, enum hr_phase phase, unsigned parity) {
    const unsigned index = (unsigned)phase + parity;
    team->arrivals[index]++;
    hr_core_publish(team->node);
    /* seq_cst: releases what was written before, and is the first half of the handshake with sleepers. */
    const uint64_t arrived = atomic_fetch_add(&team->node->arena.header->phase[index].arrived, 1) + 1;
    if (arrived % (uint64_t)team->local_size == 0) {
        hr_node_wake_all(team->node); /* only the last one to arrive completes anybody's wait */
    }
}

int hr_team_reached(const struct hr_team *team, enum hr_phase phase, unsigned parity) {
    const unsigned index = (unsigned)phase + parity;
    const uint64_t wanted = team->arrivals[index] * (uint64_t)team->local_size;
    return atomic_load(&team->node->arena.header->phase[index].arrived) >= wanted; /* partner: hr_team_arrive */
}

void hr_team_suspect_link(struct hr_team *team, int host) {
    const int is_silent = host >= 0 && team->node->transport->ops->loss(team->node->transport, host) == HR_LOSS_SILENT;
    int rank = -1;
    int seen = 0;
    for (int r = 0; r < team->size && rank < 0; r++) {
        if (team->host_of_rank[r] == host && seen++ == team->local_rank) {
            rank = r; /* links join ranks of equal local index */
        }
    }
    team->node->suspect = (struct hr_abort){.code = HORO_ERR_PEER_LOST,
                                       .rank = rank,
                                       .reason = is_silent ? HR_REASON_SILENT : HR_REASON_LINK};
}

void hr_team_abandon_data(struct hr_team *team) {
    if (team->node->transport != NULL) {
        team->node->transport->ops->abandon(team->node->transport, HR_CHANNEL_DATA);
    }
}
