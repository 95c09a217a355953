#include <stdlib.h>
#include <string.h>

#include "backend/carried.h"
#include "engine/drive/drive.h"
#include "engine/round/round.h"
#include "wire/wire.h"

/* The word, from its lowest bit up: ranks counted, closed, rounds completed before, place in the log, id. */
enum {
    COUNT_BITS = 10,
    ROUND_BITS = 8,
    PLACE_BITS = 21, /* more than a ring of the log, with whatever has been taken out of it */
    ID_BITS = 24,
    ROUND_SHIFT = COUNT_BITS + 1,
    PLACE_SHIFT = ROUND_SHIFT + ROUND_BITS,
    ID_SHIFT = PLACE_SHIFT + PLACE_BITS,
};
_Static_assert(ID_SHIFT + ID_BITS == 64, "the word is full");
_Static_assert(1 << PLACE_BITS > 4 * HR_LOG_RING_BYTES, "a place is not taken for an earlier one");

#define CLOSED (1ull << COUNT_BITS)
#define MASK(bits) ((1ull << (bits)) - 1)

static _Atomic uint64_t *word_of(const struct hr_round *round) {
    return &round->team->partition.header->lone;
}

/* Place and rounds, where they are in the word. */
static uint64_t position_of(uint64_t word) {
    return word & (MASK(PLACE_BITS + ROUND_BITS) << ROUND_SHIFT);
}

static uint64_t position(uint64_t place, uint64_t rounds) {
    return (place & MASK(PLACE_BITS)) << PLACE_SHIFT | (rounds & MASK(ROUND_BITS)) << ROUND_SHIFT;
}

static int is_complete(const struct hr_round *round, uint64_t word) {
    return (word & MASK(COUNT_BITS)) == (uint64_t)round->team->size;
}

int hr_round_is_for(const struct hr_team *team) {
    return team->host_count == 1 && team->size > 1 && team->size <= (int)MASK(COUNT_BITS);
}

/* ---- Counting oneself in ---- */

static struct hr_lone_rows *rows_of(const struct hr_round *round, int index) {
    return &round->team->partition.blocks[index].lone_rows[round->rounds % HR_LONE_ROWS_KEPT];
}

int hr_round_show_rows(struct hr_round *round, const struct hr_request *request, int is_ahead) {
    struct hr_lone_rows *shown = rows_of(round, round->team->node->local_rank);
    hr_buffer_consume(&round->out, hr_buffer_size(&round->out));
    const struct hr_wire_message rows = {
        .type = HR_WIRE_ROWS, .id = request->announced_id, .rows = request->rows};
    if (hr_wire_put(&round->out, &rows) != HORO_OK || hr_buffer_size(&round->out) > sizeof shown->message) {
        return 0;
    }
    shown->bytes = (uint32_t)hr_buffer_size(&round->out); /* partner: hr_round_enter */
    shown->is_ahead = is_ahead;
    memcpy(shown->message, hr_buffer_front(&round->out), shown->bytes);
    return 1;
}

/* The word with this rank counted in, or closed by it; 0: it is to be left as it is. */
static uint64_t word_behind(const struct hr_round *round, uint64_t place, uint32_t id, uint64_t word) {
    const uint64_t mine = position(place, round->rounds);
    const uint64_t last = position(place, round->rounds - 1);
    const int is_open = position_of(word) == mine && (word & CLOSED) == 0;
    if ((is_open && (word & MASK(COUNT_BITS)) == 0) || (position_of(word) == last && is_complete(round, word))) {
        return (uint64_t)id << ID_SHIFT | mine | 1;
    }
    return !is_open ? 0 : word >> ID_SHIFT == id ? word + 1 : word | CLOSED;
}

int hr_round_may_enter(const struct hr_round *round, uint64_t place, uint32_t id) {
    return id <= MASK(ID_BITS) && word_behind(round, place, id, atomic_load(word_of(round))) != 0;
}

int hr_round_enter(struct hr_round *round, struct hr_request *request, uint64_t place) {
    uint64_t word = atomic_load(word_of(round));
    uint64_t next;
    do {
        next = word_behind(round, place, request->announced_id, word);
        if (next == 0) {
            return 0;
        }
    } while (!atomic_compare_exchange_weak(word_of(round), &word, next)); /* partner: hr_round_look */
    if ((next & CLOSED) != 0) {
        return 0;
    }
    round->request = request;
    round->place = place;
    return 1;
}

/* ---- The end of the round ---- */

static enum hr_round_end end_of(const struct hr_round *round, uint64_t word) {
    if (position_of(word) == position(round->place, round->rounds)) {
        return is_complete(round, word) ? HR_ROUND_COMPLETE : (word & CLOSED) != 0 ? HR_ROUND_CLOSED : HR_ROUND_OPEN;
    }
    const uint64_t rounds = word >> ROUND_SHIFT & MASK(ROUND_BITS);
    return rounds == (round->rounds & MASK(ROUND_BITS)) ? HR_ROUND_CLOSED : HR_ROUND_COMPLETE;
}

int hr_round_take_up(struct hr_round *round) {
    if (round->request == NULL || round->is_taken_up || !hr_request_is_call(round->request) ||
        end_of(round, atomic_load(word_of(round))) != HR_ROUND_COMPLETE) {
        return 0;
    }
    round->is_taken_up = 1;
    return 1;
}

enum hr_round_end hr_round_look(const struct hr_round *round) {
    const int sleeps = round->team->node->looks_at_all; /* in a moment */
    return sleeps ? hr_round_close_mine(round) : end_of(round, atomic_load(word_of(round)));
}

enum hr_round_end hr_round_close_mine(const struct hr_round *round) {
    uint64_t word = atomic_load(word_of(round));
    enum hr_round_end end = end_of(round, word);
    while (end == HR_ROUND_OPEN) {
        const int is_closed = atomic_compare_exchange_weak(word_of(round), &word, word | CLOSED);
        end = is_closed ? HR_ROUND_CLOSED : end_of(round, word);
    }
    return end;
}

int64_t hr_round_due_ns(const struct hr_round *round, int64_t now_ns) {
    const int64_t due_ns = round->request == NULL ? HR_NEVER : round->request->submit_ns + HR_ROUND_LIMIT_NS;
    if (now_ns < due_ns) {
        return due_ns;
    }
    (void)hr_round_close_mine(round);
    return HR_NEVER;
}

int hr_round_is_ahead(const struct hr_round *round) {
    const struct hr_team *team = round->team;
    const struct hr_lone_rows *own = rows_of(round, team->node->local_rank);
    for (int i = 0; i < team->local_size; i++) {
        const struct hr_lone_rows *shown = rows_of(round, team->index_of_local[i]);
        if (!shown->is_ahead || shown->bytes != own->bytes || memcmp(shown->message, own->message, own->bytes) != 0) {
            return 0;
        }
    }
    return 1;
}

int hr_round_collect_rows(struct hr_round *round, struct hr_wire_rows *rows) {
    const struct hr_team *team = round->team;
    struct hr_buffer *all = &round->rows;
    hr_buffer_consume(all, hr_buffer_size(all));
    *rows = (struct hr_wire_rows){0};
    for (int i = 0; i < team->local_size; i++) {
        const struct hr_lone_rows *shown = rows_of(round, team->index_of_local[i]);
        struct hr_wire_message message;
        if (shown->bytes > sizeof shown->message) {
            return HORO_ERR_INTERNAL;
        }
        HR_TRY(hr_wire_decode(shown->message, shown->bytes, &message));
        if (message.type != HR_WIRE_ROWS || message.id != round->request->announced_id) {
            return HORO_ERR_INTERNAL;
        }
        HR_TRY(hr_buffer_append(all, message.rows.data, message.rows.bytes));
        rows->count += message.rows.count;
    }
    rows->data = hr_buffer_front(all);
    rows->bytes = hr_buffer_size(all);
    return HORO_OK;
}

struct hr_request *hr_round_leave(struct hr_round *round, int is_complete) {
    struct hr_request *request = round->request;
    round->request = NULL;
    round->is_taken_up = 0;
    round->rounds += is_complete != 0;
    return request;
}

/* ---- The leader ---- */

/* The position behind all that this leader has written. */
static uint64_t position_of_end(const struct hr_round *round) {
    /* by me */
    const uint64_t written = atomic_load_explicit(&round->team->partition.header->log.written, memory_order_relaxed);
    return position(written, round->rounds);
}

void hr_round_close(const struct hr_round *round) {
    const uint64_t closed = position_of_end(round) | CLOSED;
    uint64_t word = atomic_load(word_of(round));
    while ((word & CLOSED) == 0 && !atomic_compare_exchange_weak(word_of(round), &word, closed)) {
    }
}

void hr_round_reopen(const struct hr_round *round) {
    atomic_store(word_of(round), position_of_end(round)); /* partner: hr_round_enter */
}

/* ---- Carried data ---- */

static uint8_t *data_of(const struct hr_carry *carry, int member) {
    return carry->data + (size_t)member * HR_CARRIED_MAX;
}

void hr_carry_add(struct hr_carry *carry, int member, uint32_t id, const void *data, size_t bytes) {
    const size_t members = (size_t)carry->members;
    if (carry->contributions == NULL) {
        carry->contributions = calloc(members, sizeof *carry->contributions + HR_CARRIED_MAX + sizeof *carry->has);
        if (carry->contributions == NULL) {
            return;
        }
        carry->data = (uint8_t *)(carry->contributions + members);
        carry->has = carry->data + members * HR_CARRIED_MAX;
    }
    if (carry->id == 0) {
        carry->id = id;
        carry->bytes = bytes;
    }
    if (bytes <= HR_CARRIED_MAX && carry->id == id && carry->bytes == bytes && !carry->has[member]) {
        carry->has[member] = 1;
        carry->count++;
        memcpy(data_of(carry, member), data, bytes);
    }
}

int hr_carry_reduce(const struct hr_carry *carry, const struct hr_team *team, const struct hr_request *request) {
    const int local_size = team->local_size;
    const int children = carry->members - local_size;
    if (hr_carried_bytes(team, &request->call) != carry->bytes) {
        return HORO_ERR_INTERNAL; /* no data of the request was carried */
    }
    if (local_size > 1) {
        for (int i = 0; i < local_size; i++) {
            carry->contributions[i] = data_of(carry, i);
        }
        hr_carried_reduce_host(team, &request->call, carry->contributions, carry->data);
    }
    if (children > 0) {
        carry->contributions[0] = carry->data;
        for (int i = 0; i < children; i++) {
            carry->contributions[1 + i] = data_of(carry, local_size + i);
        }
        hr_carried_reduce(team, &request->call, carry->contributions, 1 + children, team->rank == 0, carry->data);
    }
    return HORO_OK;
}

void hr_carry_clear(struct hr_carry *carry) {
    if (carry->id != 0) {
        memset(carry->has, 0, (size_t)carry->members * sizeof *carry->has);
        carry->id = 0;
        carry->count = 0;
    }
}
