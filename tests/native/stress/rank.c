#include "rank.h"

#include <stdlib.h>

#include "chance.h"
#include "slot.h"

enum { SPIN_MOST = 60000, BUNCHES_AFTER_END = 2 };

static void delay(struct chance *chance) {
    if (chance_once_in(chance, 12)) {
        for (uint32_t i = chance_below(chance, SPIN_MOST); i > 0; i--) {
            __asm__ __volatile__("" ::: "memory");
        }
    }
}

/* ---- Operations of others ---- */

/* Now and then a rank tries to take part in what is not its business: it is told so, and nothing happens. */
static void trespass(struct rank *rank, size_t number) {
    const struct operation *operation = &rank->run->schedule->operations[number];
    const int team = rank->team_numbers[operation->team];
    if (team < 0 || team_has(&rank->run->schedule->teams[operation->team], rank->number)) {
        return;
    }
    const horo_request call = {
        .name = operation->name,
        .op = HORO_BARRIER,
        .prescale = 1.0,
        .postscale = 1.0,
        .team = team,
    };
    char sentence[HORO_MESSAGE_MAX];
    int64_t handle;
    const int status = horo_submit(rank->context, &call, &handle, sentence, sizeof sentence);
    static const int ended[] = {HORO_ERR_USAGE, HORO_ERR_ABORTED, HORO_ERR_PEER_LOST}; /* by ending */
    if (status != HORO_ERR_USAGE && status != ended[rank->run->schedule->ending]) {
        rank_fail(rank, number, "%s for one that is no member", horo_status_name(status));
    }
}

/* ---- A bunch ---- */

/* What this rank takes part in, in an order of its own; returns how many. */
static uint32_t list_mine(struct rank *rank, const struct bunch *bunch, uint32_t *order, struct chance *chance) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < bunch->count; i++) {
        if (slot_is_mine(rank, &rank->run->schedule->operations[bunch->first + i])) {
            order[count++] = i;
        } else if (chance_once_in(chance, 16)) { /* one that has joined may have ended that already */
            trespass(rank, bunch->first + i);
        }
    }
    chance_shuffle(chance, order, count);
    return count;
}

static int may_run(const struct operation *operation) {
    return !operation_tells_rows(operation) && !operation_changes_teams(operation) && operation->op != HORO_JOIN;
}

/* Rank 0 has all run with other values from the next batch on. */
static void propose(struct rank *rank, size_t number, struct chance *chance) {
    uint64_t values[HORO_KNOB_COUNT];
    char sentence[HORO_MESSAGE_MAX] = "";
    int32_t was_final;
    if (rank->number != 0 || !rank->run->schedule->is_tuned || chance_once_in(chance, 4)) {
        return;
    }
    (void)horo_read_tuning(rank->context, values, &was_final);
    do {
        values[HORO_KNOB_SEGMENT] = 4096ull << chance_below(chance, 12);
    } while (values[HORO_KNOB_SEGMENT] > rank->run->schedule->segment_bytes);
    values[HORO_KNOB_PIECE] = 4096ull << chance_below(chance, 11);
    values[HORO_KNOB_FUSION] = chance_once_in(chance, 8) ? 0 : 1ull << (18 + chance_below(chance, 12));
    values[HORO_KNOB_DOUBLING] = 1ull << (10 + chance_below(chance, 11));
    values[HORO_KNOB_CARRIED] = 1ull << (9 + chance_below(chance, 6));
    values[HORO_KNOB_OVERLAP] = chance_below(chance, 3);
    const int is_final = chance_once_in(chance, 16);
    const int status = horo_propose_tuning(rank->context, values, is_final, sentence, sizeof sentence);
    if (status != HORO_OK) {
        rank_fail(rank, number, "%s for other values: %s", horo_status_name(status), sentence);
    }
}

/* Submits all that is this rank's, or for one that goes some of it; returns how many. */
static uint32_t submit_bunch(struct rank *rank, const struct bunch *bunch, struct slot *slots, int goes,
                             struct chance *chance) {
    uint32_t order[BUNCH_MAX];
    const uint32_t mine = list_mine(rank, bunch, order, chance);
    const uint32_t count = goes ? chance_below(chance, mine + 1) : mine;
    for (uint32_t i = 0; i < count; i++) {
        delay(chance);
        const size_t number = bunch->first + order[i];
        propose(rank, number, chance);
        const int is_lone = !goes && mine == 1 && may_run(&rank->run->schedule->operations[number]);
        const int at_once = is_lone && chance_once_in(chance, 2);
        slot_begin(rank, &slots[i], number, at_once ? AT_ONCE : chance_once_in(chance, 8) ? WAITS_SOON : NO_HASTE);
    }
    return count;
}

static enum verdict finish(struct rank *rank, struct slot *slot, size_t bunch, uint32_t way) {
    slot_await(rank, slot, way);
    const enum verdict verdict = oracle_judge(&rank->run->oracle, rank->number, slot->number, bunch, slot->status);
    if (verdict == IS_WRONG) {
        rank_fail(rank, slot->number, "%s in bunch %zu: %s", horo_status_name(slot->status), bunch, slot->sentence);
    }
    if (slot->status == HORO_OK) {
        slot_check(rank, slot);
    }
    free(slot->memory);
    slot->memory = NULL;
    return verdict;
}

static enum verdict finish_bunch(struct rank *rank, struct slot *slots, uint32_t count, size_t number,
                                 struct chance *chance) {
    uint32_t order[BUNCH_MAX];
    enum verdict verdict = GOES_ON;
    for (uint32_t i = 0; i < count; i++) {
        order[i] = i;
    }
    chance_shuffle(chance, order, count);
    for (uint32_t i = 0; i < count; i++) {
        delay(chance);
        if (finish(rank, &slots[order[i]], number, chance_below(chance, 4)) == HAS_ENDED) {
            verdict = HAS_ENDED;
        }
    }
    return verdict;
}

/* ---- A rank ---- */

static void destroy(struct rank *rank) {
    atomic_store(&rank->phase, PHASE_DESTROY);
    horo_destroy(rank->context);
    rank->context = NULL;
}

/* The end of who leaves or dies: with some of a bunch submitted, whose memory lives until the context is gone. */
static void go(struct rank *rank, const struct bunch *bunch, struct slot *slots, struct chance *chance) {
    const uint32_t count = submit_bunch(rank, bunch, slots, 1, chance);
    atomic_store(&rank->phase, PHASE_GONE);
    delay(chance);
    if (rank->run->schedule->ending == ENDING_DEATH) {
        fabric_kill_victim(&rank->run->fabric);
        (void)pthread_barrier_wait(&rank->run->settled);
    }
    destroy(rank);
    for (uint32_t i = 0; i < count; i++) {
        free(slots[i].memory);
    }
}

static void work(struct rank *rank, struct slot *slots, struct chance *chance) {
    const struct schedule *schedule = rank->run->schedule;
    int bunches_after_end = 0;
    for (size_t i = 0; i < schedule->bunch_count && bunches_after_end <= BUNCHES_AFTER_END; i++) {
        const struct bunch *bunch = &schedule->bunches[i];
        if (schedule->ending != ENDING_TOGETHER && rank->number == schedule->victim && i == schedule->victim_bunch) {
            go(rank, bunch, slots, chance);
            return;
        }
        const uint32_t count = submit_bunch(rank, bunch, slots, 0, chance);
        const int joins_early = (int)chance_below(chance, 2); /* with all of the bunch pending */
        if (joins_early) {
            slot_join_after(rank, i);
        }
        const enum verdict verdict = finish_bunch(rank, slots, count, i, chance);
        if (!joins_early) {
            slot_join_after(rank, i);
        }
        bunches_after_end += verdict == HAS_ENDED || bunches_after_end > 0;
    }
    if (schedule->ending == ENDING_DEATH) {
        (void)pthread_barrier_wait(&rank->run->settled);
    }
    destroy(rank);
}

void *rank_main(void *argument) {
    struct rank *rank = argument;
    struct chance chance = {chance_mix(rank->run->schedule->seed, (uint64_t)rank->number + 77)};
    struct slot *slots = calloc(BUNCH_MAX, sizeof *slots);
    for (int team = 1; team < TEAMS_MAX; team++) {
        rank->team_numbers[team] = -1; /* number 0 is that of all ranks */
    }
    if (slots != NULL) {
        work(rank, slots, &chance);
    }
    free(slots);
    atomic_store(&rank->phase, PHASE_OVER);
    atomic_fetch_add(&rank->run->over, 1);
    return NULL;
}
