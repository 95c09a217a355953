/*
 * The algorithms between hosts: the steps of each member. pipeline.c runs them.
 */
#include "base/cut.h"
#include "cross/cross.h"

/*
 * ---- Rings ----
 *
 * In each step a member sends a part to the next member and receives one from the member before; every part goes on in
 * the step after it has come.
 *
 * Allreduce: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
 * Distrib. Comput. 69 (2009), doi:10.1016/j.jpdc.2008.09.002. The data is cut into h parts. In the first h-1 steps part
 * i travels once round the ring from member i on and each member adds its own values; in the other h-1 steps the
 * finished parts travel round. Every member sends and receives 2(h-1)/h of the bytes, the least that is possible. Part
 * i is summed in the order i, i+1, ... i+h-1 (mod h), at one member only; so all hold the same bits.
 *
 * Reduce-scatter: its first half, one member further round: part i is summed in the order i+1, i+2, ... i+h (mod h).
 *
 * Allgather: its second half, each member's own part first. Every link carries each part but one, however different
 * they are in length.
 */

/* The part that is sent goes down by one each step. */
static void ring_step(const struct hr_cross *state, int index, struct hr_step *step) {
    const int h = state->call.host_count;
    const int first = state->call.host - (state->ops == &hr_cross_scatter_ring);
    const int sent = first - index + 2 * h;
    step->send_peer = (state->call.host + 1) % h;
    step->recv_peer = (state->call.host + h - 1) % h;
    step->send_part = (size_t)(sent % h);
    step->recv_part = (size_t)((sent - 1) % h);
    step->arrival = state->ops->reduces && index < h - 1 ? HR_ARRIVAL_IS_LEFT : HR_ARRIVAL_REPLACES;
}

static void parts_plan(const struct hr_cross *state, struct hr_plan *plan) {
    const int h = state->call.host_count;
    plan->step_count = h - 1;
    plan->part_count = (size_t)h;
    if (state->ops == &hr_cross_ring) {
        plan->step_count = 2 * (h - 1);
        plan->reuse_distance = h - 1; /* gathering step t receives the part that reducing step t sent */
    }
}

const struct hr_cross_ops hr_cross_ring = {.reduces = 1, .plan = parts_plan, .step = ring_step};
const struct hr_cross_ops hr_cross_scatter_ring = {.reduces = 1, .plan = parts_plan, .step = ring_step};
const struct hr_cross_ops hr_cross_gather_ring = {.plan = parts_plan, .step = ring_step};

/*
 * ---- Allgather by doubling ----
 *
 * J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby, "Efficient algorithms for all-to-all communications in
 * multiport message-passing systems", IEEE Trans. Parallel Distrib. Syst. 8 (1997), doi:10.1109/71.642949. In round j a
 * member that knows the 2^j parts from its own on gets the 2^j parts behind these from the member 2^j places ahead, the
 * last time as many as are missing: ceil(log2 h) hops, and parts may stay where they are. A step here is one part, so
 * that rounds need not be waited for to their end.
 */

/* Step `index` brings the part index + 1 places ahead. */
static void gather_doubling_step(const struct hr_cross *state, int index, struct hr_step *step) {
    const int h = state->call.host_count;
    const int host = state->call.host;
    int known = 1;
    while (2 * known <= index + 1) {
        known *= 2;
    }
    step->send_peer = (host - known + h) % h;
    step->recv_peer = (host + known) % h;
    step->send_part = (size_t)((host + index + 1 - known) % h);
    step->recv_part = (size_t)((host + index + 1) % h);
    step->after = index - known;
}

const struct hr_cross_ops hr_cross_gather_doubling = {.plan = parts_plan, .step = gather_doubling_step};

/*
 * ---- Recursive doubling ----
 *
 * Recursive doubling: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in
 * MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), doi:10.1177/1094342005051521.
 *
 * With h = 2^k + extra members, the last ones fold: member 2^k + i hands its data to member i, sits out, and gets the
 * result at the end. The 2^k others exchange everything with the partner at distance 1, 2, 4 ... and reduce: k steps
 * (+2), each of all bytes. (The paper folds neighbours. Like this every distance is a power of two, as in the other
 * algorithms, so few links are enough: see node/team.h.)
 *
 * Both partners put the values of the lower member to the left, so they compute the same bits: after each step all
 * members of a group hold the same.
 */

/* My place among the members that exchange. */
struct role {
    int rounds;   /* k */
    int sits_out;
    int partner;  /* with whom I fold; -1: nobody */
};

static struct role role_of(int host, int host_count) {
    struct role role = {.partner = -1};
    while (2 << role.rounds <= host_count) {
        role.rounds++;
    }
    const int exchanging = 1 << role.rounds;
    role.sits_out = host >= exchanging;
    if (role.sits_out) {
        role.partner = host - exchanging;
    } else if (host + exchanging < host_count) {
        role.partner = host + exchanging;
    }
    return role;
}

static void doubling_step(const struct hr_cross *state, int index, struct hr_step *step) {
    const int host = state->call.host;
    const struct role role = role_of(host, state->call.host_count);
    const int round = index - (role.partner >= 0);
    if (role.sits_out) {
        step->send_peer = index == 0 ? role.partner : -1;
        step->recv_peer = index == 0 ? -1 : role.partner;
    } else if (round < 0) {
        step->recv_peer = role.partner;
        step->arrival = HR_ARRIVAL_IS_RIGHT;
    } else if (round == role.rounds) {
        step->send_peer = role.partner;
    } else {
        const int partner = host ^ (1 << round);
        step->send_peer = partner;
        step->recv_peer = partner;
        step->arrival = partner < host ? HR_ARRIVAL_IS_LEFT : HR_ARRIVAL_IS_RIGHT;
    }
}

static void doubling_plan(const struct hr_cross *state, struct hr_plan *plan) {
    const struct role role = role_of(state->call.host, state->call.host_count);
    plan->step_count = role.sits_out ? 2 : role.rounds + 2 * (role.partner >= 0);
    plan->part_count = 1;
    /* a host that sits out gets the result where its own values were */
    plan->reuse_distance = 1;
    plan->reduces_what_it_sends = 1;
}

const struct hr_cross_ops hr_cross_doubling = {.reduces = 1, .plan = doubling_plan, .step = doubling_step};

/*
 * ---- Broadcasts ----
 *
 * Members are counted from the root: member v is host (root + v) mod h.
 *
 * Binomial tree (Thakur et al. 2005, as above): v hears from v without its lowest bit and passes on to v + m for
 * every power of two m below that bit, largest first, since the largest has most members behind it. ceil(log2 h) steps;
 * the root sends all bytes as many times.
 *
 * Chain: v hears from v - 1 and passes on to v + 1. h - 1 hops; all bytes cross each link once, and with pieces in
 * flight on all links the time for large data is that of one link.
 */

static int host_at(const struct hr_cross_call *call, int v) {
    return (call->root_host + v) % call->host_count;
}

static int place_of(const struct hr_cross_call *call) {
    return (call->host - call->root_host + call->host_count) % call->host_count;
}

/* The distance to child number `index`, 0 if there are fewer. */
static int child_distance(const struct hr_cross *state, int v, int index) {
    const int h = state->call.host_count;
    int distance = 1;
    if (state->ops == &hr_cross_chain) {
        return index == 0 && v + 1 < h ? 1 : 0;
    }
    while ((v & distance) == 0 && distance < h) {
        distance *= 2;
    }
    do { /* from below the lowest bit of v on, or for the root from the largest power of two below h */
        distance /= 2;
    } while (distance > 0 && v + distance >= h);
    return distance >> index;
}

static void broadcast_step(const struct hr_cross *state, int index, struct hr_step *step) {
    const int v = place_of(&state->call);
    if (v != 0 && index == 0) {
        step->recv_peer = host_at(&state->call, state->ops == &hr_cross_chain ? v - 1 : v & (v - 1));
    } else {
        step->send_peer = host_at(&state->call, v + child_distance(state, v, index - (v != 0)));
    }
}

static void broadcast_plan(const struct hr_cross *state, struct hr_plan *plan) {
    const int v = place_of(&state->call);
    plan->step_count = v != 0;
    for (int index = 0; child_distance(state, v, index) > 0; index++) {
        plan->step_count++;
    }
    plan->part_count = 1;
}

const struct hr_cross_ops hr_cross_tree = {.plan = broadcast_plan, .step = broadcast_step};
const struct hr_cross_ops hr_cross_chain = {.plan = broadcast_plan, .step = broadcast_step};

/*
 * ---- All-to-all ----
 *
 * Each member has a part for each other.
 *
 * A part that goes d members further round the ring of hosts goes there in hops of powers of two, in either direction:
 * those are the links (node/team.h). d, or d - h, is written in digits 1 and -1 so that it has as few of them as can
 * be (the non-adjacent form: G. W. Reitwiesner, "Binary arithmetic", Advances in Computers 1 (1960)). Up to five hosts
 * every part takes one hop, of 32 hosts 1.9 on average. All members do the same at the same time, each from its own
 * place; first come all first hops, then all second ones, so that a part which has come need not be waited for.
 */

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

size_t hr_cross_exchange_scratch_bytes(int host_count) {
    int steps = 0;
    for (int distance = 1; distance < host_count; distance++) {
        steps += route_of(distance, host_count).hops;
    }
    return (size_t)steps * sizeof(struct hr_step);
}

static void exchange_plan(const struct hr_cross *state, struct hr_plan *plan) {
    const int host = state->call.host;
    const int h = state->call.host_count;
    /* all steps, into the scratch of the call: pieces ask for theirs again and again */
    struct hr_step *steps = state->call.scratch;
    int count = 0;
    int before = 0; /* steps of the hops before */
    for (int hop = 0, first = -1; first != count; hop++) {
        first = count;
        for (int distance = 1, round = 0; distance < h; distance++) {
            const struct route route = route_of(distance, h);
            if (route.hops <= hop) {
                round += route.hops == hop;
                continue;
            }
            const int length = route.hop[hop];
            int gone = 0;
            for (int i = 0; i < hop; i++) {
                gone += route.hop[i];
            }
            steps[count] = (struct hr_step){
                .send_peer = around(host + length, h),
                .recv_peer = around(host - length, h),
                .send_part = part_of(host - gone, distance, h),
                .recv_part = part_of(host - gone - length, distance, h),
                /* where this distance stood in the hop before: as far on as here, and those that had it as the last */
                .after = hop == 0 ? -1 : before + (count - first) + round,
            };
            count++;
        }
        before = first;
    }
    plan->step_count = count;
    plan->part_count = (size_t)h * (size_t)h;
}

const struct hr_cross_ops hr_cross_exchange = {.plan = exchange_plan, .step = exchange_step};
