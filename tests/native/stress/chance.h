/* Numbers that look random and depend on nothing but a seed. */
#ifndef STRESS_CHANCE_H
#define STRESS_CHANCE_H

#include <stddef.h>
#include <stdint.h>

struct chance {
    uint64_t state;
};

/* One number from two; the finalizer of SplitMix64 (Steele, Lea and Flood, 2014). */
static inline uint64_t chance_mix(uint64_t a, uint64_t b) {
    uint64_t z = a + (b + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline uint64_t chance_next(struct chance *chance) {
    return chance_mix(chance->state++, 0);
}

/* 0 .. limit - 1 */
static inline uint32_t chance_below(struct chance *chance, uint32_t limit) {
    return (uint32_t)((chance_next(chance) >> 32) * limit >> 32);
}

/* Once in `times`. */
static inline int chance_once_in(struct chance *chance, uint32_t times) {
    return chance_below(chance, times) == 0;
}

static inline void chance_shuffle(struct chance *chance, uint32_t *items, uint32_t count) {
    for (uint32_t i = count; i > 1; i--) {
        const uint32_t other = chance_below(chance, i);
        const uint32_t kept = items[i - 1];
        items[i - 1] = items[other];
        items[other] = kept;
    }
}

#endif
