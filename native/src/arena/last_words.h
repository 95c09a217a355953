/*
 * The words of a rank that has ended the group, or cannot go on, about the reason. Each process keeps the words of one
 * rank in its own block of the arena: its own, or, as a leader, those that came from another host. They are written
 * before the abort word that names the rank, so whoever reads that rank in the abort word finds its words.
 */
#ifndef HR_ARENA_LAST_WORDS_H
#define HR_ARENA_LAST_WORDS_H

#include "arena/arena.h"

/* Keeps the first words that this process has for any rank; longer ones are cut to HR_LAST_WORDS_MAX bytes. */
void hr_arena_keep_last_words(struct hr_arena *arena, int rank, const char *words, size_t bytes);

/* The words of a rank, terminated; NULL: nobody here has them. They live as long as the arena and do not change. */
const char *hr_arena_last_words(const struct hr_arena *arena, int rank);

#endif
