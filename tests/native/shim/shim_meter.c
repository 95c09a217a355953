#include "base/clock.h"

#include "shim.h"

uint64_t shim_meter(uint64_t begin, uint64_t end) {
    struct hr_meter meter = {0};
    if (begin < 100) {
        hr_meter_move(&meter, 1, begin);
    }
    hr_meter_block(&meter, 1, 100);
    if (begin >= 100) {
        hr_meter_move(&meter, 1, begin);
    }
    if (end != 0) {
        hr_meter_move(&meter, 0, end);
    }
    hr_meter_block(&meter, 0, 200);
    return meter.moved_ticks;
}
