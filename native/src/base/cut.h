/* Rounding up, and cutting into parts: one rule for all who must agree on where a part ends and the next begins. */
#ifndef HR_BASE_CUT_H
#define HR_BASE_CUT_H

#include <stddef.h>

static inline size_t hr_smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

static inline size_t hr_divide_up(size_t count, size_t by) {
    return count / by + (count % by != 0);
}

/* The next multiple of `unit`. */
static inline size_t hr_round_up(size_t count, size_t unit) {
    return hr_divide_up(count, unit) * unit;
}

/* Takes room for `bytes` behind what *end counts, which becomes a multiple of `alignment`; returns where it begins. */
static inline size_t hr_place(size_t *end, size_t bytes, size_t alignment) {
    const size_t begin = *end;
    *end += hr_round_up(bytes, alignment);
    return begin;
}

/* The begin and the length of part `index` of `count`: parts differ by at most one, the longer ones first. */
static inline void hr_part(size_t count, size_t part_count, size_t index, size_t *begin, size_t *length) {
    const size_t base = count / part_count;
    const size_t longer = count % part_count;
    *begin = index * base + (index < longer ? index : longer);
    *length = base + (index < longer ? 1 : 0);
}

#endif
