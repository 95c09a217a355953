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

/* Values of a piece. */
struct values {
    size_t first;
    size_t count;
};

/* The values that bytes [skip, skip + bytes) of a piece stand for. Its last block need not be full. */
static struct values values_of(const struct hr_codec *codec, const struct hr_piece *piece, size_t skip, size_t bytes) {
    if (bytes == piece->bytes) {
        return (struct values){0, piece->count}; /* a small tensor, mostly: divisions would take as long as the rest */
    }
    const size_t first = hr_codec_elements(codec, skip);
    const size_t most = hr_codec_elements(codec, bytes);
    const size_t left = piece->count - first;
    return (struct values){first, most < left ? most : left};
}

void hr_fused_pack(const struct hr_fused *fused, size_t offset, size_t bytes, char *target,
                   const struct hr_kernel *kernel, double scale, enum hr_store store) {
    const struct hr_codec *codec = fused->codec;
    for (size_t i = bytes == 0 ? 0 : hr_fused_find(fused, offset); bytes > 0; i++) {
        const struct hr_piece *piece = &fused->pieces[i];
        const size_t skip = offset - piece->offset;
        const size_t part = piece->bytes - skip < bytes ? piece->bytes - skip : bytes;
        const struct values values = values_of(codec, piece, skip, part);
        const char *input = piece->input + values.first * codec->element_bytes;
        codec->pack(codec, kernel, target, input, values.count, scale, store);
        target += part;
        offset += part;
        bytes -= part;
    }
}

void hr_fused_unpack(const struct hr_fused *fused, size_t offset, size_t bytes, const char *source,
                     const struct hr_kernel *kernel) {
    const struct hr_codec *codec = fused->codec;
    for (size_t i = bytes == 0 ? 0 : hr_fused_find(fused, offset); bytes > 0; i++) {
        const struct hr_piece *piece = &fused->pieces[i];
        const size_t skip = offset - piece->offset;
        const size_t part = piece->bytes - skip < bytes ? piece->bytes - skip : bytes;
        const struct values values = values_of(codec, piece, skip, part);
        codec->unpack(codec, kernel, piece->output + values.first * codec->element_bytes, source, values.count);
        source += part;
        offset += part;
        bytes -= part;
    }
}

void hr_fused_put(const struct hr_fused *fused, size_t offset, size_t bytes, const char *source,
                  const struct hr_kernel *kernel, enum hr_store store) {
    for (size_t i = bytes == 0 ? 0 : hr_fused_find(fused, offset); bytes > 0; i++) {
        const struct hr_piece *piece = &fused->pieces[i];
        const size_t skip = offset - piece->offset;
        const size_t part = piece->bytes - skip < bytes ? piece->bytes - skip : bytes;
        const char *from = source != NULL ? source : piece->input + skip;
        if (from != piece->output + skip) {
            kernel->copy(piece->output + skip, from, part, store);
        }
        source = source != NULL ? source + part : NULL;
        offset += part;
        bytes -= part;
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
