#include "backend/operands.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "base/cut.h"

enum { KIND_COUNT = 3 * HR_REDUCED_DTYPE_COUNT }; /* a dtype that travels as it is, as float16 or as bfloat16 */
enum { HUGE_PAGE_BYTES = 1 << 21, HUGE_WORTH_BYTES = 1 << 22 };

hr_status hr_pieces_reserve(struct hr_pieces *pieces, size_t count) {
    if (count <= pieces->capacity) {
        return HORO_OK;
    }
    struct hr_piece *larger = realloc(pieces->at, count * sizeof *larger);
    if (larger == NULL) {
        return HORO_ERR_RESOURCE;
    }
    pieces->at = larger;
    pieces->capacity = count;
    return HORO_OK;
}

void hr_pieces_fini(struct hr_pieces *pieces) {
    free(pieces->at);
    *pieces = (struct hr_pieces){0};
}

void hr_fuse_append(struct hr_fused *fused, struct hr_piece *pieces, const void *input, void *output, size_t count) {
    if (count > 0) {
        const size_t bytes = hr_codec_bytes(fused->codec, count);
        pieces[fused->count++] = (struct hr_piece){input, output, fused->bytes, bytes, count};
        fused->bytes += bytes;
    }
}

static int kind_of(const struct hr_operand *operand) {
    const int wire = operand->wire_dtype;
    return operand->dtype + HR_REDUCED_DTYPE_COUNT * (wire == 0 ? 0 : wire == HORO_FLOAT16 ? 1 : 2);
}

/* The least one that is not done; KIND_COUNT behind the last one. */
static int next_kind(struct hr_kinds *kinds) {
    int least = KIND_COUNT;
    for (size_t i = 0; i < kinds->count; i++) {
        const int kind = kind_of(&kinds->operands[i]);
        least = kind >= kinds->next && kind < least ? kind : least;
    }
    kinds->next = least + 1;
    return least;
}

/* Of all operands of a kind, the rows that fall to rank r; -1: all that there is. */
static struct hr_fused fuse(const struct hr_kinds *kinds, struct hr_piece *pieces, int kind, int r) {
    struct hr_fused fused = {.pieces = pieces};
    for (size_t i = 0; i < kinds->count; i++) {
        const struct hr_operand *operand = &kinds->operands[i];
        if (kind_of(operand) != kind) {
            continue;
        }
        size_t begin = 0;
        size_t bytes = operand->bytes;
        if (r >= 0 && bytes > 0) {
            hr_part(bytes / operand->row_bytes, (size_t)kinds->size, (size_t)r, &begin, &bytes);
            begin *= operand->row_bytes;
            bytes *= operand->row_bytes;
        }
        fused.codec = hr_codec_find(operand->dtype, operand->wire_dtype);
        hr_fuse_append(&fused, pieces, (const char *)operand->input + begin,
                       r < 0 || r == kinds->rank ? operand->output : NULL, bytes / fused.codec->element_bytes);
    }
    return fused;
}

int hr_kinds_next(struct hr_kinds *kinds, struct hr_piece *pieces, struct hr_fused *fused) {
    const int kind = next_kind(kinds);
    if (kind < KIND_COUNT) {
        *fused = fuse(kinds, pieces, kind, -1);
    }
    return kind < KIND_COUNT;
}

int hr_kinds_next_rows(struct hr_kinds *kinds, struct hr_piece *pieces, struct hr_fused *by_rank) {
    const int kind = next_kind(kinds);
    for (int r = 0; r < kinds->size && kind < KIND_COUNT; r++) {
        by_rank[r] = fuse(kinds, pieces + (size_t)r * kinds->count, kind, r);
    }
    return kind < KIND_COUNT;
}

/*
 * Large ones in huge pages, if the system gives them: memory of this size is often new each time, and to enter it page
 * by page takes as long as to fill it.
 */
hr_status hr_gathered_allocate(struct hr_gathered *result) {
    const size_t bytes = (size_t)result->bytes;
    if (bytes < HUGE_WORTH_BYTES) {
        result->data = malloc(bytes == 0 ? 1 : bytes);
    } else if ((result->data = aligned_alloc(HUGE_PAGE_BYTES, hr_round_up(bytes, HUGE_PAGE_BYTES))) != NULL) {
        /* a wish: without it all is right too */
        (void)madvise(result->data, bytes / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, MADV_HUGEPAGE);
    }
    return result->data == NULL ? HORO_ERR_RESOURCE : HORO_OK;
}
