/* The refs of records, and the requests of this rank that they stand for. */
#include "engine/engine.h"

int hr_lane_resolve(struct hr_lane *lane, const struct hr_wire_ref *ref, struct hr_request **request) {
    struct hr_wire_text bytes = {NULL, 0};
    if (ref->name.bytes == 0) {
        HR_TRY(hr_announcer_take(&lane->announcer, ref->id, request, &bytes));
        return *request != NULL ? HORO_OK : lane->executor.ops->absent(lane, ref->name, bytes, request);
    }
    *request = hr_port_find_name(&lane->port, ref->name);
    HR_TRY(*request != NULL ? HORO_OK : lane->executor.ops->absent(lane, ref->name, bytes, request));
    if (*request == NULL) {
        return HORO_ERR_INTERNAL;
    }
    return ref->id == 0 ? HORO_OK : hr_announcer_learn(&lane->announcer, *request, ref->id);
}
