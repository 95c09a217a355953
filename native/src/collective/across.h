/*
 * An allreduce between hosts alone: each owner has reduced its part among the ranks of its host, wherever that is done,
 * and reduces it here with those of the owners of its local index on the other hosts. The part comes and goes in
 * pieces, each in memory of the caller's: two of them travel at a time, as segments do, the next one behind what the
 * one before has posted.
 *
 * For owners (local ranks below team->owner_count) of a team on several hosts. Those of one local index add the same
 * pieces in the same order. Afterwards all of them have the same bits.
 */
#ifndef HR_COLLECTIVE_ACROSS_H
#define HR_COLLECTIVE_ACROSS_H

#include "collective/segments.h"

struct hr_across {
    struct hr_team *team;
    int reduce_op;
    size_t scratch_bytes;
    size_t begun, finished; /* pieces; finished is read by the caller */
    struct hr_cross cross[HR_SEGMENTS_TRAVELLING_MAX]; /* piece k uses entry k % HR_SEGMENTS_TRAVELLING_MAX */
};

/* Pieces of at most so many bytes, of dtypes that travel as they are. HORO_OK or HORO_ERR_RESOURCE. */
int hr_across_begin(struct hr_across *across, struct hr_team *team, int reduce_op, size_t piece_bytes);
/* Whether the next piece may begin. */
int hr_across_may_add(const struct hr_across *across);
/* Begins it, in place. Its memory stays until it is finished, or all is cancelled. HORO_OK or a status. */
int hr_across_add(struct hr_across *across, const struct hr_codec *codec, void *data, size_t bytes);
/* 1: one piece more is finished; 0: none; or a status, HORO_ERR_PEER_LOST with team->suspect set. */
int hr_across_progress(struct hr_across *across);
/* Gives up what travels: nothing of it is posted any more. */
void hr_across_cancel(struct hr_across *across);

#endif
