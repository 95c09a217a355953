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
    const struct hr_step *steps = state->call.scratch;
    *step = steps[index];
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

/* For the steps; everything is received where it belongs. */
static size_t exchange_scratch_bytes(int host_count, size_t block_bytes, size_t bytes, size_t piece_bytes) {
    (void)block_bytes;
    (void)bytes;
    (void)piece_bytes;
    int steps = 0;
    for (int distance = 1; distance < host_count; distance++) {
        steps += route_of(distance, host_count).hops;
    }
    return (size_t)steps * sizeof(struct hr_step);
}

static hr_status exchange_plan(const struct hr_cross_call *call, struct hr_plan *plan) {
    if (!hr_cross_has_byte_parts(call) || call->scratch == NULL) {
        return HORO_ERR_INTERNAL;
    }
    /* all steps, into the scratch of the call: pieces ask for theirs again and again */
    struct hr_step *steps = call->scratch;
    int count = 0;
    int before = 0; /* steps of the hops before */
    for (int hop = 0, first = -1; first != count; hop++) {
        first = count;
        for (int distance = 1, round = 0; distance < call->host_count; distance++) {
            const struct route route = route_of(distance, call->host_count);
            if (route.hops <= hop) {
                round += route.hops == hop;
                continue;
            }
            struct hr_step *step = &steps[count];
            const int h = call->host_count;
            const int length = route.hop[hop];
            int gone = 0;
            for (int i = 0; i < hop; i++) {
                gone += route.hop[i];
            }
            *step = (struct hr_step){
                .send_peer = around(call->host + length, h),
                .recv_peer = around(call->host - length, h),
                .send_part = part_of(call->host - gone, distance, h),
                .recv_part = part_of(call->host - gone - length, distance, h),
            };
            /*
             * where this distance stood among those with the hop before: as far on as here, and those that had it as
             * the last
             */
            step->after = hop == 0 ? -1 : before + (count - first) + round;
            count++;
        }
        before = first;
    }
    plan->step_count = count;
    plan->part_count = (size_t)call->host_count * (size_t)call->host_count;
    return HORO_OK;
}

const struct hr_cross_ops hr_cross_exchange = {
    .name = "exchange", .scratch_bytes = exchange_scratch_bytes, .plan = exchange_plan, .step = exchange_step};
