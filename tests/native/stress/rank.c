#include "rank.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "chance.h"
#include "values.h"

enum { WAIT_MS = 1000, SPIN_MOST = 60000, BUNCHES_AFTER_END = 2 };

/* An operation as this rank has it under way. */
struct slot {
    const struct operation *operation;
    size_t number;
    int64_t handle; /* 0: done and released */
    int status;
    int dtype;
    horo_tensor tensors[TENSORS_MAX];
    int64_t shapes[TENSORS_MAX][2];
    char *memory; /* of all tensors */
    char sentence[HORO_MESSAGE_MAX];
};

enum verdict { GOES_ON, HAS_ENDED };

static const struct team *team_of(const struct rank *rank, const struct operation *operation) {
    return &rank->run->schedule->teams[operation->team];
}

/* ---- Faults ---- */

void run_describe(const struct run *run) {
    static const char *const phases[] = {"begins", "submits", "runs", "waits for", "is gone since", "destroys after", "is over after"};
    for (int i = 0; i < run->schedule->size; i++) {
        const struct rank *rank = &run->ranks[i];
        const size_t number = atomic_load(&rank->operation);
        char text[256];
        operation_describe(&run->schedule->operations[number], text, sizeof text);
        (void)fprintf(stderr, "  rank %d %s operation %zu, %zu finished: %s\n", i, phases[atomic_load(&rank->phase)], number,
                      atomic_load(&rank->finished), text);
    }
}

__attribute__((format(printf, 3, 4))) static void fail(struct rank *rank, const struct slot *slot, const char *format, ...) {
    if (atomic_exchange(&rank->run->failed, 1)) {
        for (;;) {
            (void)pause(); /* another rank ends the process */
        }
    }
    char text[512];
    operation_describe(slot->operation, text, sizeof text);
    (void)fprintf(stderr, "stress: rank %d, operation %zu, %s: ", rank->number, slot->number, text);
    va_list arguments;
    va_start(arguments, format);
    (void)vfprintf(stderr, format, arguments);
    va_end(arguments);
    schedule_describe(rank->run->schedule, text, sizeof text);
    (void)fprintf(stderr, "\n  %s\n", text);
    run_describe(rank->run);
    (void)fprintf(stderr, "again: %s\n", rank->run->replay);
    _exit(1);
}

/* ---- Requests ---- */

static void shape_tensor(const struct rank *rank, struct slot *slot, int i) {
    const struct operation *operation = slot->operation;
    const int wrong = operation->differs == rank->number && operation->difference == DIFFERENCE_SHAPE && i == 0;
    slot->shapes[i][0] = operation->op == HORO_ALLGATHER ? values_rows(operation, rank->number) : operation->counts[i] + wrong;
    slot->shapes[i][1] = operation->columns + wrong;
    slot->tensors[i] = (horo_tensor){
        .shape = slot->shapes[i],
        .ndim = operation->op == HORO_ALLGATHER ? 2 : 1,
        .dtype = slot->dtype,
    };
}

static int64_t elements_of(const struct slot *slot, int i) {
    return slot->shapes[i][0] * (slot->tensors[i].ndim == 2 ? slot->shapes[i][1] : 1);
}

/* Inputs, and outputs of their own where the operation says so, all in one allocation. */
static void fill_tensors(const struct rank *rank, struct slot *slot) {
    const struct operation *operation = slot->operation;
    const int wrong = operation->differs == rank->number && operation->difference == DIFFERENCE_DTYPE;
    slot->dtype = !wrong ? operation->dtype : operation->dtype == HORO_INT32 ? HORO_FLOAT32 : HORO_INT32;
    size_t bytes = 0;
    size_t offsets[TENSORS_MAX];
    for (int i = 0; i < operation->tensor_count; i++) {
        shape_tensor(rank, slot, i);
        offsets[i] = bytes;
        bytes += ((size_t)elements_of(slot, i) * horo_dtype_bytes(slot->dtype) + 15) / 16 * 16;
    }
    slot->memory = malloc(2 * bytes + 16);
    if (slot->memory == NULL) {
        fail((struct rank *)(uintptr_t)rank, slot, "no memory for %zu bytes", 2 * bytes);
        return;
    }
    for (int i = 0; i < operation->tensor_count; i++) {
        char *input = slot->memory + offsets[i];
        values_fill(operation, i, rank->number, slot->dtype, elements_of(slot, i), input);
        slot->tensors[i].input = input;
        slot->tensors[i].output = operation->apart ? input + bytes : input;
    }
}

static horo_request describe_call(const struct slot *slot, int flags) {
    const struct operation *operation = slot->operation;
    return (horo_request){
        .name = operation->name,
        .op = operation->op,
        .reduce_op = operation->op == HORO_ALLREDUCE ? operation->reduce_op : 0,
        .root_rank = operation->root_rank,
        .flags = operation->flags | flags,
        .prescale = operation->prescale,
        .postscale = operation->postscale,
        .tensors = slot->tensors,
        .tensor_count = operation->tensor_count,
    };
}

static void begin(struct rank *rank, struct slot *slot, size_t number, int at_once, int waits_soon) {
    *slot = (struct slot){.operation = &rank->run->schedule->operations[number], .number = number};
    atomic_store(&rank->operation, number);
    atomic_store(&rank->phase, at_once ? PHASE_RUN : PHASE_SUBMIT);
    fill_tensors(rank, slot);
    const horo_request call = describe_call(slot, at_once || waits_soon ? HORO_SUBMIT_SYNC : 0);
    slot->status = at_once ? horo_run(rank->context, &call, WAIT_MS, &slot->handle, slot->sentence, sizeof slot->sentence)
                           : horo_submit(rank->context, &call, &slot->handle, slot->sentence, sizeof slot->sentence);
    if (!at_once && slot->status == HORO_OK) {
        slot->status = HORO_IN_PROGRESS;
    }
}

static void check_result(struct rank *rank, struct slot *slot) {
    const struct operation *operation = slot->operation;
    for (int i = 0; i < operation->tensor_count && operation->op != HORO_ALLGATHER; i++) {
        int64_t at;
        double got;
        double wanted;
        if (!values_check(operation, team_of(rank, operation), i, slot->tensors[i].output, &at, &got, &wanted)) {
            fail(rank, slot, "tensor %d is %.17g at %lld, it must be %.17g", i, got, (long long)at, wanted);
        }
    }
}

static void take_gathered(struct rank *rank, struct slot *slot) {
    const struct operation *operation = slot->operation;
    const struct team *team = team_of(rank, operation);
    void *data = NULL;
    int64_t bytes = 0;
    int64_t rows[RANKS_MAX];
    const int status = horo_take_result(rank->context, slot->handle, 0, &data, &bytes, rows);
    if (status != HORO_OK) {
        fail(rank, slot, "the result cannot be taken: %s", horo_status_name(status));
    }
    const int64_t row_bytes = operation->columns * (int64_t)horo_dtype_bytes(operation->dtype);
    int64_t place = 0;
    for (int i = 0; i < team->size; i++) {
        int64_t at;
        double got;
        double wanted;
        if (rows[i] != values_rows(operation, team->ranks[i]) || place + rows[i] * row_bytes > bytes) {
            fail(rank, slot, "%lld rows of rank %d, within %lld bytes", (long long)rows[i], team->ranks[i], (long long)bytes);
        }
        if (!values_check_part(operation, team->ranks[i], (char *)data + place, &at, &got, &wanted)) {
            fail(rank, slot, "the part of rank %d is %.17g at %lld, it must be %.17g", team->ranks[i], got, (long long)at, wanted);
        }
        place += rows[i] * row_bytes;
    }
    if (place != bytes) {
        fail(rank, slot, "%lld bytes instead of %lld", (long long)bytes, (long long)place);
    }
    horo_free(data);
}

/* Waits in one of several ways until the operation is over, and releases it. */
static void await(struct rank *rank, struct slot *slot, uint32_t way) {
    atomic_store(&rank->operation, slot->number);
    atomic_store(&rank->phase, PHASE_WAIT);
    const int finishes = way == 0 && slot->operation->op != HORO_ALLGATHER;
    while (slot->handle != 0 && slot->status == HORO_IN_PROGRESS) {
        if (finishes) {
            slot->status = horo_finish(rank->context, slot->handle, WAIT_MS);
        } else if (way == 1) {
            slot->status = horo_poll(rank->context, slot->handle);
            (void)sched_yield();
        } else {
            slot->status = horo_wait(rank->context, slot->handle, WAIT_MS);
        }
    }
    if (slot->handle != 0 && !(finishes && slot->status == HORO_OK)) {
        if (slot->status != HORO_OK) {
            horo_error(rank->context, slot->handle, slot->sentence, sizeof slot->sentence);
        } else if (slot->operation->op == HORO_ALLGATHER) {
            take_gathered(rank, slot);
        }
        const int released = horo_release(rank->context, slot->handle);
        if (released != HORO_OK) {
            fail(rank, slot, "the handle cannot be released: %s", horo_status_name(released));
        }
    }
    slot->handle = 0;
    atomic_fetch_add(&rank->finished, 1);
}

/* Whether the group may have ended for this rank when it is at this bunch, and how. */
static enum verdict judge(struct rank *rank, struct slot *slot, size_t bunch) {
    const struct schedule *schedule = rank->run->schedule;
    if (slot->status == HORO_OK && slot->operation->difference == DIFFERENCE_NONE) {
        check_result(rank, slot);
        return GOES_ON;
    }
    if (slot->status == HORO_ERR_MISMATCH && slot->operation->difference != DIFFERENCE_NONE) {
        return GOES_ON;
    }
    if (schedule->ending == ENDING_LEAVE && bunch >= schedule->victim_bunch && slot->status == HORO_ERR_ABORTED) {
        return HAS_ENDED;
    }
    /* What the dead rank has finished, others may be about to finish. */
    if (schedule->ending == ENDING_DEATH && bunch + 1 >= schedule->victim_bunch && slot->status == HORO_ERR_PEER_LOST) {
        return HAS_ENDED;
    }
    fail(rank, slot, "%s in bunch %zu: %s", horo_status_name(slot->status), bunch, slot->sentence);
    return HAS_ENDED;
}

/* ---- A bunch ---- */

static void delay(struct chance *chance) {
    if (chance_once_in(chance, 12)) {
        for (uint32_t i = chance_below(chance, SPIN_MOST); i > 0; i--) {
            __asm__ __volatile__("" ::: "memory");
        }
    }
}

/* Submits the first `count` operations in this rank's order; returns how. */
static void submit_bunch(struct rank *rank, const struct bunch *bunch, struct slot *slots, uint32_t count, struct chance *chance) {
    uint32_t order[BUNCH_MAX];
    for (uint32_t i = 0; i < bunch->count; i++) {
        order[i] = i;
    }
    chance_shuffle(chance, order, bunch->count);
    for (uint32_t i = 0; i < count; i++) {
        delay(chance);
        const size_t number = bunch->first + order[i];
        const int is_gather = rank->run->schedule->operations[number].op == HORO_ALLGATHER;
        const int at_once = count == 1 && bunch->count == 1 && !is_gather && chance_once_in(chance, 2);
        begin(rank, &slots[i], number, at_once, chance_once_in(chance, 8));
    }
}

static enum verdict finish_bunch(struct rank *rank, struct slot *slots, uint32_t count, size_t number, struct chance *chance) {
    uint32_t order[BUNCH_MAX];
    enum verdict verdict = GOES_ON;
    for (uint32_t i = 0; i < count; i++) {
        order[i] = i;
    }
    chance_shuffle(chance, order, count);
    for (uint32_t i = 0; i < count; i++) {
        struct slot *slot = &slots[order[i]];
        delay(chance);
        await(rank, slot, chance_below(chance, 4));
        if (judge(rank, slot, number) == HAS_ENDED) {
            verdict = HAS_ENDED;
        }
        free(slot->memory);
        slot->memory = NULL;
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
    const uint32_t count = chance_below(chance, bunch->count + 1);
    struct chance its_own = *chance;
    submit_bunch(rank, bunch, slots, count < bunch->count || bunch->count > 1 ? count : 0, &its_own);
    const uint32_t submitted = count < bunch->count || bunch->count > 1 ? count : 0;
    atomic_store(&rank->phase, PHASE_GONE);
    delay(&its_own);
    if (rank->run->schedule->ending == ENDING_DEATH) {
        fabric_kill_victim(&rank->run->fabric);
        (void)pthread_barrier_wait(&rank->run->settled);
    }
    destroy(rank);
    for (uint32_t i = 0; i < submitted; i++) {
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
        submit_bunch(rank, bunch, slots, bunch->count, chance);
        const enum verdict verdict = finish_bunch(rank, slots, bunch->count, i, chance);
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
    if (slots != NULL) {
        work(rank, slots, &chance);
    }
    free(slots);
    atomic_store(&rank->phase, PHASE_OVER);
    atomic_fetch_add(&rank->run->over, 1);
    return NULL;
}
