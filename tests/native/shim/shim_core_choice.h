/* The choice of a core for tests. */
#ifndef SHIM_CORE_CHOICE_H
#define SHIM_CORE_CHOICE_H

/* cffi: skip */
#include <stdint.h>
/* cffi: end */

/* hr_core_choose with the allowed cores as a list. */
int shim_core_choose(const int *core_of, int count, int me, const int *allowed, int allowed_count);

/* Of rank 0 of a host whose ranks run on these cores, counted from 1, or do not tell: 0. -1: no memory. */
int shim_core_is_shared(const int32_t *core_of, const uint32_t *sleeping, int count);

#endif
