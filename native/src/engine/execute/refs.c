/* The refs of records, and the requests of this rank that they stand for. */
#include "engine/engine.h"

struct hr_request *hr_lane_find_name(struct hr_lane *lane, struct hr_wire_text name) {
    hr_drive_lock(&lane->engine->drive);
    struct hr_request *request = hr_map_find(&lane->in_flight, hr_hash(name.data, name.bytes), name.data, name.bytes);
    hr_drive_unlock(&lane->engine->drive);
    return request;
}

int hr_lane_resolve(struct hr_lane *lane, const struct hr_wire_ref *ref, struct hr_request **request) {
    struct hr_wire_text bytes = {NULL, 0};
    if (ref->name.bytes == 0) {
        HR_TRY(hr_announcer_take(&lane->announcer, ref->id, request, &bytes));
        return *request != NULL ? HORO_OK : lane->executor.ops->absent(lane, ref->name, bytes, request);
    }
    *request = hr_lane_find_name(lane, ref->name);
    HR_TRY(*request != NULL ? HORO_OK : lane->executor.ops->absent(lane, ref->name, bytes, request));
    if (*request == NULL) {
        return HORO_ERR_INTERNAL;
    }
    return ref->id == 0 ? HORO_OK : hr_announcer_learn(&lane->announcer, *request, ref->id);
}
