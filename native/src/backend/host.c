/* Collectives on host memory: turns operands into fused vectors for the algorithms. */
#include <stdlib.h>
#include <string.h>

#include "backend/operands.h"
#include "collective/collective.h"

struct host_backend {
    struct hr_backend base;
    struct hr_group *group;
    struct hr_pieces pieces;
};

static int reduce_fused(void *group, const struct hr_fused *fused, int reduce_op, double prescale,
                        struct hr_scale postscale) {
    return hr_allreduce(group, fused, reduce_op, prescale, postscale);
}

static int host_allreduce(struct hr_backend *backend, const struct hr_operand *operands, size_t count, int reduce_op,
                          double prescale, double postscale) {
    struct host_backend *host = (struct host_backend *)backend;
    return hr_reduce_kinds(&host->pieces, operands, count, host->group->size, reduce_op, prescale, postscale, reduce_fused,
                           host->group);
}

static int host_broadcast(struct hr_backend *backend, const struct hr_operand *operands, size_t count, int root_rank) {
    struct host_backend *host = (struct host_backend *)backend;
    HR_TRY(hr_pieces_reserve(&host->pieces, count));
    const struct hr_fused fused = hr_fuse_bytes(host->pieces.at, operands, count);
    return hr_broadcast(host->group, &fused, root_rank);
}

/* Everybody learns everybody's rows: a sum in which each rank fills in only its own place. table[r * count + i]. */
static int exchange_rows(struct hr_group *group, const int64_t *rows, size_t count, int64_t *table) {
    memcpy(table + (size_t)group->rank * count, rows, count * sizeof *rows);
    const size_t bytes = (size_t)group->size * count * sizeof *table;
    const struct hr_piece piece = {(const char *)table, (char *)table, 0, bytes};
    const struct hr_fused fused = {.pieces = &piece, .count = bytes > 0, .bytes = bytes, .dtype = HORO_INT64};
    return hr_allreduce(group, &fused, HORO_SUM, 1.0, hr_scale_by(1.0));
}

/* For each rank, its contributions to all tensors as one vector with the places here as outputs. */
static void place_contributions(const struct hr_group *group, const struct hr_operand *operands, const size_t *row_bytes,
                                size_t count, const struct hr_gathered *results, struct hr_piece *pieces,
                                struct hr_fused *by_rank, size_t *offsets) {
    memset(offsets, 0, count * sizeof *offsets);
    for (int r = 0; r < group->size; r++) {
        struct hr_piece *mine = pieces + (size_t)r * count;
        by_rank[r] = (struct hr_fused){.pieces = mine, .dtype = HORO_UINT8};
        for (size_t i = 0; i < count; i++) {
            const size_t bytes = (size_t)results[i].first_dims[r] * row_bytes[i];
            hr_fuse_append(&by_rank[r], mine, operands[i].input, (char *)results[i].data + offsets[i], bytes);
            offsets[i] += bytes;
        }
    }
}

static int host_allgather(struct hr_backend *backend, const struct hr_operand *operands, const int64_t *rows,
                          const size_t *row_bytes, size_t count, struct hr_gathered *results) {
    struct host_backend *host = (struct host_backend *)backend;
    struct hr_group *group = host->group;
    const size_t size = (size_t)group->size;
    int64_t *table = calloc(size * count, sizeof *table);
    struct hr_fused *by_rank = calloc(size, sizeof *by_rank);
    size_t *offsets = calloc(count, sizeof *offsets);
    int status = table == NULL || by_rank == NULL || offsets == NULL ? HORO_ERR_RESOURCE : HORO_OK;
    if (status == HORO_OK) {
        status = hr_pieces_reserve(&host->pieces, size * count);
    }
    if (status == HORO_OK) {
        status = exchange_rows(group, rows, count, table);
    }
    if (status == HORO_OK) {
        status = hr_gathered_allocate(group->size, table, row_bytes, count, results);
    }
    if (status == HORO_OK) {
        place_contributions(group, operands, row_bytes, count, results, host->pieces.at, by_rank, offsets);
        status = hr_allgather(group, by_rank);
    }
    if (status != HORO_OK && atomic_load(&group->mpi.stranded) != 0) {
        hr_gathered_disown(results, count);
    }
    free(table);
    free(by_rank);
    free(offsets);
    return status;
}

static void host_destroy(struct hr_backend *backend) {
    struct host_backend *host = (struct host_backend *)backend;
    if (host != NULL) {
        hr_pieces_fini(&host->pieces);
        free(host);
    }
}

static const struct hr_backend_ops host_ops = {
    .name = "host",
    .allreduce = host_allreduce,
    .broadcast = host_broadcast,
    .allgather = host_allgather,
    .destroy = host_destroy,
};

struct hr_backend *hr_host_backend_create(struct hr_group *group) {
    struct host_backend *host = calloc(1, sizeof *host);
    if (host == NULL) {
        return NULL;
    }
    host->base.ops = &host_ops;
    host->group = group;
    return &host->base;
}
