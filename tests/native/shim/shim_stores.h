/* The choice between ordinary stores into slots and those past the cache. */
#ifndef SHIM_STORES_H
#define SHIM_STORES_H

/* cffi: skip */
#include <stddef.h>
#include <stdint.h>
/* cffi: end */

/* What a rank has learnt of reduce-scatters: what an ordinary store costs in 1/1000 ns a byte; 0: not known. */
int64_t shim_stores_scatter_cost(const void *context);

typedef struct shim_stores shim_stores;

/* Of operations whose costs a test makes up. */
shim_stores *shim_stores_create(void);
void shim_stores_destroy(shim_stores *self);
/* Whether the next operation stores past the cache. */
int shim_stores_try(shim_stores *self, size_t bytes);
/* It has taken so long. */
void shim_stores_learn(shim_stores *self, int64_t elapsed_ns);

#endif
