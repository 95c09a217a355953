#include "engine/search.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SUCCESS 0.97 /* of the cost of the best point: what costs less is better */
#define WINS 0.99    /* the same in FINAL, where medians are compared */

void hr_search_init(struct hr_search *search, const struct hr_search_config *config) {
    memset(search, 0, sizeof *search);
    search->config = *config;
    search->stage = config->warmup > 0 ? HR_SEARCH_WARMUP : HR_SEARCH_FIRST;
    search->point = search->best = config->first;
}

static int is_same(const struct hr_search_point *one, const struct hr_search_point *other) {
    return memcmp(one, other, sizeof *one) == 0;
}

/* ---- FINAL ---- */

static void add_finalist(struct hr_search *search, const struct hr_search_point *point) {
    for (int i = 0; i < search->finalist_count; i++) {
        if (is_same(&search->finalists[i], point)) {
            return;
        }
    }
    search->finalists[search->finalist_count++] = *point;
}

/* Each round begins with another one, so that a machine that gets slower or faster favours none. */
static int finalist_of(const struct hr_search *search, int turn) {
    return (turn + turn / search->finalist_count) % search->finalist_count;
}

static void begin_final(struct hr_search *search) {
    add_finalist(search, &search->config.first);
    add_finalist(search, &search->config.defaults);
    add_finalist(search, &search->best);
    search->stage = search->finalist_count > 1 ? HR_SEARCH_FINAL : HR_SEARCH_DONE;
    search->point = search->finalists[0];
    search->winner_cost = search->first_cost = search->best_cost;
}

static int compare(const void *one, const void *other) {
    const double a = *(const double *)one;
    const double b = *(const double *)other;
    return (a > b) - (a < b);
}

static double median_of(const struct hr_search *search, int finalist) {
    double costs[HR_SEARCH_ROUNDS];
    memcpy(costs, search->final_costs[finalist], sizeof costs);
    qsort(costs, HR_SEARCH_ROUNDS, sizeof costs[0], compare);
    return costs[HR_SEARCH_ROUNDS / 2];
}

static void choose_winner(struct hr_search *search) {
    int winner = 0;
    search->first_cost = search->winner_cost = median_of(search, 0);
    for (int i = 1; i < search->finalist_count; i++) {
        const double cost = median_of(search, i);
        /* the defaults need no lead over a first point that a user has chosen */
        const double most = is_same(&search->finalists[i], &search->config.defaults) ? 1.0 : WINS;
        if (cost < most * search->winner_cost) {
            winner = i;
            search->winner_cost = cost;
        }
    }
    search->point = search->finalists[winner];
    search->stage = HR_SEARCH_DONE;
}

static void note_final(struct hr_search *search, double cost) {
    search->final_costs[finalist_of(search, search->turn)][search->turn / search->finalist_count] = cost;
    search->turn++;
    if (search->turn == HR_SEARCH_ROUNDS * search->finalist_count) {
        choose_winner(search);
    } else {
        search->point = search->finalists[finalist_of(search, search->turn)];
    }
}

/* ---- TRY ---- */

static int smallest_stride(const struct hr_search *search) {
    return search->round == 0 ? 2 : 1;
}

static void begin_knob(struct hr_search *search, int knob) {
    search->knob = knob;
    search->direction = 1;
    search->paid = 0;
    search->stride = smallest_stride(search);
}

/* After what did not pay: less far, then the other direction, then the next knob. 0: there is nothing left to try. */
static int go_on(struct hr_search *search) {
    if (search->stride > smallest_stride(search)) {
        search->stride /= 2;
        return 1;
    }
    search->stride = smallest_stride(search);
    if (search->direction > 0 && !search->paid) {
        search->direction = -1;
        return 1;
    }
    if (search->knob + 1 < HR_SEARCH_KNOBS) {
        begin_knob(search, search->knob + 1);
        return 1;
    }
    if (search->round > 0 && !search->has_moved) {
        return 0;
    }
    search->round++;
    search->has_moved = 0;
    begin_knob(search, 0);
    return 1;
}

/* The point of the next try; 0: it would be the best point itself. */
static int propose(struct hr_search *search) {
    const int last = search->config.counts[search->knob] - 1;
    int index = search->best.index[search->knob] + search->direction * search->stride;
    index = index < 0 ? 0 : index;
    index = index > last ? last : index;
    search->point = search->best;
    search->point.index[search->knob] = index;
    return index != search->best.index[search->knob];
}

static void try_next(struct hr_search *search) {
    search->stage = HR_SEARCH_TRY;
    while (!propose(search)) {
        if (!go_on(search)) {
            begin_final(search);
            return;
        }
    }
    if (search->measured >= search->config.most) {
        begin_final(search);
    }
}

static void try_after(struct hr_search *search, int paid) {
    if (search->stage == HR_SEARCH_TRY || (search->stage == HR_SEARCH_CHECK && !search->tried_defaults)) {
        if (paid) {
            search->has_moved = search->paid = 1;
            search->stride *= 2;
        } else if (!go_on(search)) {
            begin_final(search);
            return;
        }
    }
    try_next(search);
}

static void begin_check(struct hr_search *search, double cost) {
    search->tried = search->point;
    search->tried_cost = cost;
    search->tried_defaults = search->stage == HR_SEARCH_DEFAULTS;
    search->stage = HR_SEARCH_CHECK;
    search->point = search->best;
}

static void end_check(struct hr_search *search, double cost) {
    const int paid = search->tried_cost < SUCCESS * cost;
    search->best_cost = paid ? search->tried_cost : cost;
    search->best = paid ? search->tried : search->best;
    try_after(search, paid);
}

static void note_first(struct hr_search *search, double cost) {
    search->best_cost = cost;
    begin_knob(search, 0);
    if (is_same(&search->config.first, &search->config.defaults)) {
        try_next(search);
    } else {
        search->stage = HR_SEARCH_DEFAULTS;
        search->point = search->config.defaults;
    }
}

void hr_search_note(struct hr_search *search, double cost) {
    cost = cost > 0 && isfinite(cost) ? cost : INFINITY;
    search->measured += search->stage > HR_SEARCH_WARMUP && search->stage < HR_SEARCH_FINAL;
    switch (search->stage) {
    case HR_SEARCH_WARMUP: search->stage = --search->config.warmup > 0 ? HR_SEARCH_WARMUP : HR_SEARCH_FIRST; break;
    case HR_SEARCH_FIRST: note_first(search, cost); break;
    case HR_SEARCH_DEFAULTS:
    case HR_SEARCH_TRY:
        if (cost < SUCCESS * search->best_cost) {
            begin_check(search, cost);
        } else {
            try_after(search, 0);
        }
        break;
    case HR_SEARCH_CHECK: end_check(search, cost); break;
    case HR_SEARCH_FINAL: note_final(search, cost); break;
    default: break;
    }
}

const char *hr_search_stage_name(enum hr_search_stage stage) {
    static const char *const names[] = {"warmup", "first", "defaults", "try", "check", "final", "best"};
    return names[stage];
}
