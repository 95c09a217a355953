#include "node/sleep.h"

#include <stdlib.h>

#include "horo.h"

hr_status hr_sleep_reserve(struct hr_sleep *sleep, size_t count) {
    if (count > sleep->capacity) {
        struct pollfd *fds = realloc(sleep->fds, count * sizeof *fds);
        if (fds == NULL) {
            return HORO_ERR_RESOURCE;
        }
        sleep->fds = fds;
        sleep->capacity = count;
    }
    return HORO_OK;
}
