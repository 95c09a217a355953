#include "collective/fused.h"

#include <stdlib.h>
#include <sys/mman.h>

enum { HUGE_PAGE_BYTES = 1 << 21, HUGE_WORTH_BYTES = 1 << 22 };

/* Large ones in huge pages, if there are any: to enter new memory page by page takes as long as to fill it. */
void *hr_allocate_vector(size_t bytes) {
    if (bytes < HUGE_WORTH_BYTES) {
        return malloc(bytes == 0 ? 1 : bytes);
    }
    void *data = aligned_alloc(HUGE_PAGE_BYTES, hr_round_up(bytes, HUGE_PAGE_BYTES));
    if (data != NULL) { /* a wish: without it all is right too */
        (void)madvise(data, bytes / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, MADV_HUGEPAGE);
    }
    return data;
}

void hr_fuse_append(struct hr_fused *fused, struct hr_piece *pieces, const void *input, void *output, size_t count) {
    if (count > 0) {
        const size_t bytes = count * fused->codec->wire_bytes;
        pieces[fused->count++] = (struct hr_piece){input, output, fused->bytes, bytes, count};
        fused->bytes += bytes;
    }
}

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

/* The values of a part, and where they begin in memory. */
static size_t values_of(const struct hr_codec *codec, const struct hr_cut *cut, size_t *at) {
    /* of a small tensor, which is whole, divisions would take as long as the rest */
    const int is_whole = cut->bytes == cut->piece->bytes;
    *at = is_whole ? 0 : cut->skip / codec->wire_bytes * codec->element_bytes;
    return is_whole ? cut->piece->count : cut->bytes / codec->wire_bytes;
}

void hr_fused_pack(const struct hr_fused *fused, size_t offset, size_t bytes, char *target,
                   const struct hr_kernel *kernel, double scale, enum hr_store store) {
    struct hr_cut cut = hr_cut_begin(fused, offset, bytes);
    while (hr_cut_next(&cut)) {
        size_t at;
        const size_t count = values_of(fused->codec, &cut, &at);
        hr_codec_pack(fused->codec, kernel, target, cut.piece->input + at, count, scale, store);
        target += cut.bytes;
    }
}

void hr_fused_unpack(const struct hr_fused *fused, size_t offset, size_t bytes, const char *source,
                     const struct hr_kernel *kernel, enum hr_store store) {
    struct hr_cut cut = hr_cut_begin(fused, offset, bytes);
    while (hr_cut_next(&cut)) {
        size_t at;
        const size_t count = values_of(fused->codec, &cut, &at);
        char *to = cut.piece->output + at;
        const char *from = source != NULL ? source : cut.piece->input + at;
        if (from != to) {
            hr_codec_unpack(fused->codec, kernel, to, from, count, store);
        }
        source = source != NULL ? source + cut.bytes : NULL;
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
        const size_t part = hr_smaller(hr_smaller(out_left, in_left), bytes);
        kernel->exchange(out->output + out_skip, slot, in->input + in_skip, part, store);
        out += part == out_left;
        in += part == in_left;
        out_offset += part;
        in_offset += part;
        slot += part;
        bytes -= part;
    }
}

enum {
    WARM_UP = 2, /* the first operations pay for page faults and tell nothing */
    FIRST_TRIES = 8,
    TRY_OTHER_EVERY = 251, /* a prime, so that it comes to operations of all sizes of a step */
    /* a slow one may have been interrupted: it counts for an eighth, and for no more than twice the last estimate */
    RISE_SHIFT = 3,
};

struct hr_store_trial hr_store_try(struct hr_store_costs *costs, size_t bytes) {
    struct hr_store_trial trial = {.costs = costs, .bytes = bytes, .store = HR_STORE_ORDINARY};
    const uint64_t number = costs->operations;
    if (number >= WARM_UP + FIRST_TRIES) {
        /* Streaming pays several times over where it pays; a small lead is noise. */
        const enum hr_store cheaper =
            costs->of[HR_STORE_STREAM] * 4 < costs->of[HR_STORE_ORDINARY] * 3 ? HR_STORE_STREAM : HR_STORE_ORDINARY;
        trial.store = number % TRY_OTHER_EVERY == 0 ? (enum hr_store)!cheaper : cheaper;
    } else if (number >= WARM_UP) {
        trial.store = number / 2 % 2 == 0 ? HR_STORE_ORDINARY : HR_STORE_STREAM; /* in pairs: of two sizes in turn */
    }
    return trial;
}

void hr_store_learn(const struct hr_store_trial *trial, int64_t elapsed_ns) {
    if (trial->costs->operations++ < WARM_UP) {
        return;
    }
    const int64_t cost = elapsed_ns * 1000 / (int64_t)trial->bytes + 1;
    int64_t *estimate = &trial->costs->of[trial->store];
    if (*estimate == 0 || cost < *estimate) { /* a quick operation shows what is possible */
        *estimate = cost;
    } else {
        const int64_t rise = cost < 2 * *estimate ? cost - *estimate : *estimate;
        *estimate += (rise >> RISE_SHIFT) + 1;
    }
}

enum hr_store hr_store_choose_for_move(const struct hr_team *team, size_t bytes) {
    const int64_t *of = team->allreduce_stores.of;
    const int is_dear = of[HR_STORE_ORDINARY] > 0 && of[HR_STORE_STREAM] * 3 > of[HR_STORE_ORDINARY] * 4;
    const int is_small = bytes < team->tuning.moved_stream;
    return team->host_count > 1 || is_small || is_dear ? HR_STORE_ORDINARY : HR_STORE_STREAM;
}
