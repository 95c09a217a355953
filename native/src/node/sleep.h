/* The descriptors of a sleep. */
#ifndef HR_NODE_SLEEP_H
#define HR_NODE_SLEEP_H

#include <poll.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* The descriptors that a thread sleeps on. They are its own: the driver may go on meanwhile. */
struct hr_sleep {
    struct pollfd *fds; /* [capacity]: my eventfd, the life lines, the links */
    size_t capacity, count, life_count;
    int64_t deadline_ns; /* 0: none */
    int64_t look_ns;     /* at most so long, for what no descriptor tells of; -1: any time */
};

/* Makes room for so many descriptors. HORO_OK or HORO_ERR_RESOURCE, which changes nothing. */
hr_status hr_sleep_reserve(struct hr_sleep *sleep, size_t count);

#endif
