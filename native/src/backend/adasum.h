/*
 * Adasum (S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021) of any number of ranks,
 * out of three collectives that every backend has, so that it is the same over arena, TCP and MPI.
 *
 * Two vectors a and b become a (1 - a.b / (2 a.a)) + b (1 - a.b / (2 b.b)), tensor by tensor: their sum where they are
 * orthogonal, their mean where they are equal. Ranks are combined pairwise, as a tree: 0 with 1 and 2 with 3, then what
 * came of 0 and 1 with what came of 2 and 3, and so on; who has no partner goes on unchanged.
 *
 * The values of a batch, seen as one vector, are cut into one share for each of the p ranks:
 *
 *     alltoall    every rank gets its share of what each rank has
 *     allreduce   for each of the log2(p) levels of the tree: each rank takes the scalar products of its shares, in
 *                 double, and their sums over all ranks are three numbers for each pair and tensor; with them each rank
 *                 combines its shares
 *     allgather   every rank gets all shares of the result, so that all ranks have the same bits
 *
 * Per rank and byte of data: (p-1)/p sent and received twice, as by a ring allreduce; three products of each value and
 * level. 8 (p-1) * 3 bytes of sums per tensor besides. Memory: as much as the values that travel, and once more where
 * they are several tensors, scaled, or narrowed on the way.
 */
#ifndef HR_BACKEND_ADASUM_H
#define HR_BACKEND_ADASUM_H

#include "backend/backend.h"

/*
 * Does Adasum by the collectives of `inner`, and has `inner` do all else. Owns it, also on failure: NULL for lack of
 * memory, or if `inner` is NULL. The team must outlive it.
 */
struct hr_backend *hr_adasum_create(struct hr_team *team, struct hr_backend *inner);

#endif
