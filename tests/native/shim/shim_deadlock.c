#include "shim.h"

#include <stdlib.h>

#include "engine/report/deadlock.h"

struct shim_deadlock {
    int size;
    struct hr_deadlock deadlock;
};

shim_deadlock *shim_deadlock_create(int size) {
    shim_deadlock *self = calloc(1, sizeof *self);
    self->size = size;
    return self;
}

void shim_deadlock_destroy(shim_deadlock *self) {
    hr_deadlock_fini(&self->deadlock);
    free(self);
}

int shim_deadlock_note(shim_deadlock *self, const void *message, size_t bytes, int64_t now_ns) {
    struct hr_wire_message decoded;
    const int status = hr_wire_decode(message, bytes, &decoded);
    return status == HORO_OK ? hr_deadlock_note(&self->deadlock, self->size, &decoded, now_ns) : status;
}

int64_t shim_deadlock_due_ns(const shim_deadlock *self, int64_t open_ns) {
    return hr_deadlock_due_ns(&self->deadlock, open_ns);
}

uint32_t shim_deadlock_question(const shim_deadlock *self) {
    return self->deadlock.question;
}

int shim_deadlock_judge(shim_deadlock *self, char *text, size_t text_bytes) {
    text[0] = '\0';
    return (int)hr_deadlock_judge(&self->deadlock, text, text_bytes);
}
