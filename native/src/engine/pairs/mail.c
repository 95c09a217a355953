#include "engine/pairs/mail.h"

#include <stdlib.h>
#include <string.h>

#include "arena/arena.h"
#include "node/team.h"
#include "wire/frame.h"

_Static_assert(sizeof(struct hr_mail_message) + HR_WIRE_MAIL_MAX <= HR_PAIR_RING_BYTES, "each message has room");

static size_t place_of(const struct hr_mail *mail, int from, int to) {
    return (size_t)to * (size_t)mail->node->local_size + (size_t)from;
}

hr_status hr_mail_open(struct hr_mail *mail, struct hr_error *error) {
    const struct hr_node *node = mail->node;
    struct hr_mail_peer *peers = calloc((size_t)node->local_size, sizeof *peers);
    if (peers == NULL) {
        return hr_fail(error, HORO_ERR_RESOURCE, "out of memory to send to %d ranks", node->local_size);
    }
    const hr_status status = hr_pair_rings_map(&node->arena, &mail->rings, error);
    if (status != HORO_OK) {
        free(peers);
        return status;
    }
    mail->peers = peers;
    return HORO_OK;
}

void hr_mail_fini(struct hr_mail *mail) {
    if (mail->peers == NULL) { /* it was never opened; the context may have no node yet */
        return;
    }
    for (int i = 0; i < mail->node->local_size; i++) {
        hr_buffer_fini(&mail->peers[i].out);
    }
    free(mail->peers);
    mail->peers = NULL;
    hr_pair_rings_unmap(&mail->node->arena, &mail->rings);
}

int hr_mail_local_of(const struct hr_mail *mail, int rank) {
    int local = mail->node->local_size - 1;
    while (local >= 0 && mail->node->rank_of_local[local] != rank) {
        local--;
    }
    return local;
}

/* ---- Between hosts: their leaders pass it on, along the tree ---- */

enum { WAITING_MOST = 1 << 16 }; /* bytes; a record behind them waits for no more */

/* Towards a rank of another host; NULL: there is none. */
static struct hr_link *link_to(const struct hr_leader *leader, int rank) {
    const int host = leader->team->host_of_rank[rank];
    for (int i = leader->has_parent; i < leader->link_count; i++) {
        const int child = leader->links[i].host;
        if (host >= child && host < child + (child & -child)) { /* see node/team.h */
            return &leader->links[i];
        }
    }
    return leader->has_parent ? &leader->links[0] : NULL;
}

hr_status hr_mail_of_link(const struct hr_mail *mail, int member, const struct hr_wire_message *wire,
                          struct hr_mail_message *message) {
    const struct hr_leader *leader = mail->leader;
    const struct hr_link *link = leader == NULL ? NULL : hr_leader_link_of(leader, member);
    const int to = wire->mail.to;
    if (link == NULL || to >= leader->team->size) {
        return HORO_ERR_INTERNAL;
    }
    const struct hr_team *team = leader->team;
    const int goes_on = team->host_of_rank[to] != team->host;
    if (team->host_of_rank[wire->rank] == team->host || link_to(leader, wire->rank) != link ||
        (goes_on && link_to(leader, to) == link)) {
        return HORO_ERR_INTERNAL; /* it does not come from there, or would go back */
    }
    *message = (struct hr_mail_message){
        .from = wire->rank, .to = to, .status = wire->status,
        .kind = (uint16_t)wire->mail.kind, .dtype = wire->mail.dtype, .tag = wire->mail.tag,
        .send = wire->mail.send, .count = wire->mail.count, .bytes = (uint16_t)wire->data_bytes};
    return HORO_OK;
}

/* ---- The way of a message ---- */

/* The way to a rank: the local index whose ring it is, or -1: by this leader's links. */
static int way_to(const struct hr_mail *mail, int rank) {
    const int local = hr_mail_local_of(mail, rank);
    return local < 0 && mail->leader == NULL ? 0 : local;
}

static int ring_has_room(const struct hr_mail *mail, int peer) {
    return hr_buffer_size(&mail->peers[peer].out) == 0;
}

/* Whole messages, so that a reader finds no part of one. 1 if any was moved. */
static int write_out(struct hr_mail *mail, int peer) {
    struct hr_node *node = mail->node;
    struct hr_buffer *out = &mail->peers[peer].out;
    const size_t place = place_of(mail, node->local_rank, peer);
    struct hr_pair_head *head = &mail->rings.heads[place];
    const uint64_t written = atomic_load_explicit(&head->ring.written, memory_order_relaxed); /* mine alone */
    const uint64_t unread = written - atomic_load(&head->read); /* partner: hr_mail_take */
    const size_t room = unread <= HR_PAIR_RING_BYTES ? HR_PAIR_RING_BYTES - (size_t)unread : 0;
    size_t bytes = 0;
    for (const size_t all = hr_buffer_size(out); bytes < all;) {
        struct hr_mail_message message;
        memcpy(&message, hr_buffer_front(out) + bytes, sizeof message);
        if (bytes + sizeof message + message.bytes > room) {
            break;
        }
        bytes += sizeof message + message.bytes;
    }
    if (bytes == 0) {
        return 0;
    }
    (void)hr_ring_write(&head->ring, mail->rings.rings + place * HR_PAIR_RING_BYTES, HR_PAIR_RING_BYTES,
                        written - (HR_PAIR_RING_BYTES - room), hr_buffer_front(out), bytes);
    hr_buffer_consume(out, bytes);
    (void)atomic_fetch_add(&node->arena.blocks[peer].bell, 1); /* partner: hr_mail_take */
    hr_node_wake(node, peer);
    return 1;
}

/* The mark that says so is set before the last look: the reader looks at it when it has made room. */
static int send_out(struct hr_mail *mail, int peer) {
    struct hr_pair_head *head = &mail->rings.heads[place_of(mail, mail->node->local_rank, peer)];
    int moved = write_out(mail, peer);
    if (!ring_has_room(mail, peer)) {
        atomic_store(&head->wants_room, 1);
        moved |= write_out(mail, peer);
    }
    return moved;
}

hr_status hr_mail_pass(struct hr_mail *mail, const struct hr_mail_message *message, const void *data) {
    const int ring = way_to(mail, message->to);
    mail->moves++;
    if (ring < 0) {
        struct hr_link *link = link_to(mail->leader, message->to);
        const struct hr_wire_message wire = {
            .type = HR_WIRE_MAIL, .rank = message->from, .status = message->status,
            .data = data, .data_bytes = message->bytes,
            .mail = {.to = message->to, .kind = message->kind, .dtype = message->dtype, .tag = message->tag,
                     .send = message->send, .count = message->count}};
        HR_TRY(link == NULL ? HORO_ERR_INTERNAL : HORO_OK);
        return link->open ? hr_frame_put(&link->out, &wire) : HORO_OK; /* else the group ends for that */
    }
    struct hr_buffer *out = &mail->peers[ring].out;
    const int is_first = ring_has_room(mail, ring);
    HR_TRY(hr_buffer_reserve(out, sizeof *message + message->bytes));
    (void)hr_buffer_append(out, message, sizeof *message); /* there is room for both */
    (void)hr_buffer_append(out, data, message->bytes);
    if (is_first) {
        (void)send_out(mail, ring);
        mail->unsent += !ring_has_room(mail, ring);
    }
    return HORO_OK;
}

hr_status hr_mail_put(struct hr_mail *mail, int rank, struct hr_mail_message message, const void *data) {
    message.from = mail->node->rank;
    message.to = rank;
    return hr_mail_pass(mail, &message, data);
}

int hr_mail_has_room(const struct hr_mail *mail, int rank) {
    const int ring = way_to(mail, rank);
    if (ring >= 0) {
        return ring_has_room(mail, ring);
    }
    const struct hr_link *link = link_to(mail->leader, rank);
    return link == NULL || hr_buffer_size(&link->out) < WAITING_MOST;
}

int hr_mail_flush(struct hr_mail *mail) {
    int moved = 0;
    for (int peer = 0; mail->unsent > 0 && peer < mail->node->local_size; peer++) {
        if (!ring_has_room(mail, peer)) {
            moved |= send_out(mail, peer);
            if (atomic_load(&mail->node->arena.blocks[peer].state) == HR_MEMBER_LEFT) { /* nobody reads it any more */
                hr_buffer_consume(&mail->peers[peer].out, hr_buffer_size(&mail->peers[peer].out));
            }
            mail->unsent -= ring_has_room(mail, peer);
        }
    }
    return moved ? HR_MOVED : HR_STILL;
}

int hr_mail_is_left(struct hr_mail *mail) {
    const struct hr_node *node = mail->node;
    if (mail->unsent > 0 || node->local_rank == 0 || node->size == node->local_size) {
        return mail->unsent > 0;
    }
    struct hr_pair_head *head = &mail->rings.heads[place_of(mail, node->local_rank, 0)];
    atomic_store(&head->wants_room, 1); /* before the look, as in send_out */
    return atomic_load(&head->read) != atomic_load(&head->ring.written);
}

int hr_mail_is_rung(const struct hr_mail *mail) {
    return atomic_load(&mail->node->arena.blocks[mail->node->local_rank].bell) != mail->rung; /* partner: write_out */
}

/* From the ring of a local rank. */
static hr_status take_one(struct hr_mail *mail, int peer, const struct hr_mail_message *message, const void *data,
                          hr_mail_handler *handle, void *owner) {
    const struct hr_node *node = mail->node;
    const int is_of_peer = message->from == node->rank_of_local[peer];
    if (message->from < 0 || message->from >= node->size || message->to < 0 || message->to >= node->size ||
        (!is_of_peer && (peer != 0 || hr_mail_local_of(mail, message->from) >= 0))) {
        return HORO_ERR_INTERNAL;
    }
    if (message->to == node->rank) {
        return handle(owner, message, data);
    }
    return mail->leader != NULL && hr_mail_local_of(mail, message->to) < 0 ? hr_mail_pass(mail, message, data)
                                                                           : HORO_ERR_INTERNAL;
}

int hr_mail_take(struct hr_mail *mail, hr_mail_handler *handle, void *owner) {
    struct hr_node *node = mail->node;
    const uint64_t rung = atomic_load(&node->arena.blocks[node->local_rank].bell); /* before the rings are read */
    if (rung == mail->rung) {
        return HR_STILL;
    }
    mail->rung = rung;
    for (int peer = 0; peer < node->local_size; peer++) {
        const size_t place = place_of(mail, peer, node->local_rank);
        struct hr_pair_head *head = &mail->rings.heads[place];
        const char *ring = mail->rings.rings + place * HR_PAIR_RING_BYTES;
        uint64_t *read = &mail->peers[peer].read;
        struct hr_mail_message message;
        char data[HR_WIRE_MAIL_MAX];
        size_t got;
        while ((got = hr_ring_read(&head->ring, ring, HR_PAIR_RING_BYTES, read, &message, sizeof message)) > 0) {
            if (got < sizeof message || message.bytes > sizeof data ||
                hr_ring_read(&head->ring, ring, HR_PAIR_RING_BYTES, read, data, message.bytes) != message.bytes) {
                return HORO_ERR_INTERNAL;
            }
            atomic_store(&head->read, *read); /* partner: write_out */
            /* a writer that is woken for each message would write as little as that each time */
            const int is_half_empty = atomic_load(&head->ring.written) - *read <= HR_PAIR_RING_BYTES / 2;
            if (is_half_empty && atomic_load(&head->wants_room) != 0 && atomic_exchange(&head->wants_room, 0) != 0) {
                hr_node_wake(node, peer);
            }
            HR_TRY(take_one(mail, peer, &message, data, handle, owner));
        }
    }
    return HR_MOVED;
}
