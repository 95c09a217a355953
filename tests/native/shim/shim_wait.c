#include "shim.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "node/node.h"

static int is_marked(struct hr_node *node, void *arg) {
    (void)arg;
    return node->looks_at_all && atomic_load(&node->arena.blocks[node->local_rank].sleeping) != 0;
}

/* A context begins with its node. */
int shim_wait_looks_last(void *context, int64_t limit_ns) {
    const int64_t now_ns = hr_now_ns();
    return hr_node_wait(context, is_marked, context, now_ns, 0, now_ns + limit_ns) == HORO_OK;
}

int shim_wait_prepares_with_a_look(void *context) {
    struct hr_node *node = context;
    struct hr_sleep sleep = {0};
    if (hr_sleep_reserve(&sleep, (size_t)node->local_size + 2) != HORO_OK) {
        return 0;
    }
    const int is_ready = hr_node_prepare_sleep(node, is_marked, node, &sleep, 0);
    hr_node_end_sleep(node, NULL);
    free(sleep.fds);
    return is_ready;
}
