/* Memory on a GPU whose elements all have one value. */
#ifndef HR_DEVICE_FILL_H
#define HR_DEVICE_FILL_H

#include <stdint.h>

#include "device/device.h"

/*
 * For a caller that has entered the device: writes the lowest `width` (1, 2, 4 or 8) bytes of `bits` into each element,
 * in the order of `stream`. The memory is the device's; it begins where an element may, and ends with one. HORO_OK, or
 * HORO_ERR_RESOURCE with a sentence.
 */
int hr_device_fill(const struct hr_device *device, void *data, size_t bytes, size_t width, uint64_t bits, void *stream,
                   struct hr_error *error);

#endif
