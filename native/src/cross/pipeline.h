/*
 * The common part of all algorithms between hosts. An algorithm is a list of steps: in each, a member sends one part of
 * the data to one peer and receives one part from another, which replaces its own or is reduced into it. Every part is
 * cut into the same number of pieces, so the pieces of all steps form one sequence
 *
 *     q = step * piece_count + piece
 *
 * and one rule covers the flow of data: a piece may be sent once the same piece of an earlier step, the one before
 * unless the plan names another, is finished (has come and is reduced). Pieces finish in the order of q, whatever order
 * they come in, so the order of summation depends on nothing but the call.
 *
 * Why it cannot hang: what q waits for at any member (the same piece of an earlier step, its own send, a place in the
 * window) has a smaller q at some member, or is the same q on the other side of the link.
 */
#ifndef HR_CROSS_PIPELINE_H
#define HR_CROSS_PIPELINE_H

#include "cross/cross.h"

enum hr_arrival {
    HR_ARRIVAL_REPLACES = 0,      /* received straight into the data */
    HR_ARRIVAL_IS_LEFT = 1,       /* data = received op data */
    HR_ARRIVAL_IS_RIGHT = 2,      /* data = data op received */
};

/* The work of this member in one step; a peer of -1 means that it does not send or receive. */
struct hr_step {
    int send_peer;
    int recv_peer;
    size_t send_part;
    size_t recv_part;
    enum hr_arrival arrival;
    /* the step that brings what this one sends; -1: it is here from the beginning. Preset to the step before. */
    int after;
};

/* Whether the call has parts of any bytes: of an algorithm that only moves them. */
int hr_cross_has_byte_parts(const struct hr_cross_call *call);

/* Bytes of scratch for the pieces in flight of parts of at most part_bytes; as scratch_bytes of struct hr_cross_ops. */
size_t hr_pipeline_scratch_bytes(int host_count, size_t block_bytes, size_t part_bytes, size_t piece_bytes);

#endif
