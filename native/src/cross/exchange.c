/*
 * All-to-all: each member has a part for each other.
 *
 * A part that goes d members further round the ring of hosts goes there in hops of powers of two, in either direction:
 * those are the links (node/linked.h). d, or d - h, is written in digits 1 and -1 so that it has as few of them as can
 * be (the non-adjacent form: G. W. Reitwiesner, "Binary arithmetic", Advances in Computers 1 (1960)). Up to five hosts
 * every part takes one hop, of 32 hosts 1.9 on average. All members do the same at the same time, each from its own
 * place; first come all first hops, then all second ones, so that a part which has come need not be waited for.
 */
#include "cross/pipeline.h"

struct route {
    int hops;
    int hop[HR_CROSS_HOPS_MAX]; /* signed */
};

/* Least digit first; one with a hop that is no way round the ring has none. */
static struct route digits_of(int distance, int sign, int h) {
    struct route route = {0};
    for (int value = distance, power = 1; value > 0; value /= 2, power *= 2) {
        if (value % 2 != 0) {
            const int digit = 2 - value % 4;
            value -= digit;
            route.hop[route.hops++] = sign * digit * power;
        }
    }
    const int last = route.hop[route.hops - 1];
    return (last < 0 ? -last : last) < h ? route : (struct route){0};
}

static struct route route_of(int distance, int h) {
    const struct route ahead = digits_of(distance, 1, h);
    const struct route back = digits_of(h - distance, -1, h);
    return ahead.hops > 0 && (back.hops == 0 || ahead.hops <= back.hops) ? ahead : back;
}

static int around(int host, int h) {
    return (host % h + h) % h;
}

static size_t part_of(int origin, int distance, int h) {
    return (size_t)around(origin, h) * (size_t)h + (size_t)around(origin + distance, h);
}

static void exchange_step(const struct hr_cross *state, int index, struct hr_step *step) {
    const int h = state->call.host_count;
    const int host = state->call.host;
    int before = 0; /* steps of the hops before */
    for (int hop = 0, at = 0;; hop++) {
        const int first = at;
        for (int distance = 1, round = 0; distance < h; distance++) {
            const struct route route = route_of(distance, h);
            if (route.hops <= hop) {
                round += route.hops == hop;
                continue;
            }
            if (at++ != index) {
                continue;
            }
            int gone = 0;
            for (int i = 0; i < hop; i++) {
                gone += route.hop[i];
            }
            step->send_peer = around(host + route.hop[hop], h);
            step->recv_peer = around(host - route.hop[hop], h);
            step->send_part = part_of(host - gone, distance, h);
            step->recv_part = part_of(host - gone - route.hop[hop], distance, h);
            /*
             * where this distance stood among those with that hop: as far on as here, and those that had it as the last
             */
            step->after = hop == 0 ? -1 : before + (index - first) + round;
            return;
        }
        before = first;
    }
}

static int step_count(int h) {
    int count = 0;
    for (int distance = 1; distance < h; distance++) {
        count += route_of(distance, h).hops;
    }
    return count;
}

int hr_cross_way(int host_count, int origin, int destination, int *hosts) {
    const int distance = around(destination - origin, host_count);
    const struct route route = distance == 0 ? (struct route){0} : route_of(distance, host_count);
    for (int i = 0, place = origin; i + 1 < route.hops; i++) {
        place = around(place + route.hop[i], host_count);
        hosts[i] = place;
    }
    return route.hops == 0 ? 0 : route.hops - 1;
}

/* Everything is received where it belongs. */
static size_t no_scratch(int host_count, size_t block_bytes, size_t bytes, size_t piece_bytes) {
    (void)host_count;
    (void)block_bytes;
    (void)bytes;
    (void)piece_bytes;
    return 0;
}

static void exchange_plan(const struct hr_cross_call *call, struct hr_plan *plan) {
    plan->step_count = step_count(call->host_count);
    plan->part_count = (size_t)call->host_count * (size_t)call->host_count;
    plan->step = exchange_step;
}

static int exchange_begin(struct hr_cross *state, const struct hr_cross_call *call) {
    if (call->parts == NULL || call->codec == NULL || call->codec->block_bytes != 1) {
        *state = (struct hr_cross){.ops = &hr_cross_exchange, .call = *call, .status = HORO_ERR_INTERNAL};
        return HORO_ERR_INTERNAL;
    }
    return hr_pipeline_begin(state, &hr_cross_exchange, call, exchange_plan);
}

const struct hr_cross_ops hr_cross_exchange = {
    .name = "exchange", .scratch_bytes = no_scratch, .begin = exchange_begin, .progress = hr_pipeline_progress};
