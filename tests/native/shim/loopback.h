/*
 * In-process transport: all ranks that share a hub can talk. `delay_polls` makes every byte range arrive only after that many
 * progress calls of the receiver and in pieces of at most `piece_bytes` (0: whole), to try odd timings without sleeping.
 */
#ifndef LOOPBACK_H
#define LOOPBACK_H

#include "transport/transport.h"

struct loopback_hub;
struct loopback_hub *loopback_hub_create(int host_count, int delay_polls, size_t piece_bytes);
void loopback_hub_destroy(struct loopback_hub *hub); /* after all its transports */
/* A rank of host `host` with local index `lane` (lanes do not see each other; control uses lane 0). */
struct hr_transport *loopback_create(struct loopback_hub *hub, int host, int lane, struct hr_error *error);
/* Cuts the link between two hosts on all lanes and channels, as a crash of one would. */
void loopback_hub_cut(struct loopback_hub *hub, int host_a, int host_b);

#endif
