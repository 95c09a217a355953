/*
 * The search of the autotuner, as a pure state machine: it says which point is measured next, is told what a byte costs
 * there, and ends with one that costs no more than the first. No clock, no lock, no allocation.
 *
 * A *point* has a value for every knob, as an index into the values that the knob may have, which ascend by powers of
 * two. The stages:
 *
 *     stage   | measures                                                        | then
 *     --------+-----------------------------------------------------------------+------------------------------------
 *     WARMUP  | the first point, `warmup` times                                 | forgets it
 *     FIRST   | the first point                                                 | DEFAULTS, or TRY where they are one
 *     DEFAULTS| the point of horo's defaults                                    | as a point of TRY
 *     TRY     | a point that differs from the best one in one knob              | promising: CHECK; else the next one
 *     CHECK   | the best point again, next to the one that seems to be better   | the cheaper one is the best
 *     FINAL   | the first point, the defaults and the best in turn, five times  | the winner, by their medians
 *     DONE    |                                                                 |
 *
 * TRY goes along one knob after the other, in the order of the points' knobs: up, and down where that does not pay; by
 * four at first, by two from the second round on, and twice as far after each success. It ends after a round without
 * success from which no finer one follows, or when `most` points have been measured. A step counts as a success if it
 * takes off 3 %: less is noise. The winner is another than the first or the defaults, whichever is cheaper, only if it
 * takes off 1 % there, too.
 */
#ifndef HR_ENGINE_SEARCH_H
#define HR_ENGINE_SEARCH_H

#include <stdint.h>

enum { HR_SEARCH_KNOBS = 8, HR_SEARCH_VALUES_MAX = 32, HR_SEARCH_FINALISTS = 3, HR_SEARCH_ROUNDS = 5 };

struct hr_search_point {
    int index[HR_SEARCH_KNOBS];
};

struct hr_search_config {
    int counts[HR_SEARCH_KNOBS]; /* values of each knob, 1 to HR_SEARCH_VALUES_MAX; 1: it is not tuned */
    struct hr_search_point first, defaults;
    int warmup, most;
};

enum hr_search_stage {
    HR_SEARCH_WARMUP,
    HR_SEARCH_FIRST,
    HR_SEARCH_DEFAULTS,
    HR_SEARCH_TRY,
    HR_SEARCH_CHECK,
    HR_SEARCH_FINAL,
    HR_SEARCH_DONE,
};

struct hr_search {
    struct hr_search_config config;
    enum hr_search_stage stage;
    struct hr_search_point point; /* to be measured, or, once DONE, the winner */
    struct hr_search_point best;
    double best_cost;
    struct hr_search_point tried; /* CHECK: what seems to be better, */
    double tried_cost;            /* and its cost; */
    int tried_defaults;           /* it was DEFAULTS */
    int measured;                 /* points, without WARMUP and FINAL */
    int round, has_moved;         /* of TRY: in this round */
    int knob, direction, stride;
    int paid; /* this direction has: the other one would lead back */
    struct hr_search_point finalists[HR_SEARCH_FINALISTS];
    int finalist_count, turn;
    double final_costs[HR_SEARCH_FINALISTS][HR_SEARCH_ROUNDS];
    double winner_cost, first_cost; /* DONE: medians */
};

void hr_search_init(struct hr_search *search, const struct hr_search_config *config);
/* Notes the cost of a byte at search->point and chooses the next; what is no positive number counts as endless. */
void hr_search_note(struct hr_search *search, double cost);
const char *hr_search_stage_name(enum hr_search_stage stage);

#endif
