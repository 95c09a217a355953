/*
 * Control links between leaders. Whatever has gathered while the last chunk was on its way is the next chunk: a head of
 * fixed size, which is the chunk's length and its first bytes, then what did not fit. The messages of a small operation
 * fit, so that one receive takes each. The receive of a head is always posted, so a broken link is noticed while a
 * leader waits for anything.
 */
#include <stdlib.h>
#include <string.h>

#include "base/little_endian.h"
#include "engine/engine.h"

/* a chunk may end within a frame */
enum { LENGTH_BYTES = 4, IN_HEAD = HR_LINK_HEAD_BYTES - LENGTH_BYTES, CHUNK_MAX = 1 << 20 };

static int post_head(const struct hr_lane *lane, struct hr_link *link) {
    struct hr_transport *transport = lane->team->transport;
    link->recv_rest = 0;
    return transport->ops->post_recv(transport, link->host, HR_CHANNEL_CONTROL, link->recv_head, HR_LINK_HEAD_BYTES,
                                     &link->recv);
}

int hr_link_open(struct hr_lane *lane, struct hr_link *link, int host) {
    *link = (struct hr_link){
        .host = host, .leader_rank = lane->team->job_rank[lane->team->leader_of_host[host]], .open = 1};
    return post_head(lane, link);
}

void hr_link_close(struct hr_link *link) {
    hr_buffer_fini(&link->in);
    hr_buffer_fini(&link->out);
    hr_buffer_fini(&link->sending);
    free(link->rest);
    link->rest = NULL;
    link->open = 0;
}

int hr_link_has_work(const struct hr_link *link) {
    return link->open && ((link->recv.state != HR_IO_POSTED && !link->is_garbled) ||
                          (link->send.state != HR_IO_POSTED && hr_buffer_size(&link->out) > 0));
}

/* Two sends where the receiver posts two receives; the transport gathers them into one packet. */
static int post_chunk(struct hr_transport *transport, struct hr_link *link) {
    const uint8_t *front = hr_buffer_front(&link->sending);
    const size_t rest_bytes = hr_buffer_size(&link->sending) - HR_LINK_HEAD_BYTES;
    struct hr_io *last = rest_bytes == 0 ? &link->send : &link->send_head;
    HR_TRY(transport->ops->post_send(transport, link->host, HR_CHANNEL_CONTROL, front, HR_LINK_HEAD_BYTES, last));
    if (rest_bytes == 0) {
        return HORO_OK;
    }
    front += HR_LINK_HEAD_BYTES;
    return transport->ops->post_send(transport, link->host, HR_CHANNEL_CONTROL, front, rest_bytes, &link->send);
}

static int send_next(struct hr_lane *lane, struct hr_link *link) {
    if (link->send.state == HR_IO_POSTED || hr_buffer_size(&link->out) == 0) {
        return 0;
    }
    static const uint8_t padding[IN_HEAD];
    const size_t waiting = hr_buffer_size(&link->out);
    const uint32_t bytes = waiting < CHUNK_MAX ? (uint32_t)waiting : CHUNK_MAX;
    uint8_t length[LENGTH_BYTES];
    (void)hr_store_u32(length, bytes);
    hr_buffer_consume(&link->sending, hr_buffer_size(&link->sending));
    HR_TRY(hr_buffer_append(&link->sending, length, LENGTH_BYTES));
    HR_TRY(hr_buffer_append(&link->sending, hr_buffer_front(&link->out), bytes));
    if (bytes < IN_HEAD) {
        HR_TRY(hr_buffer_append(&link->sending, padding, IN_HEAD - bytes));
    }
    hr_buffer_consume(&link->out, bytes);
    HR_TRY(post_chunk(lane->team->transport, link));
    atomic_fetch_add_explicit(&lane->engine->counts.messages_sent, 1, memory_order_relaxed);
    return 1;
}

static int receive_head(const struct hr_lane *lane, struct hr_link *link) {
    const uint8_t *h = link->recv_head;
    const uint32_t bytes = hr_load_u32(h);
    if (bytes == 0 || bytes > CHUNK_MAX) {
        return HORO_ERR_INTERNAL;
    }
    if (bytes <= IN_HEAD) {
        HR_TRY(hr_buffer_append(&link->in, h + LENGTH_BYTES, bytes));
        return post_head(lane, link);
    }
    link->rest_bytes = bytes - IN_HEAD;
    uint8_t *rest = realloc(link->rest, link->rest_bytes);
    if (rest == NULL) {
        return HORO_ERR_RESOURCE;
    }
    link->rest = rest;
    link->recv_rest = 1;
    struct hr_transport *transport = lane->team->transport;
    return transport->ops->post_recv(transport, link->host, HR_CHANNEL_CONTROL, rest, link->rest_bytes, &link->recv);
}

static int receive_next(const struct hr_lane *lane, struct hr_link *link) {
    if (link->recv.state == HR_IO_FAILED) {
        return HORO_ERR_PEER_LOST;
    }
    if (link->recv.state != HR_IO_DONE) {
        return 0;
    }
    if (!link->recv_rest) {
        HR_TRY(receive_head(lane, link));
        return 1;
    }
    HR_TRY(hr_buffer_append(&link->in, link->recv_head + LENGTH_BYTES, IN_HEAD));
    HR_TRY(hr_buffer_append(&link->in, link->rest, link->rest_bytes));
    HR_TRY(post_head(lane, link));
    return 1;
}

int hr_link_progress(struct hr_lane *lane, struct hr_link *link) {
    if (!link->open) {
        return 0;
    }
    const int received = link->is_garbled ? 0 : receive_next(lane, link);
    if (received < 0) {
        link->is_garbled = received != HORO_ERR_PEER_LOST;
        return received;
    }
    const int sent = send_next(lane, link);
    return sent < 0 ? sent : received || sent;
}
