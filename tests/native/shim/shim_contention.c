#include "shim.h"

#include "node/node.h"

void shim_contention_note(int64_t begin_until_ns, int64_t begin_while_ns, const int64_t *yield_ns,
                          const int64_t *now_ns, int count, int64_t *until_ns) {
    struct hr_contention contention = {begin_until_ns, begin_while_ns};
    struct hr_losses losses = {0};
    for (int i = 0; i < count; i++) {
        hr_contention_note(&contention, &losses, yield_ns[i], now_ns[i]);
        until_ns[i] = atomic_load(&contention.until_ns);
    }
}

/* A context begins with its node. */
static struct hr_contention *of_context(void *context) {
    struct hr_node *node = context;
    return &node->arena.header->contention;
}

void shim_contention_yielded(void *context, int64_t yield_ns) {
    struct hr_losses losses = {0}; /* not the rank's, which its driver writes */
    hr_contention_note(of_context(context), &losses, yield_ns, hr_now_ns());
}

int shim_contention_is_on(int64_t until_ns, int64_t now_ns) {
    struct hr_arena_header header = {.contention = {.until_ns = until_ns}};
    const struct hr_node node = {.sleeps_under_contention = 1, .arena = {.header = &header}};
    return hr_node_is_contended(&node, now_ns);
}
