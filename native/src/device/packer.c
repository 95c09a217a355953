#include "device/packer.h"

static const char *const names[] = {
    [HR_PACKER_IN] = "hr_pack",
    [HR_PACKER_OUT] = "hr_unpack",
    [HR_PACKER_MULTIPLY] = "hr_adasum_multiply",
    [HR_PACKER_FOLD] = "hr_adasum_fold",
    [HR_PACKER_TOTAL] = "hr_adasum_total",
    [HR_PACKER_COMBINE] = "hr_adasum_combine",
};

_Static_assert((int)HR_PACK_UINT8 == HORO_UINT8 && (int)HR_PACK_INT8 == HORO_INT8 &&
                   (int)HR_PACK_INT16 == HORO_INT16 && (int)HR_PACK_INT32 == HORO_INT32 &&
                   (int)HR_PACK_INT64 == HORO_INT64 && (int)HR_PACK_FLOAT16 == HORO_FLOAT16 &&
                   (int)HR_PACK_BFLOAT16 == HORO_BFLOAT16 && (int)HR_PACK_FLOAT32 == HORO_FLOAT32 &&
                   (int)HR_PACK_FLOAT64 == HORO_FLOAT64 && (int)HR_PACK_BOOL == HORO_BOOL,
               "kernels and host number the dtypes alike");
_Static_assert(sizeof(struct hr_pack_piece) == 56 && sizeof(struct hr_adasum_piece) == 40 &&
                   sizeof(struct hr_adasum_batch) == 40,
               "compilers of the host and of the GPU lay them out alike");

/* With the device entered. */
static int load(struct hr_packer *packer, struct hr_error *error) {
    const struct hr_cuda *cuda = packer->device->cuda;
    HR_TRY(hr_cuda_check(cuda, cuda->module_load_data(&packer->module, hr_kernels_text), "cuModuleLoadData", error));
    for (int k = 0; k < HR_PACKER_KERNELS; k++) {
        const int status =
            hr_cuda_check(cuda, cuda->module_get_function(&packer->kernels[k], packer->module, names[k]),
                          "cuModuleGetFunction", error);
        if (status != HORO_OK) {
            (void)cuda->module_unload(packer->module);
            return status;
        }
    }
    return HORO_OK;
}

int hr_packer_load(struct hr_packer *packer, struct hr_device *device, struct hr_error *error) {
    struct hr_device_visit visit;
    *packer = (struct hr_packer){.device = device};
    int status = hr_device_enter(device, &visit, error);
    if (status == HORO_OK) {
        status = load(packer, error);
        hr_device_leave(device, &visit);
    }
    if (status != HORO_OK) {
        *packer = (struct hr_packer){0};
    }
    return status;
}

void hr_packer_unload(struct hr_packer *packer) {
    struct hr_error ignored = {0};
    struct hr_device_visit visit;
    if (packer->device != NULL && hr_device_enter(packer->device, &visit, &ignored) == HORO_OK) {
        (void)packer->device->cuda->module_unload(packer->module);
        hr_device_leave(packer->device, &visit);
    }
    *packer = (struct hr_packer){0};
}

unsigned hr_packer_number(struct hr_pack_piece *pieces, size_t count) {
    unsigned blocks = 0;
    for (size_t i = 0; i < count; i++) {
        pieces[i].first_block = blocks;
        blocks += (unsigned)((pieces[i].count - 1) / HR_PACK_BLOCK_ELEMENTS + 1);
    }
    return blocks;
}

int hr_packer_launch(const struct hr_packer *packer, enum hr_packer_kernel kernel, uint64_t table, size_t number,
                     unsigned blocks, void *stream, struct hr_error *error) {
    const struct hr_cuda *cuda = packer->device->cuda;
    unsigned second = (unsigned)number;
    void *arguments[] = {&table, &second};
    return hr_cuda_check(cuda,
                         cuda->launch_kernel(packer->kernels[kernel], blocks, 1, 1, HR_PACK_THREADS, 1, 1, 0, stream,
                                             arguments, NULL),
                         "cuLaunchKernel", error);
}
