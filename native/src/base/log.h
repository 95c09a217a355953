/* Lines to stderr: "horo [rank] level: text". One write per line, so lines of several ranks never mix. */
#ifndef HR_BASE_LOG_H
#define HR_BASE_LOG_H

#include "horo.h"

struct hr_log {
    int level; /* enum horo_log_level: lines below it are dropped */
    int rank;
};

void hr_log(const struct hr_log *log, int level, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
