#include "collective/fused.h"

size_t hr_fused_find(const struct hr_fused *fused, size_t offset) {
    size_t low = 0;
    size_t high = fused->count;
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        if (fused->pieces[middle].offset <= offset) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

void hr_fused_pack(const struct hr_fused *fused, size_t offset, size_t bytes, char *target, const struct hr_kernel *kernel,
                   double scale, enum hr_store store) {
    const size_t element = hr_dtype_bytes(fused->dtype);
    for (size_t i = bytes == 0 ? 0 : hr_fused_find(fused, offset); bytes > 0; i++) {
        const struct hr_piece *piece = &fused->pieces[i];
        const size_t skip = offset - piece->offset;
        const size_t part = piece->bytes - skip < bytes ? piece->bytes - skip : bytes;
        if (scale == 1.0) {
            kernel->copy(target, piece->input + skip, part, store);
        } else {
            kernel->scale(fused->dtype, target, piece->input + skip, part / element, scale, store);
        }
        target += part;
        offset += part;
        bytes -= part;
    }
}

void hr_fused_unpack(const struct hr_fused *fused, size_t offset, size_t bytes, const char *source,
                     const struct hr_kernel *kernel) {
    for (size_t i = bytes == 0 ? 0 : hr_fused_find(fused, offset); bytes > 0; i++) {
        const struct hr_piece *piece = &fused->pieces[i];
        const size_t skip = offset - piece->offset;
        const size_t part = piece->bytes - skip < bytes ? piece->bytes - skip : bytes;
        kernel->copy(piece->output + skip, source, part, HR_STORE_ORDINARY);
        source += part;
        offset += part;
        bytes -= part;
    }
}
