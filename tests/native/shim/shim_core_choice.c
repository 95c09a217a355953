#include "shim.h"

#include <stdlib.h>
#include <string.h>

#include "node/wait.h"

int shim_core_choose(const int *core_of, int count, int me, const int *allowed, int allowed_count) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int i = 0; i < allowed_count; i++) {
        CPU_SET((size_t)allowed[i], &set);
    }
    return hr_core_choose(core_of, count, me, &set);
}

int shim_core_is_shared(const int32_t *core_of, const uint32_t *sleeping, int count) {
    const size_t bytes = (size_t)count * sizeof(struct hr_arena_block);
    struct hr_arena_block *blocks = aligned_alloc(HR_LINE, bytes);
    if (blocks == NULL) {
        return -1;
    }
    memset(blocks, 0, bytes);
    for (int i = 0; i < count; i++) {
        atomic_store(&blocks[i].core, core_of[i]);
        atomic_store(&blocks[i].sleeping, sleeping[i]);
    }
    const int is_shared = hr_core_is_shared(&(struct hr_arena){.local_size = count, .blocks = blocks});
    free(blocks);
    return is_shared;
}
