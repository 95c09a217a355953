/* Sends and receives as requests, and as a part of the loop. */
#include "engine/pairs/private.h"

#include <stdio.h>
#include <stdlib.h>

#include "arena/arena.h"
#include "base/clock.h"
#include "base/traits.h"
#include "node/end.h"

/* ---- The part of the loop ---- */

/* With the lock held, or before anything drives. HORO_OK, or a status with *error set. */
static hr_status open_mail(struct hr_pairs *pairs, struct hr_error *error) {
    HR_TRY(atomic_load(&pairs->is_open) ? HORO_OK : hr_mail_open(&pairs->mail, error));
    atomic_store(&pairs->is_open, 1);
    return HORO_OK;
}

hr_status hr_pairs_take_in(struct hr_pairs *pairs, int member, const struct hr_wire_message *wire) {
    struct hr_mail_message message;
    HR_TRY(hr_mail_of_link(&pairs->mail, member, wire, &message));
    pairs->part.is_quiet = 0;
    const int local = hr_mail_local_of(&pairs->mail, message.to);
    if (local >= 0 && message.kind == HR_MAIL_ASK) {
        hr_node_ask(pairs->mail.node, local);
        return HORO_OK;
    }
    return message.to != pairs->mail.node->rank ? hr_mail_pass(&pairs->mail, &message, wire->data)
                                                : hr_moves_handle(pairs, &message, wire->data);
}

/*
 * While nothing of this rank is under way, what others offer stays where it is, but for a leader, who passes on what
 * is for other hosts.
 */
static int turn(struct hr_part *part) {
    struct hr_pairs *pairs = part->owner;
    if (part->is_quiet && (pairs->mail.leader == NULL || !hr_mail_is_rung(&pairs->mail))) {
        return HR_STILL;
    }
    const struct hr_arena *arena = &pairs->mail.node->arena;
    const int has_ended = pairs->requests->drive->stage == HR_STAGE_ENDED;
    const int has_left = atomic_load(&arena->blocks[arena->local_rank].state) == HR_MEMBER_LEFT;
    if (has_ended && (has_left || hr_arena_aborted(arena).code != 0)) {
        part->is_quiet = 1;
        return hr_moves_end(pairs, 1);
    }
    const int took = hr_mail_take(&pairs->mail, hr_moves_handle, pairs);
    HR_TRY(took);
    const int read = hr_moves_read_some(pairs);
    HR_TRY(read);
    const int sent = hr_moves_send_pieces(pairs);
    HR_TRY(sent);
    const int flushed = hr_mail_flush(&pairs->mail);
    const int ended = has_ended ? hr_moves_end(pairs, 0) : HR_STILL;
    part->is_quiet = pairs->mail.unsent == 0;
    for (int state = 0; state < HR_MOVE_STATES; state++) {
        part->is_quiet &= pairs->moves_in[state].first == NULL;
    }
    return took | read | sent | flushed | ended;
}

/* Whether something for a neighbour waits for room. */
static int needs(const struct hr_part *part) {
    const struct hr_pairs *pairs = part->owner;
    return pairs->mail.unsent > 0;
}

static uint64_t count_moves(const struct hr_part *part) {
    const struct hr_pairs *pairs = part->owner;
    return pairs->moves + pairs->mail.moves;
}

/* ---- Those that do not move ---- */

void hr_pairs_describe(const struct hr_pairs *pairs, const struct hr_request *request, char *text, size_t text_bytes) {
    const struct hr_node *node = pairs->mail.node;
    const struct hr_move_of_pair *move = request->cargo.data;
    const int sends = request->call.op == HORO_SEND;
    const int is_any = move->pair.peer < 0;
    char who[HR_NAME_TEXT_BYTES] = "no rank";
    if (!is_any) {
        (void)hr_node_name_rank(node, move->pair.peer, who, sizeof who);
    }
    if (move->limit > 0 || move->moved > 0 || (!sends && move->send > 0)) { /* both ends have been called */
        (void)snprintf(text, text_bytes, "%s does not answer, and rank %d waits for %s", who, node->rank,
                       request->call.name);
    } else {
        (void)snprintf(text, text_bytes, "%s has %scalled %s rank %d, tag %d", who, is_any ? "" : "not ",
                       sends ? "receive from" : "send to", node->rank, move->pair.tag);
    }
}

/* The rank that it waits for is to say where its program stands. */
static void ask(struct hr_pairs *pairs, int peer) {
    const int local = peer < 0 ? -1 : hr_mail_local_of(&pairs->mail, peer);
    if (local >= 0) {
        hr_node_ask(pairs->mail.node, local);
    } else if (peer >= 0) { /* a question is not worth the end of the job */
        (void)hr_mail_put(&pairs->mail, peer, (struct hr_mail_message){.kind = HR_MAIL_ASK}, NULL);
    }
}

/* A report of stalls, as those of stall.c for what all ranks do. */
static int64_t due(struct hr_part *part, int64_t now_ns) {
    struct hr_pairs *pairs = part->owner;
    const int64_t warning_ns = pairs->mail.node->stall_warning_ns;
    const int64_t again_ns = pairs->reported_ns + warning_ns;
    if (warning_ns <= 0 || (pairs->reported_ns != 0 && now_ns < again_ns)) {
        return warning_ns <= 0 ? HR_NEVER : again_ns;
    }
    char lines[2 * HORO_MESSAGE_MAX];
    size_t used = 0;
    int count = 0;
    int64_t next_ns = HR_NEVER;
    int64_t oldest_ns = now_ns;
    hr_drive_lock(pairs->requests->drive);
    for (const struct hr_request *request = pairs->requests->oldest; request != NULL; request = request->newer) {
        struct hr_move_of_pair *move = request->cargo.data;
        if (!hr_op_is(request->call.op, HR_OP_OF_PAIRS)) {
            continue;
        }
        if (move->since_ns == 0 || move->moved != move->seen) {
            move->since_ns = move->since_ns == 0 ? request->submit_ns : now_ns;
            move->seen = move->moved;
        }
        if (now_ns - move->since_ns < warning_ns) {
            next_ns = move->since_ns + warning_ns < next_ns ? move->since_ns + warning_ns : next_ns;
            continue;
        }
        next_ns = now_ns + warning_ns < next_ns ? now_ns + warning_ns : next_ns;
        oldest_ns = move->since_ns < oldest_ns ? move->since_ns : oldest_ns;
        if (count++ < HR_NAMES_IN_TEXT) {
            char line[HORO_MESSAGE_MAX / 4];
            hr_pairs_describe(pairs, request, line, sizeof line);
            used += (size_t)snprintf(lines + used, sizeof lines - used, "\n  %s", line);
            ask(pairs, move->pair.peer);
        }
    }
    hr_drive_unlock(pairs->requests->drive);
    if (count > 0) {
        char seconds[HR_SECONDS_BYTES];
        pairs->reported_ns = now_ns;
        hr_log(&pairs->mail.node->log, HORO_LOG_WARNING, "waiting for %s s for the other end of sends and receives:%s",
               hr_seconds(now_ns - oldest_ns, seconds), lines);
    }
    return next_ns;
}

static const struct hr_part_ops PART = {.rank = HR_PART_PAIRS, .turn = turn, .outlives = 1, .due = due,
                                        .await = hr_part_rest, .needs = needs, .moves = count_moves};

/* ---- Requests ---- */

static int announce(struct hr_request *request) {
    struct hr_move_of_pair *move = request->cargo.data;
    struct hr_pairs *pairs = move->pairs;
    if (pairs->part.ops == NULL) {
        hr_drive_lock(pairs->requests->drive);
        hr_drive_add(pairs->requests->drive, &pairs->part, &PART, pairs);
        hr_drive_unlock(pairs->requests->drive);
    }
    pairs->part.is_quiet = 0;
    hr_part_expect(&pairs->part, request->submit_ns + pairs->mail.node->stall_warning_ns);
    return request->call.op == HORO_SEND ? hr_move_offer(pairs, move) : hr_move_post(pairs, move);
}

static const struct hr_hooks HOOKS = {.announce = announce, .freed = free};

static hr_status check(const struct hr_node *node, int op, struct hr_pair pair, struct hr_error *error) {
    const char *name = hr_op_name(op);
    const int is_any = op == HORO_RECEIVE && pair.peer == -1;
    if (!is_any && (pair.peer < 0 || pair.peer >= node->size)) {
        return hr_fail(error, HORO_ERR_USAGE, "%s: rank %d does not exist; ranks are 0 to %d", name, pair.peer,
                       node->size - 1);
    }
    if (pair.peer == node->rank) {
        return hr_fail(error, HORO_ERR_USAGE, "%s: rank %d is this rank itself; copy the tensor", name, pair.peer);
    }
    if (pair.tag < 0) {
        return hr_fail(error, HORO_ERR_USAGE, "%s: tag %d; tags are 0 or more", name, pair.tag);
    }
    return HORO_OK;
}

hr_status hr_pairs_submit(struct hr_pairs *pairs, const horo_request *given, struct hr_pair pair, int64_t *handle,
                          struct hr_error *error) {
    struct hr_requests *requests = pairs->requests;
    const horo_tensor *tensor = given->tensors;
    const int op = given->op;
    HR_TRY(check(requests->node, op, pair, error));
    hr_drive_lock(requests->drive);
    const hr_status opened = open_mail(pairs, error);
    hr_drive_unlock(requests->drive);
    HR_TRY(opened);
    char name[64];
    if (pair.peer < 0) {
        (void)snprintf(name, sizeof name, "receive from any rank, tag %d", pair.tag);
    } else {
        (void)snprintf(name, sizeof name, "%s rank %d, tag %d", op == HORO_SEND ? "send to" : "receive from", pair.peer,
                       pair.tag);
    }
    const horo_request call = {
        .name = name, .op = op, .flags = given->flags & HORO_SUBMIT_SYNC, .timeout_ms = given->timeout_ms,
        .prescale = 1.0, .postscale = 1.0, .tensors = tensor, .tensor_count = 1};
    struct hr_request *request = NULL;
    HR_TRY(hr_requests_create(requests, &call, &request, error));
    struct hr_move_of_pair *move = malloc(sizeof *move);
    if (move == NULL) {
        hr_request_destroy(request);
        return hr_fail(error, HORO_ERR_RESOURCE, "'%s': out of memory", name);
    }
    *move = (struct hr_move_of_pair){
        .pairs = pairs, .request = request, .pair = pair, .dtype = tensor->dtype,
        .count = (uint64_t)request->data_bytes / hr_dtype_bytes(tensor->dtype), .bytes = (size_t)request->data_bytes,
        .data = op == HORO_SEND ? (char *)(uintptr_t)tensor->input : tensor->output,
    };
    request->cargo = (struct hr_cargo){&HOOKS, move};
    return hr_requests_add(requests, request, handle, error);
}

hr_status hr_pairs_put_pending(const struct hr_pairs *pairs, struct hr_buffer *out) {
    const struct hr_request *request = pairs->requests->oldest;
    for (; request != NULL; request = request->newer) {
        const struct hr_move_of_pair *move = request->cargo.data;
        if (hr_op_is(request->call.op, HR_OP_OF_PAIRS)) {
            const struct hr_wire_move told = {move->pair.peer, move->pair.tag, request->call.op == HORO_SEND};
            HR_TRY(hr_wire_put_move(out, told));
        }
    }
    return HORO_OK;
}

int hr_pairs_has_left(struct hr_pairs *pairs, int with_sends) {
    const int sends = with_sends && (pairs->moves_in[HR_MOVE_OFFERED].first != NULL ||
                                   pairs->moves_in[HR_MOVE_PULLED].first != NULL);
    const int is_running = pairs->requests->drive->stage == HR_STAGE_RUNNING; /* else no leader passes anything on */
    return atomic_load(&pairs->is_open) &&
           (sends || (is_running ? hr_mail_is_left(&pairs->mail) : pairs->mail.unsent > 0));
}

/* ---- The beginning and the end ---- */

hr_status hr_pairs_init(struct hr_pairs *pairs, struct hr_requests *requests, int reads, struct hr_leader *leader,
                        struct hr_error *error) {
    *pairs = (struct hr_pairs){.requests = requests, .reads = reads, .offers_tail = &pairs->offers};
    pairs->mail.node = requests->node;
    pairs->mail.leader = leader;
    if (leader == NULL) {
        return HORO_OK;
    }
    hr_drive_add(requests->drive, &pairs->part, &PART, pairs);
    return open_mail(pairs, error);
}

void hr_pairs_fini(struct hr_pairs *pairs) {
    while (pairs->offers != NULL) {
        struct hr_offer *offer = pairs->offers;
        pairs->offers = offer->next;
        free(offer);
    }
    hr_mail_fini(&pairs->mail);
}
