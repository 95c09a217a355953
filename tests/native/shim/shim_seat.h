/* The choice of a core for tests. */
#ifndef SHIM_SEAT_H
#define SHIM_SEAT_H

/* cffi: skip */
#include <stdint.h>
/* cffi: end */

/* hr_seat_choose with the allowed cores as a list. */
int shim_seat_choose(const int *core_of, int count, int me, const int *allowed, int allowed_count);

#endif
