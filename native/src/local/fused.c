#include "local/fused.h"

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

static void pack_piece(const struct hr_fused *fused, const char *input, size_t bytes, char *target,
                       const struct hr_kernel *kernel, double scale, enum hr_store store) {
    const size_t count = bytes / hr_dtype_bytes(fused->dtype);
    if (fused->wide_dtype != 0) {
        kernel->convert(fused->dtype, target, fused->wide_dtype, input, count, scale, store);
    } else if (scale == 1.0) {
        kernel->copy(target, input, bytes, store);
    } else {
        kernel->scale(fused->dtype, target, input, count, hr_scale_by(scale), store);
    }
}

void hr_fused_pack(const struct hr_fused *fused, size_t offset, size_t bytes, char *target, const struct hr_kernel *kernel,
                   double scale, enum hr_store store) {
    for (size_t i = bytes == 0 ? 0 : hr_fused_find(fused, offset); bytes > 0; i++) {
        const struct hr_piece *piece = &fused->pieces[i];
        const size_t skip = offset - piece->offset;
        const size_t part = piece->bytes - skip < bytes ? piece->bytes - skip : bytes;
        pack_piece(fused, piece->input + hr_fused_private_bytes(fused, skip), part, target, kernel, scale, store);
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
        char *output = piece->output + hr_fused_private_bytes(fused, skip);
        if (fused->wide_dtype == 0) {
            kernel->copy(output, source, part, HR_STORE_ORDINARY);
        } else {
            kernel->convert(fused->wide_dtype, output, fused->dtype, source, part / hr_dtype_bytes(fused->dtype), 1.0,
                            HR_STORE_ORDINARY);
        }
        source += part;
        offset += part;
        bytes -= part;
    }
}

void hr_fused_copy(const struct hr_fused *fused, const struct hr_kernel *kernel) {
    for (size_t i = 0; i < fused->count; i++) {
        const struct hr_piece *piece = &fused->pieces[i];
        if (piece->output != piece->input) {
            kernel->copy(piece->output, piece->input, piece->bytes, HR_STORE_ORDINARY);
        }
    }
}

void hr_fused_exchange(const struct hr_fused *fused, size_t out_offset, size_t in_offset, size_t bytes, char *slot,
                       const struct hr_kernel *kernel, enum hr_store store) {
    const struct hr_piece *out = fused->pieces + (bytes == 0 ? 0 : hr_fused_find(fused, out_offset));
    const struct hr_piece *in = fused->pieces + (bytes == 0 ? 0 : hr_fused_find(fused, in_offset));
    while (bytes > 0) {
        const size_t out_skip = out_offset - out->offset;
        const size_t in_skip = in_offset - in->offset;
        const size_t out_left = out->bytes - out_skip;
        const size_t in_left = in->bytes - in_skip;
        const size_t left = out_left < in_left ? out_left : in_left;
        const size_t part = left < bytes ? left : bytes;
        kernel->exchange(out->output + out_skip, slot, in->input + in_skip, part, store);
        out += part == out_left;
        in += part == in_left;
        out_offset += part;
        in_offset += part;
        slot += part;
        bytes -= part;
    }
}
