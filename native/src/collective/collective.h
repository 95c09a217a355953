/*
 * Whole collectives on host memory for all ranks of a group. Blocking; called by the driver with group->in_batch set.
 * Every rank calls the same function with the same sizes in the same order. HORO_OK, or the code with which the group ended.
 *
 * Words: a *segment* is the pipeline piece that fits one arena slot; a *share* is the part of a segment that one *owner* reduces;
 * the owners are the local ranks below group->owner_count, the same on every host.
 */
#ifndef HR_COLLECTIVE_COLLECTIVE_H
#define HR_COLLECTIVE_COLLECTIVE_H

#include "collective/cross.h"
#include "collective/fused.h"
#include "collective/group.h"

/* Pipeline piece of what travels between hosts; equal on all ranks. */
enum { HR_CROSS_PIECE_BYTES = 1 << 17 };

/*
 * outputs = postscale * reduce over ranks of (prescale * inputs). reduce_op is SUM, MIN, MAX or PRODUCT. An input may be its output.
 * With fused->wide_dtype, (prescale * inputs) are rounded to fused->dtype first, what comes out of the reduction is rounded to it by
 * the same rules as ever, and outputs are that, widened; so all ranks get the same bits, as they do without.
 * Per rank and byte of data on one host of p ranks: copies (p-1)/p in, reads p/p and writes 2/p for the share, copies (p-1)/p out.
 */
int hr_allreduce(struct hr_group *group, const struct hr_fused *fused, int reduce_op, double prescale,
                 struct hr_scale postscale);

/*
 * What partial results are multiplied by before they travel, so that the factor of postscale is divided by it. A sum of float16 may
 * leave their range though the average of all does not. So the power of two in a factor below 1 is taken in before; that is exact, but
 * for values so small that float16 holds fewer bits of them. 1 for everything else.
 */
double hr_partial_scale(int dtype, int reduce_op, double postscale);

/* outputs = inputs of root_rank; on the root an output may be its input. Byte-wise; fused->dtype is not looked at. */
int hr_broadcast(struct hr_group *group, const struct hr_fused *fused, int root_rank);

/*
 * by_rank[r] describes rank r's contribution (its bytes may differ by rank): by_rank[group->rank] holds my inputs, and the outputs of
 * all of them are where rank r's data goes here. Between hosts each link carries all that is not its receiver's own, once.
 */
int hr_allgather(struct hr_group *group, const struct hr_fused *by_rank);

#endif
