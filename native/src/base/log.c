#include "base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/system.h"
#include "horo_log.h"

static const char *const level_names[] = {"trace", "debug", "info", "warning", "error"};

#define PATIENCE_NS 5000000000ll /* an interpreter that is not busy comes in milliseconds */

struct entry {
    int rank;
    int level;
    int is_shown; /* on stderr */
    _Atomic uint32_t *answered; /* by a question; NULL: by any other */
    uint32_t question;
    char text[HR_LOG_TEXT_BYTES];
};

struct horo_log_queue {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct hr_owner owner;            /* a forked child has the memory but not the thread that takes */
    _Atomic int64_t due_ns;           /* PATIENCE_NS after the oldest one became the oldest; 0: there is none */
    int is_stopped;
    int first;
    int count;
    struct entry entries[HR_LOG_QUEUE_LINES];
};

HORO_API horo_log_queue *horo_create_log_queue(void) {
    struct horo_log_queue *queue = calloc(1, sizeof *queue);
    if (queue != NULL) {
        (void)pthread_mutex_init(&queue->lock, NULL);
        (void)pthread_cond_init(&queue->changed, NULL);
        hr_owner_init(&queue->owner);
    }
    return queue;
}

/* Under the lock. */
static struct entry *take_first(struct horo_log_queue *queue) {
    struct entry *entry = &queue->entries[queue->first];
    queue->first = (queue->first + 1) % HR_LOG_QUEUE_LINES;
    queue->count--;
    atomic_store_explicit(&queue->due_ns, queue->count == 0 ? 0 : hr_now_ns() + PATIENCE_NS, memory_order_relaxed);
    if (entry->answered != NULL) {
        atomic_store(entry->answered, entry->question);
    }
    return entry;
}

/* The line of a message on stderr. */
static void write_line(int rank, int level, const char *text) {
    char line[2 * HORO_MESSAGE_MAX];
    const int all = snprintf(line, sizeof line, "horo [%d] %s: %s", rank, level_names[level], text);
    const size_t length = (size_t)all < sizeof line - 1 ? (size_t)all : sizeof line - 1;
    line[length] = '\n'; /* in place of the terminator */
    const ssize_t written = write(STDERR_FILENO, line, length + 1);
    (void)written; /* a closed stderr is no reason to fail */
}

/* Under the lock. */
static void write_all(struct horo_log_queue *queue) {
    while (queue->count > 0) {
        const struct entry *entry = take_first(queue);
        if (entry->is_shown) {
            write_line(entry->rank, entry->level, entry->text);
        }
    }
}

/*
 * 1 if the message will be taken, or written to stderr if it cannot be; 0 if the queue takes no more: it has been
 * stopped, or belongs to the process that this one was forked from. One that is not shown is never written to stderr.
 */
static int put(struct horo_log_queue *queue, const struct entry *message) {
    if (!hr_owner_is_here(&queue->owner)) {
        return 0; /* its lock may have been held at the fork */
    }
    (void)pthread_mutex_lock(&queue->lock);
    const int is_taken = !queue->is_stopped;
    if (is_taken) {
        if (queue->count == HR_LOG_QUEUE_LINES) {
            write_all(queue);
        }
        if (queue->count == 0) {
            atomic_store_explicit(&queue->due_ns, hr_now_ns() + PATIENCE_NS, memory_order_relaxed);
        }
        queue->entries[(queue->first + queue->count++) % HR_LOG_QUEUE_LINES] = *message;
        (void)pthread_cond_signal(&queue->changed);
    }
    (void)pthread_mutex_unlock(&queue->lock);
    return is_taken;
}

void hr_log(const struct hr_log *log, int level, const char *format, ...) {
    const int is_shown = level >= log->level;
    if ((!is_shown && log->queue == NULL) || level < HORO_LOG_TRACE || level > HORO_LOG_ERROR) {
        return;
    }
    struct entry message = {.rank = log->rank, .level = level, .is_shown = is_shown};
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(message.text, sizeof message.text, format, arguments);
    va_end(arguments);
    const int is_kept = log->queue != NULL && put(log->queue, &message);
    if (length >= 0 && is_shown && !is_kept) {
        write_line(log->rank, level, message.text);
    }
}

void hr_log_ask(const struct hr_log *log, _Atomic uint32_t *answered, uint32_t question) {
    const struct entry message = {
        .rank = log->rank, .level = HORO_LOG_QUESTION, .answered = answered, .question = question};
    if (log->queue != NULL) {
        (void)put(log->queue, &message);
    }
}

void hr_log_end(const struct hr_log *log, const _Atomic uint32_t *answered) {
    struct horo_log_queue *queue = log->queue;
    if (queue == NULL || !hr_owner_is_here(&queue->owner)) {
        return;
    }
    (void)pthread_mutex_lock(&queue->lock);
    for (int i = 0; i < queue->count; i++) {
        struct entry *entry = &queue->entries[(queue->first + i) % HR_LOG_QUEUE_LINES];
        entry->answered = entry->answered == answered ? NULL : entry->answered;
    }
    (void)pthread_mutex_unlock(&queue->lock);
}

int64_t hr_log_check(const struct hr_log *log, int64_t now_ns) {
    struct horo_log_queue *queue = log->queue;
    int64_t due_ns = queue == NULL ? 0 : atomic_load_explicit(&queue->due_ns, memory_order_relaxed);
    if (due_ns == 0 || now_ns < due_ns) {
        return due_ns;
    }
    (void)pthread_mutex_lock(&queue->lock);
    if (now_ns >= atomic_load_explicit(&queue->due_ns, memory_order_relaxed)) {
        write_all(queue);
    }
    due_ns = atomic_load_explicit(&queue->due_ns, memory_order_relaxed);
    (void)pthread_mutex_unlock(&queue->lock);
    return due_ns;
}

HORO_API int horo_await_line(horo_log_queue *queue) {
    if (queue == NULL) {
        return HORO_ERR_ABORTED;
    }
    (void)pthread_mutex_lock(&queue->lock);
    while (queue->count == 0 && !queue->is_stopped) {
        (void)pthread_cond_wait(&queue->changed, &queue->lock);
    }
    const int is_there = queue->count > 0;
    (void)pthread_mutex_unlock(&queue->lock);
    return is_there ? HORO_OK : HORO_ERR_ABORTED;
}

HORO_API int horo_take_line(horo_log_queue *queue, int32_t *rank, int32_t *level, char *text, size_t text_bytes) {
    if (queue == NULL || !hr_owner_is_here(&queue->owner)) {
        return HORO_IN_PROGRESS;
    }
    (void)pthread_mutex_lock(&queue->lock);
    const int is_there = queue->count > 0;
    if (is_there) {
        const struct entry *entry = take_first(queue);
        *rank = entry->rank;
        *level = entry->level;
        (void)snprintf(text, text_bytes, "%s", entry->text);
    }
    (void)pthread_mutex_unlock(&queue->lock);
    return is_there ? HORO_OK : HORO_IN_PROGRESS;
}

HORO_API void horo_stop_log_queue(horo_log_queue *queue) {
    if (queue != NULL && hr_owner_is_here(&queue->owner)) {
        (void)pthread_mutex_lock(&queue->lock);
        queue->is_stopped = 1;
        (void)pthread_cond_broadcast(&queue->changed);
        (void)pthread_mutex_unlock(&queue->lock);
    }
}

HORO_API void horo_destroy_log_queue(horo_log_queue *queue) {
    if (queue == NULL || !hr_owner_is_here(&queue->owner)) {
        return;
    }
    write_all(queue); /* nobody else has it any more */
    hr_owner_fini(&queue->owner);
    (void)pthread_cond_destroy(&queue->changed);
    (void)pthread_mutex_destroy(&queue->lock);
    free(queue);
}
