/* What a rank has learnt of stores into slots. */
#ifndef SHIM_STORES_H
#define SHIM_STORES_H

#include <stdint.h>

/* The number of segments of allreduces in the world whose time it has learnt from. While it has nothing to do. */
uint64_t shim_stores_passes(const void *context);
/* The same of reduce-scatters: what an ordinary store costs in a thousandth of a nanosecond a byte; 0: not known. */
int64_t shim_stores_scatter_cost(const void *context);
/* How often it has begun to wait for values on their way to it, and such a wait was over. At any time. */
uint64_t shim_stores_input_waits(const void *context);

#endif
