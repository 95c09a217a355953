#include "device/fill.h"

/* The driver has no function for this width: the first element by halves, and then twice as many from those. */
static int fill_wide(const struct hr_cuda *cuda, uint64_t data, size_t bytes, uint64_t bits, void *stream,
                     struct hr_error *error) {
    size_t done = sizeof bits;
    HR_TRY(hr_cuda_check(cuda, cuda->memset_32(data, (unsigned)bits, 1, stream), "cuMemsetD32Async", error));
    HR_TRY(hr_cuda_check(cuda, cuda->memset_32(data + done / 2, (unsigned)(bits >> 32), 1, stream), "cuMemsetD32Async",
                         error));
    while (done < bytes) {
        const size_t part = bytes - done < done ? bytes - done : done;
        HR_TRY(hr_cuda_check(cuda, cuda->copy(data + done, data, part, stream), "cuMemcpyAsync", error));
        done += part;
    }
    return HORO_OK;
}

int hr_device_fill(const struct hr_device *device, void *data, size_t bytes, size_t width, uint64_t bits, void *stream,
                   struct hr_error *error) {
    const struct hr_cuda *cuda = device->cuda;
    const uint64_t at = (uint64_t)(uintptr_t)data;
    if (bytes == 0) {
        return HORO_OK;
    }
    if (width == 8 && bits >> 32 != (bits & UINT32_MAX)) {
        return fill_wide(cuda, at, bytes, bits, stream, error);
    }
    switch (width) {
    case 1:
        return hr_cuda_check(cuda, cuda->memset_8(at, (unsigned char)bits, bytes, stream), "cuMemsetD8Async", error);
    case 2:
        return hr_cuda_check(cuda, cuda->memset_16(at, (unsigned short)bits, bytes / 2, stream), "cuMemsetD16Async",
                             error);
    default:
        return hr_cuda_check(cuda, cuda->memset_32(at, (unsigned)bits, bytes / 4, stream), "cuMemsetD32Async", error);
    }
}
