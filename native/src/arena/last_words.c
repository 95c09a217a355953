/* The words lie in the arena; see last_words.h. */
#include <string.h>

#include "arena/last_words.h"

void hr_arena_keep_last_words(struct hr_arena *arena, int rank, const char *words, size_t bytes) {
    struct hr_arena_block *block = &arena->blocks[arena->local_rank];
    uint32_t unclaimed = 0;
    if (!atomic_compare_exchange_strong_explicit(&block->words_claimed, &unclaimed, 1, memory_order_relaxed,
                                                 memory_order_relaxed)) {
        return; /* another thread of this process was first */
    }
    const size_t kept = bytes < HR_LAST_WORDS_MAX ? bytes : HR_LAST_WORDS_MAX;
    if (kept > 0) {
        memcpy(block->words, words, kept);
    }
    block->words[kept] = '\0';
    /* partner: hr_arena_last_words */
    atomic_store_explicit(&block->words_of_rank, (uint32_t)rank + 1, memory_order_release);
}

const char *hr_arena_last_words(const struct hr_arena *arena, int rank) {
    for (int i = 0; i < arena->local_size && rank >= 0; i++) {
        /* partner: hr_arena_keep_last_words */
        if (atomic_load_explicit(&arena->blocks[i].words_of_rank, memory_order_acquire) == (uint32_t)rank + 1) {
            return arena->blocks[i].words;
        }
    }
    return NULL;
}
