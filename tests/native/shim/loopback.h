/* In-process transport: all ranks that share a hub can talk, at odd timings without sleeping. */
#ifndef LOOPBACK_H
#define LOOPBACK_H

#include "transport/transport.h"

/* All zero: bytes arrive at once, and every link moves all it can whenever there is progress. */
struct loopback_timing {
    int delay_polls[HR_CHANNEL_COUNT]; /* bytes can be received only after so many progress calls of the receiver */
    size_t piece_bytes;                /* at most so many move at once; 0: whatever there is */
    int one_piece; /* one piece per progress call, sent or received, over all links together; they take turns */
};

struct loopback_hub;
struct loopback_hub *loopback_hub_create(int host_count, const struct loopback_timing *timing);
void loopback_hub_destroy(struct loopback_hub *hub); /* after all its transports */
/* A rank of host `host` with local index `lane` (lanes do not see each other; control uses lane 0). */
struct hr_transport *loopback_create(struct loopback_hub *hub, int host, int lane, struct hr_error *error);
/* Cuts the link between two hosts on all lanes and channels, as a crash of one would. */
void loopback_hub_cut(struct loopback_hub *hub, int host_a, int host_b);

#endif
