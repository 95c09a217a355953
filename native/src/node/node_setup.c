#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "node/team.h"
#include "node/watch.h"

static hr_status allocate(struct hr_node *node, const horo_setup *setup, const struct hr_team *world) {
    const size_t local = (size_t)world->local_size;
    node->local_rank = world->local_rank;
    node->local_size = world->local_size;
    node->rank_of_local = calloc(4 * local, sizeof *node->rank_of_local); /* and the lists behind it */
    node->host_name_of_rank = calloc((size_t)node->size, sizeof *node->host_name_of_rank);
    if (node->rank_of_local == NULL || node->host_name_of_rank == NULL ||
        hr_sleep_reserve(&node->sleep, 1) != HORO_OK) {
        return HORO_ERR_RESOURCE;
    }
    node->core_choice.core_of = node->rank_of_local + local;
    node->life_fds = node->rank_of_local + 2 * local;
    node->wake_fds = node->host_count == 1 ? NULL : node->rank_of_local + 3 * local;
    memcpy(node->rank_of_local, world->rank_of_local, local * sizeof *node->rank_of_local);
    for (int i = 0; i < node->local_size; i++) {
        node->life_fds[i] = i == node->local_rank ? -1 : setup->life_fds[i];
        if (node->wake_fds != NULL) {
            node->wake_fds[i] = setup->wake_fds[i];
        }
    }
    for (int r = 0; r < node->size; r++) {
        node->host_name_of_rank[r] = strdup(setup->host_name_of_rank[r]);
        if (node->host_name_of_rank[r] == NULL) {
            return HORO_ERR_RESOURCE;
        }
    }
    return hr_recorder_init(&node->recorder);
}

static void free_places(struct hr_node *node) {
    for (int r = 0; r < node->size && node->host_name_of_rank != NULL; r++) {
        free(node->host_name_of_rank[r]);
    }
    free(node->host_name_of_rank);
    free(node->rank_of_local);
    free(node->sleep.fds);
    free((void *)node->transports);
    hr_recorder_fini(&node->recorder);
}

static void close_all(const int32_t *fds, int count) {
    for (int i = 0; fds != NULL && i < count; i++) {
        if (fds[i] >= 0) {
            (void)close(fds[i]);
        }
    }
}

/* The transport gets duplicates: the caller keeps its descriptors until everything stands. None of none. */
static hr_status duplicate(const int32_t *fds, int host_count, int per_host, int **out, struct hr_error *error) {
    if (fds == NULL) {
        return HORO_OK;
    }
    const int count = host_count * per_host;
    int *copies = malloc((size_t)count * sizeof *copies);
    if (copies == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for connections to %d hosts", host_count);
    }
    for (int i = 0; i < count; i++) {
        copies[i] = fds[i] < 0 ? -1 : fcntl(fds[i], F_DUPFD_CLOEXEC, 0);
        if (fds[i] >= 0 && copies[i] < 0) {
            const int code = errno == EMFILE ? HORO_ERR_RESOURCE : HORO_ERR_USAGE;
            (void)hr_fail(error, code, "cannot duplicate descriptor %d for host %d: %s", fds[i], i / per_host,
                          strerror(errno));
            close_all(copies, i);
            free(copies);
            return code;
        }
    }
    *out = copies;
    return HORO_OK;
}

/*
 * Whether this rank was given all links that it needs, in the words of horo_setup and horo_team_setup: a leader those
 * for control, a local index below owner_count those for data. An array that is NULL is not looked at: there are no
 * such links, on purpose, and posting to one fails.
 */
static hr_status check_links(const struct hr_team *team, enum hr_channel channel, const int32_t *fds,
                             struct hr_error *error) {
    const struct hr_node *node = team->node;
    const int is_control = channel == HR_CHANNEL_CONTROL;
    const int sockets = is_control ? 1 : node->sockets_per_peer;
    const int needs_links = fds != NULL && team->local_rank < (is_control ? 1 : team->owner_count);
    for (int host = 0; needs_links && host < team->host_count; host++) {
        for (int i = 0; i < sockets && hr_hosts_are_linked(channel, team->host_count, team->host, host); i++) {
            if (fds[host * sockets + i] < 0) {
                return hr_fail(error, HORO_ERR_USAGE,
                               "rank %d on host %d (%s) was given no connection for %s to host %d (%s)", node->rank,
                               team->host, node->host_name_of_rank[node->rank], is_control ? "agreement" : "data",
                               host, node->host_name_of_rank[team->job_rank[team->leader_of_host[host]]]);
            }
        }
    }
    return HORO_OK;
}

/* Over duplicates of the descriptors; *control has those for control, NULL or to be freed. NULL: *error. */
static struct hr_transport *connect_sockets(const struct hr_team *team, const int32_t *control_fds,
                                            const int32_t *data_fds, int **control, struct hr_error *error) {
    const struct hr_node *node = team->node;
    const int host_count = team->host_count;
    int *data = NULL;
    struct hr_transport *sockets = NULL;
    if (check_links(team, HR_CHANNEL_CONTROL, control_fds, error) == HORO_OK &&
        check_links(team, HR_CHANNEL_DATA, data_fds, error) == HORO_OK &&
        duplicate(control_fds, host_count, 1, control, error) == HORO_OK &&
        duplicate(data_fds, host_count, node->sockets_per_peer, &data, error) == HORO_OK) {
        sockets = hr_tcp_create(*control, data, host_count, node->sockets_per_peer,
                                (int)(node->peer_timeout_ns / 1000000), error);
    }
    if (sockets == NULL) {
        close_all(*control, host_count);
        close_all(data, host_count * node->sockets_per_peer);
    }
    free(data);
    return sockets;
}

static hr_status connect_world(struct hr_node *node, const horo_setup *setup, struct hr_team *world,
                               struct hr_error *error) {
    const int by_mpi = setup->mpi != NULL;
    int *control = NULL;
    struct hr_transport *sockets =
        connect_sockets(world, setup->control_fds, by_mpi ? NULL : setup->data_fds, &control, error);
    struct hr_transport *transport = sockets;
    if (sockets != NULL && by_mpi) { /* data by MPI beside the sockets, which become a part of that transport */
        const int32_t *ranks = world->local_rank < world->owner_count ? setup->mpi->rank_of_host : NULL;
        for (int host = 0; ranks != NULL && host < world->host_count; host++) {
            if (hr_hosts_are_linked(HR_CHANNEL_DATA, world->host_count, world->host, host) && ranks[host] < 0) {
                (void)hr_fail(error, HORO_ERR_USAGE, "data is to travel by MPI, but no rank of host %d is given", host);
            }
        }
        transport = error->code != HORO_OK ? NULL
                                           : hr_mpi_transport_create(&node->mpi, sockets, control, node->host_count,
                                                                     setup->peer_timeout_ms, error);
        if (transport == NULL) {
            sockets->ops->destroy(sockets);
        }
    }
    free(control);
    world->transport = transport;
    if (transport != NULL && hr_node_add_transport(node, transport) != HORO_OK) {
        (void)hr_fail(error, HORO_ERR_RESOURCE, "out of memory for links to %d hosts", node->host_count);
    }
    return error->code;
}

hr_status hr_node_connect_team(struct hr_team *team, const int32_t *control_fds, const int32_t *data_fds,
                               struct hr_error *error) {
    if (control_fds == NULL || data_fds == NULL) {
        return hr_fail(error, HORO_ERR_USAGE,
                       "the members of this team are on %d hosts, but no connections between them were given",
                       team->host_count);
    }
    int *control = NULL;
    team->transport = connect_sockets(team, control_fds, data_fds, &control, error);
    free(control);
    return team->transport == NULL ? error->code : HORO_OK;
}

void hr_node_close_links(const struct hr_node *node, int host_count, const int32_t *control_fds,
                         const int32_t *data_fds) {
    close_all(control_fds, host_count);
    close_all(data_fds, host_count * node->sockets_per_peer);
}

static int connect_parts(struct hr_node *node, const horo_setup *setup, struct hr_team *world, struct hr_error *error) {
    HR_TRY(hr_arena_map(&node->arena, setup->arena_memory, (size_t)setup->arena_memory_bytes, setup->arena_fd,
                        node->local_rank, node->local_size, (size_t)setup->segment_bytes, error));
    int status = hr_partition_map(&node->arena, world->number, &world->partition, error);
    if (status == HORO_OK && node->host_count > 1) {
        status = connect_world(node, setup, world, error);
    }
    if (status == HORO_OK && node->watch != NULL) {
        status = hr_watch_add(node->watch, node, error);
    }
    if (status != HORO_OK) {
        hr_team_close_links(world);
        hr_partition_unmap(&node->arena, &world->partition);
        hr_arena_unmap(&node->arena);
    }
    return status;
}

hr_status hr_node_init(struct hr_node *node, const horo_setup *setup, struct hr_team *world, struct hr_error *error) {
    *node = (struct hr_node){
        .rank = setup->rank,
        .size = setup->size,
        .host_count = world->host_count,
        .kernel = hr_kernel_find(NULL),
        .peer_timeout_ns = (int64_t)setup->peer_timeout_ms * 1000000,
        .stall_warning_ns = (int64_t)setup->stall_warning_ms * 1000000,
        .stall_shutdown_ns = (int64_t)setup->stall_shutdown_ms * 1000000,
        .sockets_per_peer = setup->sockets_per_peer == 0 ? 1 : setup->sockets_per_peer,
        .core_choice = {.enabled = setup->leaves_crowded_cores != 0},
        .arena_fd = setup->arena_fd,
        .watch = setup->watch,
        .sleeps_under_contention = setup->sleeps_under_contention != 0,
        .log = {.level = setup->log_level, .rank = setup->rank, .queue = setup->log_queue},
    };
    if (node->sockets_per_peer < 1 || node->sockets_per_peer > HORO_SOCKETS_PER_PEER_MAX) {
        return hr_fail(error, HORO_ERR_USAGE, "sockets_per_peer must be 1 to %d, not %d", HORO_SOCKETS_PER_PEER_MAX,
                       node->sockets_per_peer);
    }
    HR_TRY(setup->mpi == NULL ? HORO_OK : hr_mpi_init(&node->mpi, setup->mpi, error));
    const int status = allocate(node, setup, world) == HORO_OK
                           ? connect_parts(node, setup, world, error)
                           : hr_fail(error, HORO_ERR_RESOURCE, "out of memory for a job of %d ranks", setup->size);
    node->mpi.calls.rank_of_host = node->mpi.calls.send_tags = node->mpi.calls.recv_tags = NULL;
    if (status != HORO_OK) {
        free_places(node);
        return status;
    }
    world->tuning.direct = (size_t)setup->direct_bytes;
    struct hr_arena_block *block = &node->arena.blocks[node->local_rank];
    /* For those who read this rank's memory (collective/direct.c): without random numbers nobody does. */
    if (getrandom(node->proof, sizeof node->proof, GRND_NONBLOCK) == (ssize_t)sizeof node->proof) {
        for (int i = 0; i < HR_PROOF_WORDS; i++) {
            atomic_store(&block->proof[i], node->proof[i]);
        }
        atomic_store(&block->proof_at, (uint64_t)(uintptr_t)node->proof);
        atomic_store(&block->process, (int32_t)getpid());
    }
    hr_partition_enter(&node->arena, world->number);
    atomic_store(&block->answers, node->log.queue != NULL && node->stall_warning_ns > 0);
    atomic_store(&block->state, HR_MEMBER_PRESENT);
    return HORO_OK;
}

void hr_node_own(struct hr_node *node, const horo_setup *setup) {
    node->owns_fds = 1;
    if (node->host_count > 1) {
        /* the transport has its own */
        hr_node_close_links(node, node->host_count, setup->control_fds, setup->data_fds);
    }
}

void hr_node_close_fds(struct hr_node *node) {
    if (node->watch != NULL) {
        hr_watch_remove(node->watch, node);
    }
    if (node->owns_fds) {
        close_all(node->wake_fds, node->local_size);
        close_all(node->life_fds, node->local_size);
        close_all(&node->arena_fd, 1);
    }
    node->owns_fds = 0;
}

static void unmap_arena(void *arena) {
    hr_arena_unmap(arena);
}

void hr_node_fini(struct hr_node *node) {
    hr_node_close_fds(node);
    hr_log_end(&node->log, &node->arena.blocks[node->local_rank].answered);
    hr_node_bury(node, &node->arena, unmap_arena);
    free_places(node);
}
