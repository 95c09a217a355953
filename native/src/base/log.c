#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

static const char *const level_names[] = {"trace", "debug", "info", "warning", "error"};

void hr_log(const struct hr_log *log, int level, const char *format, ...) {
    if (level < log->level || level < HORO_LOG_TRACE || level > HORO_LOG_ERROR) {
        return;
    }
    char line[2 * HORO_MESSAGE_MAX];
    const int head = snprintf(line, sizeof line, "horo [%d] %s: ", log->rank, level_names[level]);
    va_list arguments;
    va_start(arguments, format);
    int body = vsnprintf(line + head, sizeof line - (size_t)head - 1, format, arguments);
    va_end(arguments);
    if (body < 0) {
        return;
    }
    size_t length = (size_t)head + (size_t)body;
    if (length > sizeof line - 2) {
        length = sizeof line - 2;
    }
    line[length] = '\n';
    const ssize_t written = write(STDERR_FILENO, line, length + 1);
    (void)written; /* a closed stderr is no reason to fail */
}
