#include "shim_core_choice.h"

#include "node/node.h"

int shim_core_choose(const int *core_of, int count, int me, const int *allowed, int allowed_count) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int i = 0; i < allowed_count; i++) {
        CPU_SET((size_t)allowed[i], &set);
    }
    return hr_core_choose(core_of, count, me, &set);
}

int shim_core_publish(int enabled) {
    struct hr_arena_block block = {0};
    struct hr_node node = {.local_size = 1, .arena = {.blocks = &block}, .core_choice = {.enabled = enabled}};
    hr_core_publish(&node);
    return atomic_load(&block.core);
}
