/* The algorithms between hosts as plain functions, all members in one thread. */
#ifndef SHIM_CROSS_H
#define SHIM_CROSS_H

/* cffi: skip */
#include <stddef.h>
#include <stdint.h>
/* cffi: end */

enum shim_algorithm {
    SHIM_RING = 0,
    SHIM_DOUBLING = 1,
    SHIM_TREE = 2,
    SHIM_CHAIN = 3,
    SHIM_GATHER_RING = 4,
    SHIM_GATHER_DOUBLING = 5,
    SHIM_SCATTER_RING = 6,
};

typedef struct {
    int algorithm;
    int host_count;
    size_t count;
    int dtype;
    int reduce_op;
    int root_host;
    size_t piece_bytes;
    /* allgather and reduce-scatter only: [host_count], at most 32; they lie one behind the other in the data */
    const size_t *part_bytes;
} shim_cross_call;

/* The share of owner `index` in a segment of `bytes`, and the most that any share of no more may have. */
void shim_share(size_t bytes, int index, int owners, size_t *offset, size_t *length);
size_t shim_share_most(size_t bytes, int owners);

/* What an allreduce between hosts reserves for segments of up to `segment_bytes`, and what this share of one needs. */
size_t shim_two_level_reserved(int hosts, int owners, size_t value_bytes, size_t segment_bytes);
size_t shim_two_level_needed(int hosts, int owners, size_t value_bytes, size_t segment_bytes, int index);

/*
 * All members in this thread, driven in an order drawn from `seed`, over the links of the rule, which move so many
 * bytes at once (0: any). When hosts cut_a and cut_b (or -1) have made cut_turn turns in all, their link is cut; a
 * member with an error closes its end. Fills statuses (HORO_IN_PROGRESS: not over after very many turns) and the bytes
 * that each member sent. HORO_OK, HORO_ERR_RESOURCE, or HORO_ERR_USAGE if memory in use was received into.
 */
int shim_cross_simulate(const shim_cross_call *call, void *const *data, size_t link_piece_bytes, uint64_t seed,
                        int cut_a, int cut_b, int cut_turn, int *statuses, size_t *sent_bytes);

/* Whether two hosts have a link on a channel, as the core sees it. */
int shim_hosts_are_linked(int channel, int host_count, int host, int other);

#endif
