#include "shim_seat.h"

#include "node/seat.h"

int shim_seat_choose(const int *core_of, int count, int me, const int *allowed, int allowed_count) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int i = 0; i < allowed_count; i++) {
        CPU_SET((size_t)allowed[i], &set);
    }
    return hr_seat_choose(core_of, count, me, &set);
}
