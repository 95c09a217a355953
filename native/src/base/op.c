#include "base/op.h"

#include "horo.h"

const char *hr_op_name(int op) {
    static const char *const names[HORO_OP_COUNT] = {
        [HORO_ALLREDUCE] = "allreduce",
        [HORO_ALLGATHER] = "allgather",
        [HORO_BROADCAST] = "broadcast",
        [HORO_BARRIER] = "barrier",
        [HORO_ADD_TEAM] = "add_process_set",
        [HORO_REMOVE_TEAM] = "remove_process_set",
        [HORO_REDUCESCATTER] = "reducescatter",
        [HORO_ALLTOALL] = "alltoall",
        [HORO_JOIN] = "join",
    };
    return op >= 0 && op < HORO_OP_COUNT ? names[op] : "unknown operation";
}

int hr_op_reduces(int op) {
    return op == HORO_ALLREDUCE || op == HORO_REDUCESCATTER;
}

int hr_op_tells_rows(int op) {
    return op == HORO_ALLGATHER || op == HORO_ALLTOALL;
}

int hr_op_has_tensors(int op) {
    return op != HORO_BARRIER && op != HORO_JOIN;
}

int hr_op_needs_rows(int op) {
    return hr_op_tells_rows(op) || op == HORO_REDUCESCATTER;
}

int hr_op_is_of_teams(int op) {
    return op == HORO_ADD_TEAM || op == HORO_REMOVE_TEAM;
}

int hr_op_is_last(int op) {
    return op == HORO_JOIN;
}

int hr_op_is_of_members(int op) {
    return hr_op_is_of_teams(op) || hr_op_is_last(op);
}

int hr_op_moves_data(int op) {
    return hr_op_has_tensors(op) && !hr_op_is_of_teams(op);
}
