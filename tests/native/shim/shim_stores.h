/* What a rank has learnt of stores into slots. */
#ifndef SHIM_STORES_H
#define SHIM_STORES_H

#include <stdint.h>

/* The number of segments of allreduces in the world whose time it has learnt from. While it has nothing to do. */
uint64_t shim_stores_passes(const void *context);
/* How often it has begun to wait for values on their way to it, and such a wait was over. At any time. */
uint64_t shim_stores_input_waits(const void *context);

#endif
