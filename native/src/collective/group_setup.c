/* Building and dissolving a group from what the bootstrap hands over. */
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "collective/group.h"

static int check_setup(const horo_setup *setup, struct hr_error *error) {
    if (setup->size < 1 || setup->rank < 0 || setup->rank >= setup->size) {
        return hr_fail(error, HORO_ERR_USAGE, "rank %d of %d ranks does not exist", setup->rank, setup->size);
    }
    int hosts = 0;
    for (int r = 0; r < setup->size; r++) {
        const int host = setup->host_of_rank[r];
        if (host < 0 || host > hosts) {
            return hr_fail(error, HORO_ERR_USAGE, "rank %d is on host %d, but hosts are numbered by their lowest rank", r,
                           host);
        }
        hosts += host == hosts;
    }
    return HORO_OK;
}

static void list_by_host(struct hr_group *group) {
    int listed = 0;
    for (int host = 0; host < group->host_count; host++) {
        const int end = listed + group->host_size[host];
        for (int r = group->leader_of_host[host]; listed < end; r++) {
            group->rank_by_host[listed] = r;
            listed += group->host_of_rank[r] == host;
        }
    }
}

static int find_places(struct hr_group *group, const horo_setup *setup) {
    const size_t size = (size_t)setup->size;
    group->host_of_rank = calloc(size, sizeof *group->host_of_rank);
    group->rank_of_local = calloc(size, sizeof *group->rank_of_local);
    group->rank_by_host = calloc(size, sizeof *group->rank_by_host);
    group->leader_of_host = calloc(size, sizeof *group->leader_of_host);
    group->host_size = calloc(size, sizeof *group->host_size);
    group->core_of = calloc(size, sizeof *group->core_of);
    group->host_name_of_rank = calloc(size, sizeof *group->host_name_of_rank);
    if (group->host_of_rank == NULL || group->rank_of_local == NULL || group->rank_by_host == NULL ||
        group->leader_of_host == NULL || group->host_size == NULL || group->core_of == NULL || group->host_name_of_rank == NULL) {
        return HORO_ERR_RESOURCE;
    }
    group->host = setup->host_of_rank[setup->rank];
    for (int r = 0; r < setup->size; r++) {
        const int host = setup->host_of_rank[r];
        group->host_of_rank[r] = host;
        group->host_name_of_rank[r] = strdup(setup->host_name_of_rank[r]);
        if (group->host_name_of_rank[r] == NULL) {
            return HORO_ERR_RESOURCE;
        }
        if (group->host_size[host]++ == 0) {
            group->leader_of_host[host] = r;
            group->host_count = host + 1;
        }
        if (host == group->host) {
            if (r == setup->rank) {
                group->local_rank = group->local_size;
            }
            group->rank_of_local[group->local_size++] = r;
        }
    }
    list_by_host(group);
    group->owner_count = INT_MAX;
    for (int h = 0; h < group->host_count; h++) {
        group->owner_count = group->host_size[h] < group->owner_count ? group->host_size[h] : group->owner_count;
    }
    return HORO_OK;
}

static int allocate(struct hr_group *group) {
    const size_t local = (size_t)group->local_size;
    group->wake_fds = calloc(local, sizeof *group->wake_fds);
    group->life_fds = calloc(local, sizeof *group->life_fds);
    group->owned_fds = calloc(2 * local + 1, sizeof *group->owned_fds);
    group->sources = calloc(local, sizeof *group->sources);
    group->poll_capacity = 1 + local + 2 * (size_t)group->host_count;
    group->poll_fds = calloc(group->poll_capacity, sizeof *group->poll_fds);
    if (group->wake_fds == NULL || group->life_fds == NULL || group->owned_fds == NULL || group->sources == NULL ||
        group->poll_fds == NULL) {
        return HORO_ERR_RESOURCE;
    }
    return HORO_OK;
}

static void own(struct hr_group *group, int fd) {
    if (fd >= 0) {
        group->owned_fds[group->owned_fd_count++] = fd;
    }
}

static void free_places(struct hr_group *group) {
    for (int r = 0; r < group->size && group->host_name_of_rank != NULL; r++) {
        free(group->host_name_of_rank[r]);
    }
    free(group->host_name_of_rank);
    free(group->host_of_rank);
    free(group->rank_of_local);
    free(group->rank_by_host);
    free(group->leader_of_host);
    free(group->host_size);
    free(group->core_of);
    free(group->wake_fds);
    free((void *)group->life_fds);
    free(group->owned_fds);
    free((void *)group->sources);
    free(group->poll_fds);
}

/*
 * The transport gets duplicates, so that the caller's descriptors stay the caller's until everything stands. None of none.
 */
static int duplicate(const int32_t *fds, int count, int **out) {
    if (fds == NULL) {
        return HORO_OK;
    }
    int *copies = malloc((size_t)count * sizeof *copies);
    if (copies == NULL) {
        return HORO_ERR_RESOURCE;
    }
    for (int i = 0; i < count; i++) {
        copies[i] = fds[i] < 0 ? -1 : fcntl(fds[i], F_DUPFD_CLOEXEC, 0);
    }
    *out = copies;
    return HORO_OK;
}

static void close_all(const int32_t *fds, int count) {
    for (int i = 0; fds != NULL && i < count; i++) {
        if (fds[i] >= 0) {
            (void)close(fds[i]);
        }
    }
}

static int check_mpi_peers(const struct hr_group *group, const horo_mpi *mpi, struct hr_error *error) {
    for (int host = 0; mpi->rank_of_host != NULL && host < group->host_count && group->local_rank < group->owner_count; host++) {
        if (host != group->host && mpi->rank_of_host[host] < 0) {
            return hr_fail(error, HORO_ERR_USAGE, "data is to travel by MPI, but no rank of host %d is given", host);
        }
    }
    return HORO_OK;
}

/* Data by MPI beside the sockets, which become a part of what is returned or are destroyed. */
static struct hr_transport *add_mpi(struct hr_group *group, struct hr_transport *sockets, const int *control,
                                    const horo_setup *setup, struct hr_error *error) {
    struct hr_transport *transport = NULL;
    if (check_mpi_peers(group, setup->mpi, error) == HORO_OK) {
        transport = hr_mpi_transport_create(&group->mpi, sockets, control, group->host_count, setup->peer_timeout_ms, error);
    }
    if (transport == NULL) {
        sockets->ops->destroy(sockets);
    }
    return transport;
}

static int connect_transport(struct hr_group *group, const horo_setup *setup, struct hr_error *error) {
    const int by_mpi = setup->mpi != NULL && setup->mpi->is_transport;
    int *control = NULL;
    int *data = NULL;
    struct hr_transport *sockets = NULL;
    if (duplicate(setup->control_fds, group->host_count, &control) == HORO_OK &&
        (by_mpi || duplicate(setup->data_fds, group->host_count, &data) == HORO_OK)) {
        sockets = hr_tcp_create(control, data, group->host_count, setup->peer_timeout_ms, error);
    }
    if (sockets != NULL) {
        group->transport = by_mpi ? add_mpi(group, sockets, control, setup, error) : sockets;
    } else {
        (void)hr_fail(error, HORO_ERR_RESOURCE, "out of memory for connections to %d hosts", group->host_count);
        close_all(control, group->host_count);
        close_all(data, group->host_count);
    }
    free(control);
    free(data);
    return group->transport == NULL ? error->code : HORO_OK;
}

static int connect_parts(struct hr_group *group, const horo_setup *setup, struct hr_error *error) {
    HR_TRY(hr_arena_map(&group->arena, setup->arena_memory, setup->arena_fd, group->local_rank, group->local_size,
                        (size_t)setup->segment_bytes, error));
    if (group->host_count > 1) {
        const int status = connect_transport(group, setup, error);
        if (status != HORO_OK) {
            hr_arena_unmap(&group->arena);
            return status;
        }
    }
    return HORO_OK;
}

int hr_group_init(struct hr_group *group, const horo_setup *setup, struct hr_error *error) {
    HR_TRY(check_setup(setup, error));
    *group = (struct hr_group){
        .rank = setup->rank,
        .size = setup->size,
        .kernel = hr_kernel_best(),
        .peer_timeout_ns = (int64_t)setup->peer_timeout_ms * 1000000,
        .stall_warning_ns = (int64_t)setup->stall_warning_ms * 1000000,
        .stall_shutdown_ns = (int64_t)setup->stall_shutdown_ms * 1000000,
        .log = {.level = setup->log_level, .rank = setup->rank},
    };
    HR_TRY(setup->mpi == NULL ? HORO_OK : hr_mpi_init(&group->mpi, setup->mpi, error));
    int status = find_places(group, setup);
    if (status == HORO_OK) {
        status = allocate(group);
    }
    if (status != HORO_OK) {
        (void)hr_fail(error, HORO_ERR_RESOURCE, "out of memory for a group of %d ranks", setup->size);
    } else {
        status = connect_parts(group, setup, error);
    }
    group->mpi.calls.rank_of_host = group->mpi.calls.send_tags = group->mpi.calls.recv_tags = NULL;
    if (status != HORO_OK) {
        free_places(group);
        return status;
    }
    for (int i = 0; i < group->local_size; i++) {
        group->wake_fds[i] = setup->wake_fds[i];
        atomic_store(&group->life_fds[i], i == group->local_rank ? -1 : setup->life_fds[i]);
    }
    atomic_store(&group->arena.blocks[group->local_rank].state, HR_MEMBER_PRESENT);
    return HORO_OK;
}

void hr_group_own(struct hr_group *group, const horo_setup *setup) {
    for (int i = 0; i < group->local_size; i++) {
        own(group, setup->wake_fds[i]);
        own(group, i == group->local_rank ? -1 : setup->life_fds[i]);
    }
    own(group, setup->arena_fd);
    if (group->host_count > 1) {
        close_all(setup->control_fds, group->host_count); /* the transport has its own */
        close_all(setup->data_fds, group->host_count);
    }
}

void hr_group_close_fds(struct hr_group *group) {
    if (group->transport != NULL) {
        group->transport->ops->destroy(group->transport);
        group->transport = NULL;
    }
    for (int i = 0; i < group->owned_fd_count; i++) {
        (void)close(group->owned_fds[i]);
    }
    group->owned_fd_count = 0;
}

void hr_group_fini(struct hr_group *group) {
    hr_group_close_fds(group);
    if (atomic_load(&group->mpi.stranded) == 0) {
        hr_arena_unmap(&group->arena);
        free(group->cross_scratch);
    } /* else MPI may still touch them: better lost than written to when they are somebody else's */
    free_places(group);
}
