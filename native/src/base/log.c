#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "base/log_queue.h"

static const char *const level_names[] = {"trace", "debug", "info", "warning", "error"};

void hr_log_write(int rank, int level, const char *text) {
    char line[2 * HORO_MESSAGE_MAX];
    const int all = snprintf(line, sizeof line, "horo [%d] %s: %s", rank, level_names[level], text);
    const size_t length = (size_t)all < sizeof line - 1 ? (size_t)all : sizeof line - 1;
    line[length] = '\n'; /* in place of the terminator */
    const ssize_t written = write(STDERR_FILENO, line, length + 1);
    (void)written; /* a closed stderr is no reason to fail */
}

void hr_log(const struct hr_log *log, int level, const char *format, ...) {
    const int is_shown = level >= log->level;
    if ((!is_shown && log->queue == NULL) || level < HORO_LOG_TRACE || level > HORO_LOG_ERROR) {
        return;
    }
    char text[HR_LOG_TEXT_BYTES];
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    const int is_kept = log->queue != NULL && hr_log_queue_put(log->queue, log->rank, log->level, level, text);
    if (length >= 0 && is_shown && !is_kept) {
        hr_log_write(log->rank, level, text);
    }
}

int64_t hr_log_check(const struct hr_log *log, int64_t now_ns) {
    return log->queue == NULL ? 0 : hr_log_queue_check(log->queue, now_ns);
}
