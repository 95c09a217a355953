#include "shim.h"

#include "base/clock.h"
#include "base/log.h"

void shim_log(horo_log_queue *queue, int shown_from, int level, const char *text) {
    const struct hr_log log = {.level = shown_from, .rank = 3, .queue = queue};
    hr_log(&log, level, "%s", text);
}

int64_t shim_log_check(horo_log_queue *queue, int64_t later_ns) {
    const struct hr_log log = {.level = HORO_LOG_WARNING, .rank = 3, .queue = queue};
    const int64_t now_ns = hr_now_ns() + later_ns;
    const int64_t due_ns = hr_log_check(&log, now_ns);
    return due_ns == 0 ? 0 : due_ns - now_ns;
}

int shim_log_capacity(void) {
    return HR_LOG_QUEUE_LINES;
}
