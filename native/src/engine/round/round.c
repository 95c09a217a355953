#include "engine/round/round.h"

#include <string.h>

#include "base/op.h"
#include "engine/execute/batch.h"
#include "engine/engine.h"

/* The word, from its lowest bit up: ranks counted, closed, rounds completed before, place in the log, id. */
enum {
    COUNT_BITS = 10,
    ROUND_BITS = 8,
    PLACE_BITS = 21, /* more than a ring of the log, with whatever has been taken out of it */
    ID_BITS = 24,
    CLOSED_SHIFT = COUNT_BITS,
    ROUND_SHIFT = CLOSED_SHIFT + 1,
    PLACE_SHIFT = ROUND_SHIFT + ROUND_BITS,
    ID_SHIFT = PLACE_SHIFT + PLACE_BITS,
};
_Static_assert(ID_SHIFT + ID_BITS == 64, "the word is full");
_Static_assert(1 << PLACE_BITS > 4 * HR_LOG_RING_BYTES, "a place is not taken for an earlier one");

#define CLOSED (1ull << CLOSED_SHIFT)
#define MASK(bits) ((1ull << (bits)) - 1)

/* The leader is to hear of a request that has waited so long. */
#define LIMIT_NS 10000000ll

static _Atomic uint64_t *word_of(const struct hr_lane *lane) {
    return &lane->team->partition.header->lone;
}

static uint64_t rounds_of(uint64_t word) {
    return word >> ROUND_SHIFT & MASK(ROUND_BITS);
}

/* Place and rounds, where they are in the word. */
static uint64_t position_of(uint64_t word) {
    return word & (MASK(PLACE_BITS + ROUND_BITS) << ROUND_SHIFT);
}

static uint64_t position(uint64_t place, uint64_t rounds) {
    return (place & MASK(PLACE_BITS)) << PLACE_SHIFT | (rounds & MASK(ROUND_BITS)) << ROUND_SHIFT;
}

static uint64_t first_of(uint64_t position, uint32_t id) {
    return (uint64_t)id << ID_SHIFT | position | 1;
}

static int is_complete(const struct hr_lane *lane, uint64_t word) {
    return (word & MASK(COUNT_BITS)) == (uint64_t)lane->team->size;
}

enum round { ROUND_OPEN, ROUND_COMPLETE, ROUND_CLOSED };

/* The round that this rank is counted in. */
static enum round look(const struct hr_lane *lane, uint64_t word) {
    if (position_of(word) == position(lane->executor.log_executed, lane->lone.rounds)) {
        return is_complete(lane, word) ? ROUND_COMPLETE : (word & CLOSED) != 0 ? ROUND_CLOSED : ROUND_OPEN;
    }
    return rounds_of(word) == (lane->lone.rounds & MASK(ROUND_BITS)) ? ROUND_CLOSED : ROUND_COMPLETE;
}

/* ---- Counting oneself in ---- */

/* A leader has nothing to write, and has heard of nothing. */
static int is_idle_leader(const struct hr_lane *lane) {
    const struct hr_leader *leader = &lane->leader;
    return !lane->is_leader ||
           (leader->agree.active == 0 && hr_buffer_size(&leader->log_out) == 0 && leader->leaver == 0 &&
            !leader->log_closed && !leader->tuning.is_due && leader->agree.joined.entry == NULL &&
            hr_buffer_size(&leader->joined_ranks) == 0);
}

/* All of the log has been executed, and nothing but the request has been announced and not been agreed on. */
static int is_idle(const struct hr_lane *lane) {
    const struct hr_announcer *announcer = &lane->announcer;
    const struct hr_executor *executor = &lane->executor;
    return atomic_load_explicit(&lane->pending, memory_order_relaxed) == 1 && executor->state == HR_EXECUTION_IDLE &&
           hr_buffer_size(&executor->log_in) == 0 && !executor->has_executed_leave && announcer->id_count == 0 &&
           hr_buffer_size(&announcer->request_out) == 0 && !announcer->has_asked_to_leave &&
           !announcer->join.has_joined && announcer->join.held == NULL && is_idle_leader(lane) &&
           /* partner: hr_ring_write */
           atomic_load(&lane->team->partition.header->log.written) == executor->log_executed;
}

static int may_enter(const struct hr_lane *lane, const struct hr_request *request, uint32_t id) {
    const struct hr_engine *engine = lane->engine;
    const horo_request *call = &request->call;
    const int is_collective = hr_op_has_tensors(call->op) || call->op == HORO_BARRIER;
    return lane->team->host_count == 1 && lane->team->size > 1 && lane->team->size <= (int)MASK(COUNT_BITS) &&
           (call->flags & HORO_SUBMIT_SYNC) != 0 && is_collective && call->reduce_op != HORO_ADASUM &&
           call->device == 0 && id <= MASK(ID_BITS) && lane->backend->ops->begin_ahead != NULL &&
           engine->cycle_ns == 0 && engine->driver.caller_spin_ns > 0 &&
           !hr_recorder_is_traced(&lane->node->recorder) && is_idle(lane) &&
           !hr_node_is_contended(lane->node, request->submit_ns);
}

/* Writes what this rank tells of the rows: 1, or 0 where there is no room for that. */
static int show_rows(struct hr_lane *lane, const struct hr_request *request, uint32_t id) {
    struct hr_lone *lone = &lane->lone;
    struct hr_lone_rows *shown =
        &lane->team->partition.blocks[lane->node->local_rank].lone_rows[lone->rounds % HR_LONE_ROWS_KEPT];
    hr_buffer_consume(&lone->out, hr_buffer_size(&lone->out));
    if (hr_wire_put(&lone->out, &(struct hr_wire_message){.type = HR_WIRE_ROWS, .id = id, .rows = request->rows}) !=
            HORO_OK ||
        hr_buffer_size(&lone->out) > sizeof shown->message) {
        return 0;
    }
    shown->bytes = (uint32_t)hr_buffer_size(&lone->out); /* partner: count_in */
    memcpy(shown->message, hr_buffer_front(&lone->out), shown->bytes);
    return 1;
}

/* Puts what the other ranks read in the round where they do: 1, or 0 where that is not possible. */
static int prepare(struct hr_lane *lane, struct hr_request *request, uint32_t id) {
    if (hr_op_tells_rows(request->call.op)) {
        return show_rows(lane, request, id);
    }
    return !hr_batch_is_begun_ahead(request->call.op) || hr_batch_begin_ahead(lane, request);
}

static void take_back(struct hr_lane *lane, struct hr_request *request) {
    if (hr_batch_is_begun_ahead(request->call.op)) {
        hr_batch_take_back(lane, request);
    }
}

/* The word with this rank counted in, or closed by it; 0: it is to be left as it is. */
static uint64_t word_behind(const struct hr_lane *lane, uint64_t word, uint32_t id) {
    const uint64_t mine = position(lane->executor.log_executed, lane->lone.rounds);
    const uint64_t last = position(lane->executor.log_executed, lane->lone.rounds - 1);
    if (position_of(word) == last && is_complete(lane, word)) {
        return first_of(mine, id);
    }
    if (position_of(word) != mine || (word & CLOSED) != 0) {
        return 0;
    }
    if ((word & MASK(COUNT_BITS)) == 0) {
        return first_of(mine, id);
    }
    return word >> ID_SHIFT == id ? word + 1 : word | CLOSED;
}

static int count_in(const struct hr_lane *lane, uint32_t id) {
    uint64_t word = atomic_load(word_of(lane));
    uint64_t next;
    do {
        next = word_behind(lane, word, id);
        if (next == 0) {
            return 0;
        }
    } while (!atomic_compare_exchange_weak(word_of(lane), &word, next)); /* partner: hr_lone_go_on */
    return (next & CLOSED) == 0;
}

int hr_lone_enter(struct hr_lane *lane, struct hr_request *request, uint32_t id) {
    const int is_open = may_enter(lane, request, id) && word_behind(lane, atomic_load(word_of(lane)), id) != 0;
    if (!is_open || !prepare(lane, request, id)) {
        return 0;
    }
    if (!count_in(lane, id)) {
        take_back(lane, request);
        return 0;
    }
    lane->lone.request = request;
    hr_part_expect(&lane->part, request->submit_ns + LIMIT_NS);
    return 1;
}

/* ---- The end of the round ---- */

/* Closes the round that this rank is counted in, unless it is complete; how it has ended. */
static enum round close_mine(const struct hr_lane *lane) {
    uint64_t word = atomic_load(word_of(lane));
    enum round round = look(lane, word);
    while (round == ROUND_OPEN) {
        const int is_closed = atomic_compare_exchange_weak(word_of(lane), &word, word | CLOSED);
        round = is_closed ? ROUND_CLOSED : look(lane, word);
    }
    return round;
}

static struct hr_request *end(struct hr_lane *lane) {
    struct hr_request *request = lane->lone.request;
    lane->lone.request = NULL;
    lane->lone.is_given_up = 0;
    return request;
}

static int announce(struct hr_lane *lane) {
    struct hr_request *request = end(lane);
    take_back(lane, request);
    HR_TRY(hr_lane_announce_id(lane, request, request->announced_id));
    return hr_lane_write_ids(lane);
}

/* The rows of all ranks, in their order. HORO_OK or a status. */
static int collect_rows(struct hr_lane *lane, const struct hr_request *request, struct hr_wire_rows *rows) {
    const struct hr_team *team = lane->team;
    struct hr_buffer *all = &lane->lone.rows;
    hr_buffer_consume(all, hr_buffer_size(all));
    for (int i = 0; i < team->local_size; i++) {
        const struct hr_partition_block *block = &team->partition.blocks[team->index_of_local[i]];
        const struct hr_lone_rows *shown = &block->lone_rows[lane->lone.rounds % HR_LONE_ROWS_KEPT];
        struct hr_wire_message message;
        if (shown->bytes > sizeof shown->message) {
            return HORO_ERR_INTERNAL;
        }
        HR_TRY(hr_wire_decode(shown->message, shown->bytes, &message));
        if (message.type != HR_WIRE_ROWS || message.id != request->announced_id) {
            return HORO_ERR_INTERNAL;
        }
        HR_TRY(hr_buffer_append(all, message.rows.data, message.rows.bytes));
        rows->count += message.rows.count;
    }
    rows->data = hr_buffer_front(all);
    rows->bytes = hr_buffer_size(all);
    return HORO_OK;
}

/* All execute the batch. */
static int execute(struct hr_lane *lane) {
    struct hr_request *request = end(lane);
    struct hr_wire_rows rows = {0};
    HR_TRY(hr_op_tells_rows(request->call.op) ? collect_rows(lane, request, &rows) : HORO_OK);
    lane->lone.rounds++;
    atomic_fetch_add_explicit(&lane->engine->counts.counted, 1, memory_order_relaxed);
    if (lane->is_leader) {
        hr_agree_note_use(&lane->leader.agree, request->announced_id);
    }
    return hr_lane_execute_lone(lane, request, rows);
}

int hr_lone_go_on(struct hr_lane *lane) {
    lane->lone.is_given_up |= lane->node->looks_at_all; /* this rank is about to sleep */
    const enum round round = lane->lone.is_given_up ? close_mine(lane) : look(lane, atomic_load(word_of(lane)));
    if (round == ROUND_OPEN) {
        return HR_STILL;
    }
    HR_TRY(round == ROUND_COMPLETE ? execute(lane) : announce(lane));
    return HR_MOVED;
}

int hr_lone_give_up(struct hr_lane *lane) {
    return lane->lone.request != NULL && close_mine(lane) == ROUND_CLOSED ? announce(lane) : HORO_OK;
}

int64_t hr_lone_due_ns(struct hr_lane *lane, int64_t now_ns) {
    if (lane->lone.request == NULL) {
        return HR_NEVER;
    }
    const int64_t due_ns = lane->lone.request->submit_ns + LIMIT_NS;
    lane->lone.is_given_up |= now_ns >= due_ns;
    return lane->lone.is_given_up ? HR_NEVER : due_ns;
}

void hr_lone_drop(struct hr_lane *lane) {
    if (lane->lone.request != NULL) {
        take_back(lane, end(lane));
    }
}

void hr_lone_fini(struct hr_lane *lane) {
    hr_buffer_fini(&lane->lone.out);
    hr_buffer_fini(&lane->lone.rows);
}

/* ---- The leader ---- */

/* The position behind all that this leader has written. */
static uint64_t position_of_end(const struct hr_lane *lane) {
    /* by me */
    const uint64_t written = atomic_load_explicit(&lane->team->partition.header->log.written, memory_order_relaxed);
    return position(written, lane->lone.rounds);
}

int hr_lone_close(struct hr_lane *lane) {
    if (lane->lone.request != NULL) {
        if (close_mine(lane) == ROUND_COMPLETE) {
            return 0;
        }
        HR_TRY(announce(lane));
    }
    const uint64_t closed = position_of_end(lane) | CLOSED;
    uint64_t word = atomic_load(word_of(lane));
    while ((word & CLOSED) == 0 && !atomic_compare_exchange_weak(word_of(lane), &word, closed)) {
    }
    return 1;
}

void hr_lone_reopen(struct hr_lane *lane) {
    atomic_store(word_of(lane), position_of_end(lane)); /* partner: count_in */
}
