#include "slot.h"

#include <sched.h>
#include <stdlib.h>

#include "joins.h"
#include "values.h"

/* A wait that nobody ends must not end by itself: the watchdog is to see it. Some waits do come back in between. */
enum { PATIENT_MS = 1 << 30, IMPATIENT_MS = 20 };

static const struct team *team_of(const struct rank *rank, const struct operation *operation) {
    return &rank->run->schedule->teams[operation->team];
}

int slot_is_mine(const struct rank *rank, const struct operation *operation) {
    if (operation->op == HORO_REMOVE_TEAM) {
        return rank->team_numbers[operation->subject] > 0 && rank->team_numbers[operation->other] > 0;
    }
    return joins_has(rank->run->schedule, operation, rank->number) && rank->team_numbers[operation->team] >= 0;
}

/* Whether this rank is the one that does not do as the others do. */
static int differs(const struct rank *rank, const struct operation *operation, enum difference how) {
    return operation->difference == how && joins_differs(rank->run->schedule, operation, rank->number);
}

/* ---- Requests ---- */

static void shape_tensor(const struct rank *rank, struct slot *slot, int i) {
    const struct operation *operation = slot->operation;
    const int wrong = i == 0 && differs(rank, operation, DIFFERENCE_SHAPE);
    slot->shapes[i][0] = operation->counts[i] + wrong;
    const struct team *team = team_of(rank, operation);
    if (operation_tells_rows(operation)) {
        slot->shapes[i][0] = values_rows(operation, team, rank->number);
    }
    for (int r = 0; r < team->size && operation->op == HORO_ALLTOALL; r++) {
        slot->splits[r] = values_rows_for(operation, rank->number, team->ranks[r]);
    }
    slot->shapes[i][1] = operation->columns + wrong;
    slot->tensors[i] = (horo_tensor){
        .shape = slot->shapes[i],
        .ndim = operation_tells_rows(operation) ? 2 : 1,
        .dtype = slot->dtype,
        .split_count = team->size,
        .splits = slot->splits,
    };
}

static int64_t elements_of(const struct slot *slot, int i) {
    return slot->shapes[i][0] * (slot->tensors[i].ndim == 2 ? slot->shapes[i][1] : 1);
}

static int gathers_into(const struct operation *operation) {
    return operation_tells_rows(operation) && operation->apart;
}

/* From all ranks. */
static size_t result_bytes(const struct rank *rank, const struct operation *operation) {
    struct team active;
    joins_list(rank->run->schedule, operation, &active);
    int64_t rows = 0;
    for (int i = 0; i < active.size; i++) {
        rows += values_rows_for(operation, active.ranks[i], rank->number);
    }
    return (size_t)(rows * operation->columns) * horo_dtype_bytes(operation->dtype);
}

/* Inputs, and outputs of their own where the operation says so, all in one allocation. */
static void fill_tensors(struct rank *rank, struct slot *slot) {
    const struct operation *operation = slot->operation;
    const int wrong = differs(rank, operation, DIFFERENCE_DTYPE);
    slot->dtype = !wrong ? operation->dtype : operation->dtype == HORO_INT32 ? HORO_FLOAT32 : HORO_INT32;
    size_t bytes = 0;
    size_t offsets[TENSORS_MAX];
    for (int i = 0; i < operation->tensor_count; i++) {
        shape_tensor(rank, slot, i);
        offsets[i] = bytes;
        bytes += ((size_t)elements_of(slot, i) * horo_dtype_bytes(slot->dtype) + 15) / 16 * 16;
    }
    const size_t output_bytes = gathers_into(operation) ? result_bytes(rank, operation) : bytes;
    slot->memory = malloc(bytes + output_bytes + 16);
    if (slot->memory == NULL) {
        rank_fail(rank, slot->number, "no memory for %zu bytes", bytes + output_bytes);
        return;
    }
    for (int i = 0; i < operation->tensor_count; i++) {
        char *input = slot->memory + offsets[i];
        values_fill(operation, i, rank->number, slot->dtype, elements_of(slot, i), input);
        slot->tensors[i].input = input;
        slot->tensors[i].output = operation->apart ? input + bytes : input;
        slot->tensors[i].output_bytes = (int64_t)output_bytes;
    }
}

static horo_request describe_call(const struct rank *rank, const struct slot *slot, int flags) {
    const struct operation *operation = slot->operation;
    return (horo_request){
        .name = operation->name,
        .op = operation->op,
        .reduce_op = operation_reduces(operation) ? operation->reduce_op : 0,
        .root_rank = operation->root_rank,
        .flags = operation->flags | flags | (gathers_into(operation) ? HORO_SUBMIT_INTO : 0),
        .prescale = operation->prescale,
        .postscale = operation->postscale,
        .tensors = slot->tensors,
        .tensor_count = operation->tensor_count,
        .team = rank->team_numbers[operation->team],
    };
}

/* ---- Teams ---- */

/* Which team this rank adds or removes. */
static int team_changed(const struct rank *rank, const struct operation *operation) {
    const int differs = operation->difference != DIFFERENCE_NONE && operation->differs == rank->number;
    return differs ? operation->other : operation->subject;
}

static int add_team(struct rank *rank, struct slot *slot) {
    const int team = team_changed(rank, slot->operation);
    struct fabric *fabric = &rank->run->fabric;
    horo_team_setup setup;
    if (fabric_describe_team(fabric, team, rank->number, &setup) != 0) {
        rank_fail(rank, slot->number, "no descriptors");
    }
    const int status = horo_add_team(rank->context, &setup, &slot->handle, slot->sentence, sizeof slot->sentence);
    if (status == HORO_OK) {
        fabric_hand_over(fabric, team, rank->number);
    }
    return status;
}

static int change_teams(struct rank *rank, struct slot *slot) {
    if (slot->operation->op == HORO_ADD_TEAM) {
        return add_team(rank, slot);
    }
    const int number = rank->team_numbers[team_changed(rank, slot->operation)];
    return horo_remove_team(rank->context, number, &slot->handle, slot->sentence, sizeof slot->sentence);
}

/* Before its handle is released. */
static void note_number(struct rank *rank, struct slot *slot) {
    slot->team_number = horo_added_team(rank->context, slot->handle);
    if (!oracle_number_is_right(&rank->run->oracle, slot->operation->subject, slot->team_number)) {
        rank_fail(rank, slot->number, "the team has number %d", slot->team_number);
    }
}

static void check_change(struct rank *rank, const struct slot *slot) {
    const int subject = slot->operation->subject;
    if (slot->operation->op == HORO_ADD_TEAM) {
        rank->team_numbers[subject] = slot->team_number;
    } else {
        rank->team_numbers[subject] = -1;
        fabric_forget_team(&rank->run->fabric, subject, rank->number);
    }
}

/* ---- Joins ---- */

static int join(struct rank *rank, int team, int64_t *handle, char *sentence, size_t sentence_bytes) {
    return horo_join(rank->context, rank->team_numbers[team], handle, sentence, sentence_bytes);
}

void slot_join_after(struct rank *rank, size_t bunch) {
    const struct schedule *schedule = rank->run->schedule;
    for (int i = 0; i < schedule->join_count; i++) {
        const struct join *which = &schedule->joins[i];
        if (!team_has(&schedule->teams[which->team], rank->number) || which->after[rank->number] != bunch ||
            which->last_bunch == bunch) {
            continue;
        }
        char sentence[HORO_MESSAGE_MAX] = "";
        const int status = join(rank, which->team, &rank->joins[i], sentence, sizeof sentence);
        if (status != HORO_OK) {
            rank_fail(rank, schedule->bunches[bunch].first, "join %d of team %d behind bunch %zu: %s: %s", i,
                      which->team, bunch, horo_status_name(status), sentence);
        }
    }
}

/* In the last bunch; this rank may have joined before. */
static int begin_join(struct rank *rank, struct slot *slot) {
    slot->handle = rank->joins[slot->operation->subject];
    if (slot->handle != 0) {
        return HORO_OK;
    }
    return join(rank, slot->operation->team, &slot->handle, slot->sentence, sizeof slot->sentence);
}

/* Before its handle is released. */
static void note_last(struct rank *rank, struct slot *slot) {
    const int last = horo_joined_last(rank->context, slot->handle);
    if (!oracle_last_is_right(&rank->run->oracle, slot->operation->subject, last)) {
        rank_fail(rank, slot->number, "rank %d has joined last", last);
    }
}

/* ---- From beginning to end ---- */

/* The error that its own call of it would have raised in a front end. */
static int refuse(struct rank *rank, const struct operation *operation) {
    const int status = horo_refuse(rank->context, rank->team_numbers[operation->team], operation->name,
                                   HORO_ERR_UNSUPPORTED, "it is refused here");
    return status == HORO_OK ? HORO_ERR_UNSUPPORTED : status;
}

static int submit(struct rank *rank, struct slot *slot, enum haste haste) {
    if (differs(rank, slot->operation, DIFFERENCE_REFUSED)) {
        return refuse(rank, slot->operation);
    }
    fill_tensors(rank, slot);
    const horo_request call = describe_call(rank, slot, haste == NO_HASTE ? 0 : HORO_SUBMIT_SYNC);
    if (haste == AT_ONCE) {
        return horo_run(rank->context, &call, PATIENT_MS, &slot->handle, slot->sentence, sizeof slot->sentence);
    }
    const int status = horo_submit(rank->context, &call, &slot->handle, slot->sentence, sizeof slot->sentence);
    return status == HORO_OK ? HORO_IN_PROGRESS : status;
}

void slot_begin(struct rank *rank, struct slot *slot, size_t number, enum haste haste) {
    *slot = (struct slot){.operation = &rank->run->schedule->operations[number], .number = number};
    atomic_store(&rank->operation, number);
    atomic_store(&rank->phase, haste == AT_ONCE ? PHASE_RUN : PHASE_SUBMIT);
    const int is_join = slot->operation->op == HORO_JOIN;
    if (!is_join && !operation_changes_teams(slot->operation)) {
        slot->status = submit(rank, slot, haste);
        return;
    }
    const int status = is_join ? begin_join(rank, slot) : change_teams(rank, slot);
    slot->status = status == HORO_OK ? HORO_IN_PROGRESS : status;
}

static void check_tensors(struct rank *rank, struct slot *slot) {
    const struct operation *operation = slot->operation;
    for (int i = 0; i < operation->tensor_count && !operation_tells_rows(operation); i++) {
        int64_t at;
        double got;
        double wanted;
        const int everyone = team_of(rank, operation)->size;
        struct team active;
        joins_list(rank->run->schedule, operation, &active);
        if (!values_check(operation, &active, everyone, i, rank->number, slot->tensors[i].output, &at, &got,
                          &wanted)) {
            rank_fail(rank, slot->number, "tensor %d is %.17g at %lld, it must be %.17g", i, got, (long long)at,
                      wanted);
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
        rank_fail(rank, slot->number, "the result cannot be taken: %s", horo_status_name(status));
    }
    const void *gathered = gathers_into(operation) ? slot->tensors[0].output : data;
    const int64_t row_bytes = operation->columns * (int64_t)horo_dtype_bytes(operation->dtype);
    int64_t place = 0;
    for (int i = 0; i < team->size; i++) {
        int64_t at;
        double got;
        double wanted;
        const int is_there = joins_has(rank->run->schedule, operation, team->ranks[i]);
        const int64_t told = is_there ? values_rows_for(operation, team->ranks[i], rank->number) : 0;
        if (rows[i] != told || place + rows[i] * row_bytes > bytes) {
            rank_fail(rank, slot->number, "%lld rows of rank %d, within %lld bytes", (long long)rows[i], team->ranks[i],
                      (long long)bytes);
        }
        if (is_there &&
            !values_check_part(operation, team, team->ranks[i], rank->number, (const char *)gathered + place, &at, &got,
                               &wanted)) {
            rank_fail(rank, slot->number, "the part of rank %d is %.17g at %lld, it must be %.17g", team->ranks[i], got,
                      (long long)at, wanted);
        }
        place += rows[i] * row_bytes;
    }
    if (place != bytes) {
        rank_fail(rank, slot->number, "%lld bytes instead of %lld", (long long)bytes, (long long)place);
    }
    horo_free(data);
}

static void release(struct rank *rank, struct slot *slot) {
    if (slot->status != HORO_OK) {
        (void)horo_error(rank->context, slot->handle, slot->sentence, sizeof slot->sentence);
    } else if (operation_tells_rows(slot->operation)) {
        take_gathered(rank, slot);
    } else if (slot->operation->op == HORO_ADD_TEAM) {
        note_number(rank, slot);
    } else if (slot->operation->op == HORO_JOIN) {
        note_last(rank, slot);
    }
    const int released = horo_release(rank->context, slot->handle);
    if (released != HORO_OK) {
        rank_fail(rank, slot->number, "the handle cannot be released: %s", horo_status_name(released));
    }
}

void slot_await(struct rank *rank, struct slot *slot, uint32_t way) {
    atomic_store(&rank->operation, slot->number);
    atomic_store(&rank->phase, PHASE_WAIT);
    const int op = slot->operation->op;
    const int gives = operation_tells_rows(slot->operation) || op == HORO_ADD_TEAM || op == HORO_JOIN;
    const int finishes = way == 0 && !gives;
    while (slot->handle != 0 && slot->status == HORO_IN_PROGRESS) {
        if (finishes) {
            slot->status = horo_finish(rank->context, slot->handle, PATIENT_MS, NULL, 0);
        } else if (way == 1) {
            slot->status = horo_poll(rank->context, slot->handle);
            (void)sched_yield();
        } else {
            slot->status = horo_wait(rank->context, slot->handle, way == 2 ? IMPATIENT_MS : PATIENT_MS, NULL, 0);
        }
    }
    if (slot->handle != 0 && !(finishes && slot->status == HORO_OK)) {
        release(rank, slot);
    }
    slot->handle = 0;
    atomic_fetch_add(&rank->finished, 1);
}

void slot_check(struct rank *rank, struct slot *slot) {
    if (operation_changes_teams(slot->operation)) {
        check_change(rank, slot);
    } else {
        check_tensors(rank, slot);
    }
}
