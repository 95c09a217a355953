/*
 * The members of a leader's agreement, what they announce and what becomes of it once all have; and the talk between
 * leaders along the tree of hosts.
 *
 * A control link: whatever has gathered while the last bytes were on their way goes next, in one piece, and a receive
 * takes whatever has come, so the messages of a small operation are one send and one receive. A receive is always
 * posted, so a broken link is noticed while a leader waits for anything.
 */
#include <stdlib.h>
#include <string.h>

#include "arena/arena.h"
#include "engine/lead/leader.h"
#include "node/team.h"
#include "wire/frame.h"

enum { RECEIVE_BYTES = 1 << 16 };

/* ---- Links ---- */

static int post_receive(const struct hr_leader *leader, struct hr_link *link) {
    struct hr_transport *transport = leader->team->transport;
    HR_TRY(transport->ops->post(transport, HR_RECV, link->host, HR_CHANNEL_CONTROL, (char *)link->received,
                                RECEIVE_BYTES, &link->recv));
    link->recv.takes_some = 1; /* only progress looks at it */
    return HORO_OK;
}

int hr_leader_open_links(struct hr_leader *leader, struct hr_error *error) {
    const struct hr_team *team = leader->team;
    leader->links = calloc((size_t)team->host_count, sizeof *leader->links);
    if (leader->links == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory for the links of %d hosts", team->host_count);
    }
    for (int host = 0; host < team->host_count; host++) {
        if (!hr_hosts_are_linked(HR_CHANNEL_CONTROL, team->host_count, team->host, host)) {
            continue;
        }
        leader->has_parent |= host < team->host;
        const int rank = team->job_rank[team->leader_of_host[host]];
        struct hr_link *link = &leader->links[leader->link_count++];
        *link = (struct hr_link){.host = host, .leader_rank = rank, .open = 1, .received = malloc(RECEIVE_BYTES)};
        const int status = link->received == NULL ? HORO_ERR_RESOURCE : post_receive(leader, link);
        if (status == HORO_ERR_RESOURCE) {
            return hr_fail(error, status, "no memory for the link to host %d", host);
        }
        if (status != HORO_OK) {
            return hr_fail(error, status, "host %d has no connection for agreement to host %d (%s)", team->host, host,
                           team->node->host_name_of_rank[rank]);
        }
    }
    return HORO_OK;
}

/* Moves bytes both ways; received frames are in link->in. HR_STILL, HR_MOVED, or HORO_ERR_PEER_LOST: it is broken. */
static int progress_link(const struct hr_leader *leader, struct hr_link *link) {
    struct hr_transport *transport = leader->team->transport;
    int moved = HR_STILL;
    if (!link->open) {
        return HR_STILL;
    }
    if (!link->has_no_memory && link->recv.state == HR_IO_FAILED) {
        return HORO_ERR_PEER_LOST;
    }
    if (!link->has_no_memory && link->recv.state == HR_IO_DONE) {
        int status = hr_buffer_append(&link->in, link->received, link->recv.done_bytes);
        status = status == HORO_OK ? post_receive(leader, link) : status;
        if (status != HORO_OK) {
            link->has_no_memory = status != HORO_ERR_PEER_LOST;
            return status;
        }
        moved = HR_MOVED;
    }
    if (link->send.state != HR_IO_POSTED && hr_buffer_size(&link->out) > 0) {
        struct hr_buffer sent = link->sending;
        hr_buffer_consume(&sent, hr_buffer_size(&sent));
        link->sending = link->out;
        link->out = sent;
        HR_TRY(transport->ops->post(transport, HR_SEND, link->host, HR_CHANNEL_CONTROL,
                                    (char *)link->sending.data + link->sending.begin, hr_buffer_size(&link->sending),
                                    &link->send));
        atomic_fetch_add_explicit(&leader->team->node->counts.messages_sent, 1, memory_order_relaxed);
        moved = HR_MOVED;
    }
    return moved;
}

int hr_leader_sends_left(const struct hr_leader *leader) {
    for (int i = 0; i < leader->link_count; i++) {
        const struct hr_link *link = &leader->links[i];
        if (link->open && (hr_buffer_size(&link->out) > 0 || link->send.state == HR_IO_POSTED)) {
            return 1;
        }
    }
    return 0;
}

/* ---- Members ---- */

int hr_leader_hand_down(struct hr_leader *leader, size_t mark) {
    const uint8_t *front = hr_buffer_front(&leader->log_out);
    const size_t bytes = hr_buffer_size(&leader->log_out) - mark;
    if (bytes == 0) {
        return HORO_OK;
    }
    hr_carry_clear(&leader->carry);
    for (int i = leader->has_parent; i < leader->link_count; i++) {
        struct hr_link *link = &leader->links[i];
        HR_TRY(link->open ? hr_buffer_append(&link->out, front + mark, bytes) : HORO_OK);
    }
    return HORO_OK;
}

int hr_leader_put_carried(struct hr_leader *leader, struct hr_buffer *out) {
    struct hr_carry *carry = &leader->carry;
    const uint32_t id = carry->id;
    const int is_whole = carry->count == carry->members && id != 0 && hr_agree_lone(&leader->agree) == id;
    /* this rank is a member, too, but has none any more where its requests have failed at the end of the group */
    const struct hr_request *request = is_whole ? hr_announcer_pending(leader->announcer, id) : NULL;
    if (request == NULL) {
        return HR_STILL;
    }
    HR_TRY(hr_carry_reduce(carry, leader->team, request));
    hr_agree_take_lone(&leader->agree);
    const enum hr_wire_type type = leader->is_root ? HR_WIRE_RESULT : HR_WIRE_DATA;
    HR_TRY(hr_frame_put(out, &(struct hr_wire_message){
        .type = type, .id = id, .data = carry->data, .data_bytes = carry->bytes}));
    return HR_MOVED;
}

int hr_leader_report(struct hr_leader *leader) {
    if (!hr_agree_is_complete(&leader->agree) || leader->log_closed) {
        return HR_STILL; /* behind the LEAVE record nothing is agreed on */
    }
    struct hr_buffer *out = leader->is_root ? &leader->log_out : &leader->links[0].out;
    const size_t mark = hr_buffer_size(out);
    const int carried = leader->is_root ? HR_STILL : hr_leader_put_carried(leader, out);
    HR_TRY(carried);
    HR_TRY(carried == HR_MOVED ? HORO_OK : hr_agree_collect(&leader->agree, out));
    if (leader->is_root) {
        HR_TRY(hr_leader_hand_down(leader, mark));
    } else {
        hr_carry_clear(&leader->carry);
    }
    return HR_MOVED;
}

/* A message for somebody above this room. */
static int handle(struct hr_leader *leader, int member, const struct hr_wire_message *message, int64_t now_ns) {
    hr_leader_handler *handler = leader->handlers[message->type];
    return handler == NULL ? HORO_ERR_INTERNAL : handler(leader->lane, member, message, now_ns);
}

int hr_leader_announce(struct hr_leader *leader, int member, const struct hr_wire_message *message, int64_t now_ns) {
    struct hr_agree *agree = &leader->agree;
    if (message->rank >= leader->team->node->size) {
        return HORO_ERR_INTERNAL;
    }
    if (hr_round_take_up(leader->round)) { /* before a later call is announced */
        hr_agree_skip_call(agree);
    }
    leader->has_news = 1;
    switch (message->type) {
    case HR_WIRE_IDS:
        for (uint32_t i = 0; i < message->count; i++) {
            HR_TRY(hr_agree_announce_id(agree, member, hr_wire_u32(message->items, i), message->rows, now_ns));
        }
        return HORO_OK;
    case HR_WIRE_DATA:
        hr_carry_add(&leader->carry, member, message->id, message->data, message->data_bytes);
        return hr_agree_announce_id(agree, member, message->id, message->rows, now_ns);
    case HR_WIRE_ROWS: return hr_agree_announce_id(agree, member, message->id, message->rows, now_ns);
    case HR_WIRE_REQUEST: return hr_agree_announce_request(agree, member, message, now_ns);
    case HR_WIRE_LEAVE: break;
    default: return handle(leader, member, message, now_ns);
    }
    /* a rank of this subtree wants to leave; one LEAVE record closes the log for all */
    if (leader->team->number != 0) {
        return HORO_ERR_INTERNAL;
    }
    if (leader->leaver != 0) {
        return HORO_OK;
    }
    leader->leaver = message->rank + 1;
    if (leader->is_root) {
        return hr_frame_put(&leader->leave_record, message); /* see form_batches */
    }
    HR_TRY(hr_leader_report(leader)); /* earlier announcements travel first */
    return hr_frame_put(&leader->links[0].out, message);
}

void hr_leader_close_log(struct hr_leader *leader) {
    /* by me */
    const uint64_t written = atomic_load_explicit(&leader->team->partition.header->log.written, memory_order_relaxed);
    atomic_store(&leader->team->node->arena.header->leave_at,
                 written + hr_buffer_size(&leader->log_out) + leader->round->rounds + 1);
    leader->log_closed = 1;
}

/* ---- Messages of other leaders ---- */

static int handle_message(struct hr_leader *leader, int link_index, const struct hr_wire_message *message,
                          int64_t now_ns) {
    struct hr_node *node = leader->team->node;
    const int from_parent = leader->has_parent && link_index == 0;
    if (message->rank >= node->size || message->by >= node->size) {
        return HORO_ERR_INTERNAL;
    }
    switch (message->type) {
    case HR_WIRE_DONE: leader->links[link_index].has_said_done = 1; return HORO_OK;
    case HR_WIRE_LOST:
        if (message->text.bytes > 0) {
            hr_arena_keep_last_words(&node->arena, message->rank, message->text.data, message->text.bytes);
        }
        hr_node_pass_abort(node, (struct hr_abort){
            .code = message->status, .rank = message->rank, .by = message->by, .reason = message->reason});
        return HORO_OK;
    default: break;
    }
    if (!from_parent || !hr_wire_is_record(message->type)) {
        const int64_t at_ns = now_ns == 0 ? hr_now_ns() : now_ns;
        const int member = leader->team->local_size + link_index - leader->has_parent;
        return from_parent ? handle(leader, -1, message, at_ns) : hr_leader_announce(leader, member, message, at_ns);
    }
    HR_TRY(hr_leader_report(leader)); /* before apply, see agree.h */
    if (leader->log_closed || (message->type == HR_WIRE_LEAVE && leader->team->number != 0)) {
        return HORO_ERR_INTERNAL;
    }
    if (message->type == HR_WIRE_LEAVE) {
        hr_leader_close_log(leader);
        leader->leaver = message->rank + 1;
    } else if (message->type != HR_WIRE_TUNE) {
        HR_TRY(hr_agree_apply(&leader->agree, message));
    }
    const size_t mark = hr_buffer_size(&leader->log_out);
    HR_TRY(hr_frame_pass(&leader->log_out, message));
    return hr_leader_hand_down(leader, mark);
}

int hr_leader_progress_links(struct hr_leader *leader, int64_t now_ns) {
    const struct hr_team *team = leader->team;
    int moved = HR_STILL;
    for (int i = 0; i < leader->link_count; i++) {
        struct hr_link *link = &leader->links[i];
        const int status = progress_link(leader, link);
        if (status == HR_STILL) {
            continue;
        }
        if (status < 0 && status != HORO_ERR_PEER_LOST) {
            return status;
        }
        struct hr_wire_message message; /* also one from before the link broke: the LEAVE record perhaps */
        size_t bytes;
        int peeked;
        while ((peeked = hr_frame_peek(&link->in, &message, &bytes)) == HORO_OK) {
            leader->has_news = 1;
            HR_TRY(handle_message(leader, i, &message, now_ns));
            hr_buffer_consume(&link->in, bytes);
        }
        HR_TRY(peeked);
        if (status == HORO_ERR_PEER_LOST) {
            link->open = 0;
            if (!link->has_said_done && !leader->expects_removal && !hr_team_is_left(team)) {
                const enum hr_loss how = team->transport->ops->loss(team->transport, link->host);
                hr_node_abort(team->node, HORO_ERR_PEER_LOST, link->leader_rank,
                              how == HR_LOSS_SILENT ? HR_REASON_SILENT : HR_REASON_LINK);
            }
        }
        moved = HR_MOVED;
    }
    return moved;
}

/* ---- The end ---- */

int hr_leader_is_done(const struct hr_leader *world) {
    const struct hr_arena *arena = &world->team->node->arena;
    for (int i = 1; i < world->team->local_size; i++) {
        /* one that has nothing pending has executed all that stands in the log: no record comes about without it */
        if (!hr_arena_has_closed(arena, i) && atomic_load(&arena->blocks[i].state) != HR_MEMBER_LEFT) {
            return 0;
        }
    }
    for (int i = world->has_parent; i < world->link_count; i++) {
        if (world->links[i].open && !world->links[i].has_said_done) {
            return 0;
        }
    }
    return 1;
}

int hr_leader_flush_links(struct hr_leader *leader) {
    const struct hr_arena *arena = &leader->team->node->arena;
    const struct hr_abort end = hr_arena_aborted(arena);
    const int has_words = end.reason == HR_REASON_ENDED || end.reason == HR_REASON_ABORTED;
    const char *words = has_words ? hr_arena_last_words(arena, end.rank) : NULL;
    const struct hr_wire_message done = {.type = HR_WIRE_DONE, .rank = leader->team->node->rank};
    const struct hr_wire_message lost = {
        .type = HR_WIRE_LOST, .rank = end.rank, .status = end.code, .reason = end.reason, .by = end.by,
        .text = {words, words == NULL ? 0 : strlen(words)}};
    int *is_told = end.code == 0 ? &leader->told_done : &leader->told_abort;
    for (int i = 0; i < leader->link_count && !*is_told; i++) {
        struct hr_link *link = &leader->links[i];
        HR_TRY(link->open ? hr_frame_put(&link->out, end.code == 0 ? &done : &lost) : HORO_OK);
    }
    *is_told = 1;
    (void)hr_node_progress(leader->team->node);
    for (int i = 0; i < leader->link_count; i++) {
        if (progress_link(leader, &leader->links[i]) < 0) {
            leader->links[i].open = 0; /* later messages change nothing */
        }
    }
    return !hr_leader_sends_left(leader);
}
