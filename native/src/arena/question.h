/*
 * A rank is asked where its program stands, by a rank of its host that waits for it. A thread that does nothing else
 * sleeps on the word in which questions are counted, whoever else of that process computes, and answers in its log.
 */
#ifndef HR_ARENA_QUESTION_H
#define HR_ARENA_QUESTION_H

#include "arena/arena.h"

/* Any thread of any rank of the host. */
void hr_arena_ask(struct hr_arena *arena, int local_rank);
/* Whether a question has had no answer yet; 0 also for a rank that answers none. */
int hr_arena_owes_answer(const struct hr_arena *arena, int local_rank);

/* The thread that answers: blocks until this rank is asked, 1, or *stop is set, 0. */
int hr_arena_await_question(struct hr_arena *arena, const _Atomic int *stop);
void hr_arena_answer(struct hr_arena *arena);
/* After *stop has been set. */
void hr_arena_stop_answers(struct hr_arena *arena);

#endif
