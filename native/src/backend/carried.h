/*
 * The arithmetic of a small allreduce that needs no collective: its data travels up the tree of agreement with the
 * announcements, as packed values, and its result travels down in the record of the log. All functions look at one
 * request of one tensor, of which ranks that have agreed on it have the same but for the memory.
 *
 * Each host first takes the sum of its own ranks, and values are scaled and rounded where a collective does that
 * (collective/allreduce.c). So on two hosts a sum has the same bits, whichever way it takes.
 */
#ifndef HR_BACKEND_CARRIED_H
#define HR_BACKEND_CARRIED_H

#include "backend/backend.h"

/*
 * The packed bytes of the request's values; 0: it cannot be carried, or is too large to be, in this team, whatever its
 * tuning: that may change between the announcements of a tensor and its record.
 */
size_t hr_carried_bytes(const struct hr_team *team, const horo_request *call);
/* Whether so many are few enough to be announced with their tensor. */
int hr_carried_pays(const struct hr_team *team, size_t bytes);

/* This rank's values, packed; where it is alone on its host, they are the host's sum. */
void hr_carried_pack(const struct hr_team *team, const horo_request *call, void *packed);

/* The host's sum, of what its several ranks have packed, in their order; `packed` may be the first of them. */
void hr_carried_reduce_host(const struct hr_team *team, const horo_request *call, const void *const *contributions,
                            void *packed);

/*
 * The sum of `count` sums of hosts, in the order in which they are given, into `packed`, which may be the first of
 * them; at the root, whose sums are those of all hosts, also what comes after the reduction.
 */
void hr_carried_reduce(const struct hr_team *team, const horo_request *call, const void *const *sums, int count,
                       int is_root, void *packed);

/* The result, from the root. Equal on all ranks, to the bit. */
void hr_carried_unpack(const struct hr_team *team, const horo_request *call, const void *packed);

#endif
