/* The last look of a wait before it sleeps, for tests. */
#ifndef SHIM_WAIT_H
#define SHIM_WAIT_H

/* cffi: skip */
#include <stdint.h>
/* cffi: end */

/*
 * Whether a wait, or what prepares a sleep, sees an event that has come when the rank has said that it sleeps, and not
 * before. For a context that nobody drives meanwhile; one that misses it sleeps until limit_ns are over.
 */
int shim_wait_looks_last(void *context, int64_t limit_ns);
int shim_wait_prepares_with_a_look(void *context);

#endif
