#include "base/op.h"

#include "horo.h"

const char *hr_op_name(int op) {
    static const char *const names[HORO_OP_COUNT] = {
        [HORO_ALLREDUCE] = "allreduce",
        [HORO_ALLGATHER] = "allgather",
        [HORO_BROADCAST] = "broadcast",
        [HORO_BARRIER] = "barrier",
    };
    return op >= 0 && op < HORO_OP_COUNT ? names[op] : "unknown operation";
}
