/* What a rank has learnt of stores into slots. */
#ifndef SHIM_STORES_H
#define SHIM_STORES_H

#include <stdint.h>

/* What an ordinary store of reduce-scatters costs in a thousandth of a nanosecond a byte; 0: not known. */
int64_t shim_stores_scatter_cost(const void *context);
#endif
