/*
 * Kernels of horo's own on a GPU: values of many tensors go into one buffer as they travel, and out of it, scaled and
 * converted on the way as on the host (kernel/kernel.h), in one launch; and what Adasum calculates. They come as the
 * text of kernels.ptx, which the driver translates for its GPU; nothing of CUDA's tools is needed.
 */
#ifndef HR_DEVICE_PACKER_H
#define HR_DEVICE_PACKER_H

#include <stddef.h>
#include <stdint.h>

#include "device/adasum_piece.h"
#include "device/device.h"
#include "device/pack_piece.h"

/* The text for cuModuleLoadData. */
extern const char hr_kernels_text[];

enum hr_packer_kernel {
    HR_PACKER_IN, HR_PACKER_OUT,
    HR_PACKER_MULTIPLY, HR_PACKER_FOLD, HR_PACKER_TOTAL, HR_PACKER_COMBINE, /* see adasum.cu */
    HR_PACKER_KERNELS,
};

struct hr_packer {
    struct hr_device *device; /* NULL: there is none */
    void *module;
    void *kernels[HR_PACKER_KERNELS];
};

/*
 * Blocks for as long as the driver takes to translate: tens of milliseconds the first time on a machine. HORO_OK, or
 * HORO_ERR_RESOURCE with a sentence and nothing left behind.
 */
int hr_packer_load(struct hr_packer *packer, struct hr_device *device, struct hr_error *error);
/* Nothing of it may run still. Of none, nothing. */
void hr_packer_unload(struct hr_packer *packer);

/* Fills in `first_block` of pieces that are not empty; returns how many blocks they take together. */
unsigned hr_packer_number(struct hr_pack_piece *pieces, size_t count);
/*
 * For a caller that has entered the device: a kernel on the stream. `table` is where the GPU finds by then, until it is
 * over, what the kernel works on: pieces, of which there are `number`; or, of Adasum's, the batch, where `number` is
 * the distance of a pair. HORO_OK or as load.
 */
int hr_packer_launch(const struct hr_packer *packer, enum hr_packer_kernel kernel, uint64_t table, size_t number,
                     unsigned blocks, void *stream, struct hr_error *error);

#endif
