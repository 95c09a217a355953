/*
 * The common part of all algorithms between hosts. An algorithm is a list of steps: in each, a member sends one part of
 * the data to one peer and receives one part from another, which replaces its own or is reduced into it. Every part is
 * cut into the same number of pieces, so the pieces of all steps form one sequence
 *
 *     q = step * piece_count + piece
 *
 * and one rule covers the flow of data: a piece may be sent once the same piece of an earlier step, the one before
 * unless the plan names another, is finished (has come and is reduced). Pieces finish in the order of q, whatever order
 * they come in, so the order of summation depends on nothing but the call.
 *
 * Why it cannot hang: what q waits for at any member (the same piece of an earlier step, its own send, a place in the
 * window) has a smaller q at some member, or is the same q on the other side of the link.
 */
#include "base/cut.h"
#include "cross/cross.h"
#include "horo.h"

size_t hr_cross_scratch_bytes(const struct hr_cross_ops *ops, int host_count, size_t value_bytes, size_t bytes,
                              size_t piece_bytes) {
    /* a part of a ring is at most one value longer than the mean */
    const size_t part = ops == &hr_cross_ring ? bytes / (size_t)host_count + value_bytes : bytes;
    const size_t piece = piece_bytes < value_bytes ? value_bytes : piece_bytes;
    return ops->reduces ? HR_CROSS_WINDOW * hr_round_up(hr_smaller(piece, part), HR_CROSS_ALIGNMENT) : 0;
}

void hr_cross_begin(const struct hr_cross_ops *ops, struct hr_cross *state, const struct hr_cross_call *call) {
    *state = (struct hr_cross){.ops = ops, .call = *call, .status = HORO_IN_PROGRESS, .lost_host = -1};
    ops->plan(state, &state->plan);
    const size_t value_bytes = call->codec->wire_bytes;
    const size_t piece_values = call->piece_bytes < value_bytes ? 1 : call->piece_bytes / call->codec->wire_bytes;
    size_t part_values = call->parts == NULL ? hr_divide_up(call->count, state->plan.part_count) : 0; /* the longest */
    for (size_t i = 0; call->parts != NULL && i < state->plan.part_count; i++) {
        const size_t values = call->parts[i].bytes / value_bytes;
        part_values = values > part_values ? values : part_values;
    }
    state->piece_count = hr_divide_up(part_values, piece_values);
    if (state->piece_count > 0) {
        state->slot_bytes =
            hr_round_up(hr_divide_up(part_values, state->piece_count) * value_bytes, HR_CROSS_ALIGNMENT);
    }
    state->total = state->piece_count * (size_t)state->plan.step_count;
}

/* One piece: where it lies in the data. */
struct span {
    char *data;
    size_t count; /* values */
    size_t bytes;
};

static struct hr_step step_of(const struct hr_cross *state, size_t q) {
    const int index = (int)(q / state->piece_count);
    struct hr_step step = {.send_peer = -1, .recv_peer = -1, .after = index - 1};
    state->ops->step(state, index, &step);
    return step;
}

/* The place of q in the data, for one direction; 0: nothing of it moves. Empty pieces (short parts) do not travel. */
static int moves(const struct hr_cross *state, int peer, size_t part, size_t q, struct span *span) {
    const struct hr_cross_call *call = &state->call;
    const size_t value_bytes = call->codec->wire_bytes;
    char *data = call->data;
    size_t part_begin = 0;
    size_t part_count;
    size_t begin;
    if (call->parts != NULL) {
        data = call->parts[part].data;
        part_count = call->parts[part].bytes / value_bytes;
    } else {
        hr_part(call->count, state->plan.part_count, part, &part_begin, &part_count);
    }
    hr_part(part_count, state->piece_count, q % state->piece_count, &begin, &span->count);
    if (peer < 0 || span->count == 0) {
        return 0;
    }
    span->data = data + (part_begin + begin) * value_bytes;
    span->bytes = span->count * value_bytes;
    return 1;
}

static char *slot_of(const struct hr_cross *state, size_t q) {
    return (char *)state->call.scratch + q % HR_CROSS_WINDOW * state->slot_bytes;
}

/* An io that was not posted for this q, because it has nothing to move, is idle and counts as done. */
static int is_over(const struct hr_io *io) {
    return io->state == HR_IO_DONE || io->state == HR_IO_IDLE;
}

static void finish_received(struct hr_cross *state) {
    while (state->finished < state->recv_posted && is_over(&state->recv[state->finished % HR_CROSS_WINDOW])) {
        const size_t q = state->finished;
        const struct hr_step step = step_of(state, q);
        if (step.arrival != HR_ARRIVAL_REPLACES) {
            struct span span;
            if (state->plan.reduces_what_it_sends && state->sent <= q) {
                return;
            }
            if (moves(state, step.recv_peer, step.recv_part, q, &span)) {
                const void *received = slot_of(state, q);
                const int is_left = step.arrival == HR_ARRIVAL_IS_LEFT;
                const void *const operands[2] = {is_left ? received : span.data, is_left ? span.data : received};
                const struct hr_cross_call *call = &state->call;
                hr_kernel_reduce(call->kernel, call->codec->wire_dtype, call->reduce_op, span.data, NULL, operands,
                                 2, span.count, hr_scale_by(1.0), HR_STORE_ORDINARY);
            }
        }
        state->finished++;
    }
}

static hr_status post_receives(struct hr_cross *state) {
    struct hr_transport *transport = state->call.transport;
    const size_t reuse = (size_t)state->plan.reuse_distance * state->piece_count;
    while (state->recv_posted < state->total && state->recv_posted < state->finished + HR_CROSS_WINDOW) {
        const size_t q = state->recv_posted;
        const struct hr_step step = step_of(state, q);
        const int replaces = step.arrival == HR_ARRIVAL_REPLACES;
        struct hr_io *io = &state->recv[q % HR_CROSS_WINDOW];
        struct span span;
        io->state = HR_IO_IDLE;
        if (moves(state, step.recv_peer, step.recv_part, q, &span)) {
            if (replaces && reuse != 0 && q >= reuse && state->sent <= q - reuse) {
                return HORO_OK;
            }
            HR_TRY(transport->ops->post(transport, HR_RECV, step.recv_peer, HR_CHANNEL_DATA,
                                        replaces ? span.data : slot_of(state, q), span.bytes, io));
        }
        state->recv_posted++;
    }
    return HORO_OK;
}

static hr_status post_sends(struct hr_cross *state) {
    struct hr_transport *transport = state->call.transport;
    while (state->send_posted < state->total && state->send_posted < state->sent + HR_CROSS_WINDOW) {
        const size_t q = state->send_posted;
        const struct hr_step step = step_of(state, q);
        const size_t source = (size_t)step.after * state->piece_count + q % state->piece_count;
        if (step.after >= 0 && source >= state->finished) { /* not here yet, or not final */
            break;
        }
        struct hr_io *io = &state->send[q % HR_CROSS_WINDOW];
        struct span span;
        io->state = HR_IO_IDLE;
        if (moves(state, step.send_peer, step.send_part, q, &span)) {
            HR_TRY(transport->ops->post(transport, HR_SEND, step.send_peer, HR_CHANNEL_DATA, span.data, span.bytes,
                                        io));
            atomic_fetch_add_explicit(state->call.sent_bytes, span.bytes, memory_order_relaxed);
        }
        state->send_posted++;
    }
    return HORO_OK;
}

/* Changes with whatever one round of progress has done. */
static size_t counted(const struct hr_cross *state) {
    return state->sent + state->finished + state->recv_posted + state->send_posted;
}

int hr_cross_progress(struct hr_cross *state) {
    if (state->status != HORO_IN_PROGRESS) {
        return state->status;
    }
    /* all that are posted, not only the next one: what comes before a lost piece may never come either */
    for (size_t q = state->sent; q < state->send_posted && state->lost_host < 0; q++) {
        if (state->send[q % HR_CROSS_WINDOW].state == HR_IO_FAILED) {
            state->lost_host = step_of(state, q).send_peer;
        }
    }
    for (size_t q = state->finished; q < state->recv_posted && state->lost_host < 0; q++) {
        if (state->recv[q % HR_CROSS_WINDOW].state == HR_IO_FAILED) {
            state->lost_host = step_of(state, q).recv_peer;
        }
    }
    int status = state->lost_host >= 0 ? HORO_ERR_PEER_LOST : HORO_OK;
    for (size_t before = SIZE_MAX; status == HORO_OK && before != counted(state);) {
        before = counted(state);
        while (state->sent < state->send_posted && is_over(&state->send[state->sent % HR_CROSS_WINDOW])) {
            state->sent++;
        }
        finish_received(state);
        status = post_receives(state);
        status = status == HORO_OK ? post_sends(state) : status;
    }
    if (status != HORO_OK) {
        state->call.transport->ops->abandon(state->call.transport, HR_CHANNEL_DATA);
        state->status = status;
    } else if (state->sent == state->total && state->finished == state->total) {
        state->status = HORO_OK;
    }
    return state->status;
}
