/* The values that operations of a team run with where they may change; see engine/tuning.c. */
#include "engine/group/lane.h"

enum { SEGMENT_UNIT = 4096, PIECE_MIN = 4096, CYCLE_MAX_US = 1000000, OVERLAP_LAST = 2 };

int hr_lane_fits(const struct hr_lane *lane, const uint64_t *values) {
    const uint64_t segment = values[HORO_KNOB_SEGMENT];
    const uint64_t sockets = values[HORO_KNOB_SOCKETS];
    for (int k = 0; k < HORO_KNOB_COUNT; k++) {
        if (values[k] > HORO_KNOB_LIMIT) {
            return 0;
        }
    }
    return segment > 0 && segment % SEGMENT_UNIT == 0 && segment <= lane->node->arena.segment_bytes && sockets > 0 &&
           sockets <= (uint64_t)lane->node->sockets_per_peer && values[HORO_KNOB_PIECE] >= PIECE_MIN &&
           values[HORO_KNOB_CARRIED] <= HR_CARRIED_MAX && values[HORO_KNOB_CYCLE] <= CYCLE_MAX_US &&
           values[HORO_KNOB_OVERLAP] <= OVERLAP_LAST;
}

int hr_lane_tune(struct hr_lane *lane, const uint64_t *values) {
    struct hr_team *team = lane->team;
    struct hr_transport *transport = team->transport;
    if (!hr_lane_fits(lane, values)) {
        return HORO_ERR_INTERNAL;
    }
    team->tuning.segment = (size_t)values[HORO_KNOB_SEGMENT];
    team->tuning.piece = (size_t)values[HORO_KNOB_PIECE];
    team->tuning.doubling = (size_t)values[HORO_KNOB_DOUBLING];
    team->tuning.carried = (size_t)values[HORO_KNOB_CARRIED];
    if (transport != NULL && transport->ops->use_sockets != NULL) {
        transport->ops->use_sockets(transport, (int)values[HORO_KNOB_SOCKETS]);
    }
    if (lane->is_leader) {
        lane->leader.agree.config.fusion_bytes = values[HORO_KNOB_FUSION];
        lane->leader.cycle_ns = (int64_t)values[HORO_KNOB_CYCLE] * 1000;
    }
    return HORO_OK;
}
