/* The two ends of a send: the states of pairs.h. */
#include "engine/pairs/private.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cut.h"
#include "base/traits.h"
#include "collective/collective.h"
#include "node/end.h"

enum {
    WITH_OFFER_MAX = 1 << 12, /* bytes: two copies by the ring take no longer than a read */
    READ_AT_ONCE = 1 << 19,   /* bytes, before the driver looks at other things */
    WINDOW = 1 << 20,         /* bytes from another host that leaders may have on the way to a receive */
    TEXT_BYTES = 512,
};

/* ---- Lists ---- */

static void append(struct hr_pairs *pairs, struct hr_move_of_pair *move, enum hr_move_state state) {
    struct hr_move_of_pair **last = &pairs->moves_in[state].last;
    move->state = state;
    move->previous = *last;
    move->next = NULL;
    *(*last == NULL ? &pairs->moves_in[state].first : &(*last)->next) = move;
    *last = move;
}

static void take_out(struct hr_pairs *pairs, struct hr_move_of_pair *move) {
    *(move->previous == NULL ? &pairs->moves_in[move->state].first : &move->previous->next) = move->next;
    *(move->next == NULL ? &pairs->moves_in[move->state].last : &move->next->previous) = move->previous;
}

static void set_state(struct hr_pairs *pairs, struct hr_move_of_pair *move, enum hr_move_state state) {
    take_out(pairs, move);
    append(pairs, move, state);
}

/* The one that a message is about, by its rank and number of the send; NULL: there is none. */
static struct hr_move_of_pair *find(const struct hr_pairs *pairs, enum hr_move_state state,
                                    const struct hr_mail_message *message) {
    struct hr_move_of_pair *move = pairs->moves_in[state].first;
    while (move != NULL && (move->send != message->send || move->pair.peer != message->from)) {
        move = move->next;
    }
    return move;
}

/* ---- Both ends ---- */

static int is_far(const struct hr_pairs *pairs, const struct hr_move_of_pair *move) {
    return hr_mail_local_of(&pairs->mail, move->pair.peer) < 0;
}

static void complete(struct hr_pairs *pairs, struct hr_move_of_pair *move, int status, const char *text) {
    struct hr_request *request = move->request;
    take_out(pairs, move);
    pairs->moves++;
    pairs->sent += request->call.op == HORO_SEND;
    pairs->received += request->call.op == HORO_RECEIVE;
    hr_requests_complete(pairs->requests, &request, 1, status, text);
}

/* The tensors of the two ends are not alike: `count` values of `dtype` are at the other one. */
static void fail(struct hr_pairs *pairs, struct hr_move_of_pair *move, int dtype, uint64_t count) {
    const struct hr_node *node = pairs->mail.node;
    const int sends = move->request->call.op == HORO_SEND;
    char text[TEXT_BYTES + 2 * HR_NAME_TEXT_BYTES];
    char who[HR_NAME_TEXT_BYTES];
    char other[HR_NAME_TEXT_BYTES];
    (void)snprintf(text, sizeof text, "'%s': %s %s %llu values of %s, but %s %s %llu values of %s; both must be alike",
                   move->request->call.name, hr_node_name_rank(node, node->rank, who, sizeof who),
                   sends ? "sends" : "receives", (unsigned long long)move->count, hr_dtype_name(move->dtype),
                   hr_node_name_rank(node, move->pair.peer, other, sizeof other), sends ? "receives" : "sends",
                   (unsigned long long)count, hr_dtype_name(dtype));
    complete(pairs, move, HORO_ERR_MISMATCH, text);
}

/* ---- Receiving ---- */

/* All has come. The sender is told before the caller here, who may end at once. */
static hr_status end_receive(struct hr_pairs *pairs, struct hr_move_of_pair *move) {
    const struct hr_mail_message done = {.kind = HR_MAIL_DONE, .send = move->send};
    HR_TRY(hr_mail_put(&pairs->mail, move->pair.peer, done, NULL));
    move->request->answer = move->pair.peer;
    complete(pairs, move, HORO_OK, NULL);
    return HORO_OK;
}

static hr_status ask_for_more(struct hr_pairs *pairs, struct hr_move_of_pair *move) {
    const struct hr_mail_message message = {.kind = HR_MAIL_PULL, .send = move->send, .count = move->moved};
    move->limit = is_far(pairs, move) ? move->moved + hr_smaller(move->bytes - move->moved, WINDOW) : move->bytes;
    return hr_mail_put(&pairs->mail, move->pair.peer, message, NULL);
}

/* From a rank of another host one comes behind the other. */
static hr_status pull(struct hr_pairs *pairs, struct hr_move_of_pair *move) {
    int is_next = 1;
    const struct hr_move_of_pair *other = pairs->moves_in[HR_MOVE_PULLING].first;
    for (; other != NULL; other = other->next) {
        is_next &= other->pair.peer != move->pair.peer || !is_far(pairs, move);
    }
    set_state(pairs, move, HR_MOVE_PULLING);
    return is_next ? ask_for_more(pairs, move) : HORO_OK;
}

/* A receive, and the offer that it was meant for. */
static hr_status match(struct hr_pairs *pairs, struct hr_move_of_pair *move, const struct hr_mail_message *offer,
                       const void *data) {
    move->pair.peer = offer->from;
    move->send = offer->send;
    move->address = offer->address;
    if (move->dtype != offer->dtype || move->count != offer->count) {
        const struct hr_mail_message message = {.kind = HR_MAIL_DONE, .send = offer->send, .dtype = move->dtype,
                                                .status = HORO_ERR_MISMATCH, .count = move->count};
        HR_TRY(hr_mail_put(&pairs->mail, offer->from, message, NULL));
        fail(pairs, move, offer->dtype, offer->count);
        return HORO_OK;
    }
    if (move->bytes == offer->bytes) {
        if (move->bytes > 0) {
            memcpy(move->data, data, move->bytes);
        }
        return end_receive(pairs, move);
    }
    if (!pairs->reads || is_far(pairs, move)) {
        return pull(pairs, move);
    }
    set_state(pairs, move, HR_MOVE_READING);
    return HORO_OK;
}

static int is_for(struct hr_pair pair, const struct hr_mail_message *offer) {
    return pair.tag == offer->tag && (pair.peer == offer->from || pair.peer < 0);
}

hr_status hr_move_post(struct hr_pairs *pairs, struct hr_move_of_pair *move) {
    struct hr_offer **link = &pairs->offers;
    append(pairs, move, HR_MOVE_POSTED);
    while (*link != NULL && !is_for(move->pair, &(*link)->message)) {
        link = &(*link)->next;
    }
    struct hr_offer *offer = *link;
    if (offer == NULL) {
        return HORO_OK;
    }
    *link = offer->next;
    pairs->offers_tail = *link == NULL ? link : pairs->offers_tail;
    const hr_status status = match(pairs, move, &offer->message, offer->data);
    free(offer);
    return status;
}

static hr_status take_offer(struct hr_pairs *pairs, const struct hr_mail_message *message, const void *data) {
    for (struct hr_move_of_pair *move = pairs->moves_in[HR_MOVE_POSTED].first; move != NULL; move = move->next) {
        if (is_for(move->pair, message)) {
            return match(pairs, move, message, data);
        }
    }
    struct hr_offer *offer = malloc(sizeof *offer + message->bytes);
    if (offer == NULL) {
        return HORO_ERR_RESOURCE;
    }
    *offer = (struct hr_offer){.message = *message};
    memcpy(offer->data, data, message->bytes);
    *pairs->offers_tail = offer;
    pairs->offers_tail = &offer->next;
    return HORO_OK;
}

/*
 * A part of the first one. A sender that ends may give its memory to something else: what is read then is not looked
 * at, for that fails the receive, too.
 */
int hr_moves_read_some(struct hr_pairs *pairs) {
    struct hr_move_of_pair *move = pairs->moves_in[HR_MOVE_READING].first;
    if (move == NULL) {
        return HR_STILL;
    }
    const struct hr_node *node = pairs->mail.node;
    const struct hr_peer_range range = {move->data + move->moved, move->address + move->moved,
                                        hr_smaller(move->bytes - move->moved, READ_AT_ONCE)};
    const int local = hr_mail_local_of(&pairs->mail, move->pair.peer);
    const int error = hr_read_peer(node, local, &range, 1);
    /* partner: turn, in leave.c */
    if (hr_arena_aborted(&node->arena).code != 0 || atomic_load(&node->arena.blocks[local].state) == HR_MEMBER_LEFT) {
        return HR_STILL;
    }
    pairs->moves++;
    if (error != 0) {
        hr_log(&node->log, HORO_LOG_INFO, "large sends from rank %d go by shared memory, since it cannot be read: %s",
               move->pair.peer, strerror(error));
        pairs->reads &= error == EFAULT; /* its memory alone, or it is gone: then its life line ends the group */
        HR_TRY(pull(pairs, move));
        return HR_MOVED;
    }
    move->moved += range.bytes;
    if (move->moved == move->bytes) {
        HR_TRY(end_receive(pairs, move));
    }
    return HR_MOVED;
}

static hr_status take_data(struct hr_pairs *pairs, const struct hr_mail_message *message, const void *data) {
    struct hr_move_of_pair *move = find(pairs, HR_MOVE_PULLING, message);
    if (move == NULL || message->count != move->moved || message->bytes > move->limit - move->moved) {
        return HORO_ERR_INTERNAL;
    }
    memcpy(move->data + move->moved, data, message->bytes);
    move->moved += message->bytes;
    if (move->moved < move->bytes) {
        return move->limit < move->bytes && move->limit - move->moved <= WINDOW / 2 ? ask_for_more(pairs, move)
                                                                                    : HORO_OK;
    }
    HR_TRY(end_receive(pairs, move));
    struct hr_move_of_pair *next = pairs->moves_in[HR_MOVE_PULLING].first;
    while (next != NULL && (next->pair.peer != message->from || next->limit > 0)) {
        next = next->next;
    }
    return next == NULL ? HORO_OK : ask_for_more(pairs, next);
}

/* ---- Sending ---- */

hr_status hr_move_offer(struct hr_pairs *pairs, struct hr_move_of_pair *move) {
    const int is_small = move->bytes <= WITH_OFFER_MAX;
    move->send = ++pairs->last_send;
    append(pairs, move, HR_MOVE_OFFERED);
    const struct hr_mail_message message = {
        .kind = HR_MAIL_OFFER, .send = move->send, .tag = move->pair.tag, .dtype = move->dtype, .count = move->count,
        .address = (uint64_t)(uintptr_t)move->data, .bytes = (uint16_t)(is_small ? move->bytes : 0)};
    return hr_mail_put(&pairs->mail, move->pair.peer, message, move->data);
}

static hr_status take_pull(struct hr_pairs *pairs, const struct hr_mail_message *message) {
    struct hr_move_of_pair *move = find(pairs, HR_MOVE_PULLED, message);
    const int is_first = move == NULL;
    move = is_first ? find(pairs, HR_MOVE_OFFERED, message) : move;
    if (move == NULL || message->count > (is_first ? move->bytes : move->moved)) {
        return HORO_ERR_INTERNAL;
    }
    if (is_first) {
        move->moved = (size_t)message->count;
        set_state(pairs, move, HR_MOVE_PULLED);
    }
    const size_t left = move->bytes - (size_t)message->count;
    move->limit = (size_t)message->count + (is_far(pairs, move) ? hr_smaller(left, WINDOW) : left);
    return HORO_OK;
}

static int may_send(const struct hr_pairs *pairs, const struct hr_move_of_pair *move) {
    return move->moved < move->limit && hr_mail_has_room(&pairs->mail, move->pair.peer);
}

/* Of the first one whose receiver has room, as much as that takes. */
int hr_moves_send_pieces(struct hr_pairs *pairs) {
    struct hr_move_of_pair *move = pairs->moves_in[HR_MOVE_PULLED].first;
    while (move != NULL && !may_send(pairs, move)) {
        move = move->next;
    }
    if (move == NULL) {
        return HR_STILL;
    }
    do {
        const struct hr_mail_message message = {
            .kind = HR_MAIL_DATA, .send = move->send, .count = move->moved,
            .bytes = (uint16_t)hr_smaller(move->limit - move->moved, HR_WIRE_MAIL_MAX)};
        HR_TRY(hr_mail_put(&pairs->mail, move->pair.peer, message, move->data + move->moved));
        move->moved += message.bytes;
    } while (may_send(pairs, move));
    if (move->moved == move->bytes) { /* until it is done */
        set_state(pairs, move, HR_MOVE_OFFERED);
    }
    return HR_MOVED;
}

/* ---- The end ---- */

/* Whether its other rank, or all that it may be, will do no more, and what they have sent has been taken in. */
static int is_over(const struct hr_pairs *pairs, const struct hr_move_of_pair *move) {
    const struct hr_node *node = pairs->mail.node;
    int is_here = 0;
    for (int i = 0; i < node->local_size; i++) {
        const int counts = move->pair.peer < 0 ? i != node->local_rank : node->rank_of_local[i] == move->pair.peer;
        /* partner: turn, in leave.c */
        is_here |= counts && atomic_load(&node->arena.blocks[i].state) != HR_MEMBER_LEFT;
    }
    return !is_here && !hr_mail_is_rung(&pairs->mail);
}

static void fail_over(struct hr_pairs *pairs, struct hr_move_of_pair *move, int all) {
    const struct hr_node *node = pairs->mail.node;
    struct hr_abort end = hr_arena_aborted(&node->arena);
    if (end.code == 0) {
        end = hr_end_find(node);
        if (!all && move->pair.peer >= 0 && !is_far(pairs, move) && end.reason != HR_REASON_ENDED) {
            end = (struct hr_abort){.code = HORO_ERR_ABORTED, .rank = move->pair.peer, .reason = HR_REASON_LEFT};
        }
    }
    char text[HORO_MESSAGE_MAX];
    hr_drive_lock(pairs->requests->drive);
    hr_requests_describe_end(pairs->requests, end, move->request, text, sizeof text);
    hr_requests_complete_locked(pairs->requests, move->request, end.code, text);
    hr_drive_wake_waiters(pairs->requests->drive);
    hr_drive_unlock(pairs->requests->drive);
}

int hr_moves_end(struct hr_pairs *pairs, int all) {
    int moved = HR_STILL;
    for (int state = 0; state < HR_MOVE_STATES; state++) {
        struct hr_move_of_pair *next;
        for (struct hr_move_of_pair *move = pairs->moves_in[state].first; move != NULL; move = next) {
            next = move->next;
            if (all || is_over(pairs, move)) {
                hr_end_show(pairs->mail.node);
                take_out(pairs, move);
                fail_over(pairs, move, all);
                moved = HR_MOVED;
            }
        }
    }
    return moved;
}

/* ---- Messages ---- */

hr_status hr_moves_handle(void *owner, const struct hr_mail_message *message, const void *data) {
    struct hr_pairs *pairs = owner;
    struct hr_move_of_pair *move = NULL;
    if (pairs->requests->drive->stage != HR_STAGE_RUNNING && hr_mail_local_of(&pairs->mail, message->from) < 0) {
        return HORO_OK; /* its move has failed */
    }
    switch (message->kind) {
    case HR_MAIL_OFFER: return take_offer(pairs, message, data);
    case HR_MAIL_DATA: return take_data(pairs, message, data);
    case HR_MAIL_PULL: return take_pull(pairs, message);
    case HR_MAIL_DONE:
        move = find(pairs, HR_MOVE_OFFERED, message);
        if (move == NULL) {
            return HORO_ERR_INTERNAL;
        }
        if (message->status == HORO_OK) {
            complete(pairs, move, HORO_OK, NULL);
        } else {
            fail(pairs, move, message->dtype, message->count);
        }
        return HORO_OK;
    default: return HORO_ERR_INTERNAL;
    }
}
