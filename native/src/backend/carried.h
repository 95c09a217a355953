/*
 * The arithmetic of a small allreduce that needs no collective: its data travels up the tree of agreement with the
 * announcements, as packed values, and its result travels down in the record of the log. All functions look at one
 * request of one tensor, of which ranks that have agreed on it have the same but for the memory.
 */
#ifndef HR_BACKEND_CARRIED_H
#define HR_BACKEND_CARRIED_H

#include "backend/backend.h"

/* The packed bytes of the request's values; 0: it cannot be carried, or is too large to be, in this team. */
size_t hr_carried_bytes(const struct hr_team *team, const horo_request *call);

/* This rank's values, packed. */
void hr_carried_pack(const struct hr_team *team, const horo_request *call, void *packed);

/*
 * The reduction of `count` contributions, in the order in which they are given, into `packed`, which may be the first
 * of them; at the root, whose contributions are those of all ranks, also what comes after the reduction.
 */
void hr_carried_reduce(const struct hr_team *team, const horo_request *call, const void *const *contributions,
                       int count, int is_root, void *packed);

/* The result, from the root. Equal on all ranks, to the bit. */
void hr_carried_unpack(const struct hr_team *team, const horo_request *call, const void *packed);

#endif
