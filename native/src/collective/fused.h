/* The vectors that the algorithms work on: several tensors as one, and how it is cut and stored. */
#ifndef HR_COLLECTIVE_FUSED_H
#define HR_COLLECTIVE_FUSED_H

#include "base/cut.h"
#include "kernel/kernel.h"
#include "node/team.h"

/* One tensor: bytes [offset, offset + bytes) of the vector, as they travel; bytes > 0. */
struct hr_piece {
    const char *input;
    char *output;
    size_t offset;
    size_t bytes;
    size_t count; /* of its values */
};

/* All offsets and bytes are those of what travels, and lie between two values. */
struct hr_fused {
    const struct hr_piece *pieces; /* in order of offset, without gaps */
    size_t count;
    size_t bytes;
    const struct hr_codec *codec;
};

/* Puts a piece of `count` values behind those that `fused`, whose codec is set, has, unless it is empty. */
void hr_fuse_append(struct hr_fused *fused, struct hr_piece *pieces, const void *input, void *output, size_t count);

/* Memory for so many bytes, for free(); NULL: there is none. */
void *hr_allocate_vector(size_t bytes);

/* The piece that holds byte `offset` (< fused->bytes). */
size_t hr_fused_find(const struct hr_fused *fused, size_t offset);

/* Goes through the pieces of a range of the vector. */
struct hr_cut {
    const struct hr_piece *piece;
    size_t skip, bytes; /* of the piece: what is before the range, and what is in it; 0 bytes before the first one */
    size_t left;        /* of the range, behind that */
};

static inline struct hr_cut hr_cut_begin(const struct hr_fused *fused, size_t offset, size_t bytes) {
    const struct hr_piece *piece = fused->pieces + (bytes == 0 ? 0 : hr_fused_find(fused, offset));
    return (struct hr_cut){.piece = piece, .skip = bytes == 0 ? 0 : offset - piece->offset, .left = bytes};
}

/* 1, or 0 behind the last one. */
static inline int hr_cut_next(struct hr_cut *cut) {
    if (cut->left == 0) {
        return 0;
    }
    if (cut->bytes > 0) {
        cut->piece++;
        cut->skip = 0;
    }
    cut->bytes = hr_smaller(cut->piece->bytes - cut->skip, cut->left);
    cut->left -= cut->bytes;
    return 1;
}

/* target[0..bytes) = scale * inputs[offset..offset + bytes), packed. */
void hr_fused_pack(const struct hr_fused *fused, size_t offset, size_t bytes, char *target,
                   const struct hr_kernel *kernel, double scale, enum hr_store store);

/*
 * outputs[offset..offset + bytes) = source[0..bytes), unpacked. NULL, of a plain codec: from the inputs, where they are
 * not the same memory.
 */
void hr_fused_unpack(const struct hr_fused *fused, size_t offset, size_t bytes, const char *source,
                     const struct hr_kernel *kernel, enum hr_store store);

/* As unpack from out_offset on, then pack from in_offset on, in one pass; no overlap, and a plain codec. */
void hr_fused_exchange(const struct hr_fused *fused, size_t out_offset, size_t in_offset, size_t bytes, char *slot,
                       const struct hr_kernel *kernel, enum hr_store store);

struct hr_range {
    size_t offset; /* from the start of what is cut */
    size_t bytes;
};

/* Part `index` of `count` parts of `bytes`, as hr_part cuts the units that hold them; the last ends with the bytes. */
static inline struct hr_range hr_units(size_t unit, size_t bytes, size_t index, size_t count) {
    size_t begin;
    size_t length;
    hr_part(hr_divide_up(bytes, unit), count, index, &begin, &length);
    const size_t offset = hr_smaller(begin * unit, bytes);
    return (struct hr_range){offset, hr_smaller(length * unit, bytes - offset)};
}

/* The share of owner `index` of `count` in a segment of `bytes`: whole lines, so that no two owners meet in one. */
static inline struct hr_range hr_share(size_t bytes, int index, int count) {
    return hr_units(HR_LINE, bytes, (size_t)index, (size_t)count);
}

/* No share of a segment of `bytes` or less is longer, whoever owns it: a shorter segment may have a longer share. */
static inline size_t hr_share_most(size_t bytes, int count) {
    return hr_divide_up(hr_divide_up(bytes, HR_LINE), (size_t)count) * HR_LINE;
}

/* Segment `index` of `bytes` in segments of `segment_bytes`; empty behind their end. */
static inline struct hr_range hr_segment(size_t segment_bytes, size_t bytes, size_t index) {
    const size_t offset = hr_smaller(index * segment_bytes, bytes);
    return (struct hr_range){offset, hr_smaller(segment_bytes, bytes - offset)};
}

/*
 * Whether to store into slots past the cache. Cores that share a cache want ordinary stores, cores that do not are
 * several times faster with streaming ones, and a virtual machine may change from one to the other within seconds. So
 * each large reduction on one host is timed as a whole, the cheaper store is used, and the other one is tried again
 * once in 251 operations: in the same ones on all ranks, since all count them alike. Allreduce and reduce-scatter have
 * costs of their own.
 */
struct hr_store_trial {
    struct hr_store_costs *costs; /* that learn from the operation; NULL: it is no trial */
    enum hr_store store;
    size_t bytes; /* of the operation */
    int64_t ns;   /* for whoever takes the time */
};

/* The store for the next operation. */
struct hr_store_trial hr_store_try(struct hr_store_costs *costs, size_t bytes);
/* It has taken so long, and is counted: one that did not take place is not. */
void hr_store_learn(const struct hr_store_trial *trial, int64_t elapsed_ns);

/*
 * The same of what is only moved on one host. Nothing but a copy follows, so streaming stores cost little where they
 * are not the best, and save much where they are: they are the choice unless allreduces have found them dear here.
 */
enum hr_store hr_store_choose_for_move(const struct hr_team *team, size_t bytes);

/*
 * The way to store what is moved on one host to results of `bytes` on each rank, which nobody has read or written just
 * before. More than a cache holds is stored past it: else each line would first be read from memory.
 */
static inline enum hr_store hr_store_choose_for_result(const struct hr_team *team, size_t bytes) {
    const int is_large = bytes >= team->tuning.result_stream / (size_t)team->local_size;
    return team->host_count == 1 && is_large ? HR_STORE_STREAM : HR_STORE_ORDINARY;
}

#endif
