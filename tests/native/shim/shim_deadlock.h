/* Rank 0's judgement of ranks that are blocked, for tests: messages as bytes. */
#ifndef SHIM_DEADLOCK_H
#define SHIM_DEADLOCK_H

/* cffi: skip */
#include <stddef.h>
#include <stdint.h>
/* cffi: end */

typedef struct shim_deadlock shim_deadlock;

shim_deadlock *shim_deadlock_create(int size);
void shim_deadlock_destroy(shim_deadlock *self);
/* A BLOCKED message. */
int shim_deadlock_note(shim_deadlock *self, const void *message, size_t bytes, int64_t now_ns);
int64_t shim_deadlock_due_ns(const shim_deadlock *self, int64_t open_ns);
uint32_t shim_deadlock_question(const shim_deadlock *self);
/* 0: something may finish, 1: only if a thread submits something, 2: if all say so again, 3: a deadlock. */
int shim_deadlock_judge(shim_deadlock *self, char *text, size_t text_bytes);

#endif
