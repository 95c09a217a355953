/* Descriptors that ranks share. Both are closed in a process that this one becomes by exec. */
#ifndef HR_BASE_DESCRIPTOR_H
#define HR_BASE_DESCRIPTOR_H

#include <stdint.h>

#include "base/status.h"

/*
 * A memfd of `bytes` zero bytes, which can grow but never shrink, so that no other process can take mapped pages away.
 * It has no name: the kernel frees it when its last descriptor and mapping are gone. HORO_OK or HORO_ERR_RESOURCE;
 * *descriptor is set on HORO_OK.
 */
hr_status hr_descriptor_memory(uint64_t bytes, int32_t *descriptor, struct hr_error *error);

/* A nonblocking eventfd at zero. HORO_OK or HORO_ERR_RESOURCE; *descriptor is set on HORO_OK. */
hr_status hr_descriptor_event(int32_t *descriptor, struct hr_error *error);

#endif
