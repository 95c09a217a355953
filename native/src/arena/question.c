#include "arena/question.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Between processes, as the arena is; a wait ends for no reason at times. */
static void futex(_Atomic uint32_t *word, int operation, uint32_t value) {
    (void)syscall(SYS_futex, word, operation, value, NULL, NULL, 0);
}

void hr_arena_ask(struct hr_arena *arena, int local_rank) {
    struct hr_arena_block *block = &arena->blocks[local_rank];
    (void)atomic_fetch_add(&block->asked, 1);
    futex(&block->asked, FUTEX_WAKE, 1);
}

int hr_arena_owes_answer(const struct hr_arena *arena, int local_rank) {
    const struct hr_arena_block *block = &arena->blocks[local_rank];
    return atomic_load(&block->answers) != 0 && atomic_load(&block->answered) != atomic_load(&block->asked);
}

int hr_arena_await_question(struct hr_arena *arena, const _Atomic int *stop) {
    struct hr_arena_block *block = &arena->blocks[arena->local_rank];
    atomic_store(&block->answers, 1);
    for (;;) {
        const uint32_t asked = atomic_load(&block->asked); /* before looking: what changes it ends the sleep */
        if (atomic_load(stop)) {
            return 0;
        }
        if (asked != atomic_load(&block->answered)) {
            return 1;
        }
        futex(&block->asked, FUTEX_WAIT, asked);
    }
}

void hr_arena_answer(struct hr_arena *arena) {
    struct hr_arena_block *block = &arena->blocks[arena->local_rank];
    atomic_store(&block->answered, atomic_load(&block->asked));
}

void hr_arena_stop_answers(struct hr_arena *arena) {
    atomic_store(&arena->blocks[arena->local_rank].answers, 0);
    hr_arena_ask(arena, arena->local_rank);
}
