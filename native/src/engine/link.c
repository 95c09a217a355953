/*
 * Control links between leaders. Whatever has gathered while the last chunk was on its way is the next chunk: a length, then frames.
 * A receive is always posted, so a broken link is noticed while a leader waits for anything.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"

enum { LENGTH_BYTES = 4, CHUNK_MAX = 1 << 20 }; /* a chunk may end within a frame */

static int post_length(const struct hr_engine *engine, struct hr_link *link) {
    struct hr_transport *transport = engine->group->transport;
    link->recv_body = 0;
    return transport->ops->post_recv(transport, link->host, HR_CHANNEL_CONTROL, link->recv_length, LENGTH_BYTES,
                                     &link->recv);
}

int hr_link_open(struct hr_engine *engine, struct hr_link *link, int host) {
    *link = (struct hr_link){.host = host, .leader_rank = engine->group->leader_of_host[host], .open = 1};
    return post_length(engine, link);
}

void hr_link_close(struct hr_link *link) {
    hr_buffer_fini(&link->in);
    hr_buffer_fini(&link->out);
    hr_buffer_fini(&link->sending);
    free(link->chunk);
    link->chunk = NULL;
    link->open = 0;
}

int hr_link_has_work(const struct hr_link *link) {
    return link->open && (link->recv.state != HR_IO_POSTED || hr_buffer_size(&link->in) > 0 ||
                          (link->send.state != HR_IO_POSTED && hr_buffer_size(&link->out) > 0));
}

static int send_next(struct hr_engine *engine, struct hr_link *link) {
    if (link->send.state == HR_IO_POSTED || hr_buffer_size(&link->out) == 0) {
        return 0;
    }
    const size_t waiting = hr_buffer_size(&link->out);
    const uint32_t bytes = waiting < CHUNK_MAX ? (uint32_t)waiting : CHUNK_MAX;
    const uint8_t length[LENGTH_BYTES] = {(uint8_t)bytes, (uint8_t)(bytes >> 8), (uint8_t)(bytes >> 16),
                                          (uint8_t)(bytes >> 24)};
    hr_buffer_consume(&link->sending, hr_buffer_size(&link->sending));
    HR_TRY(hr_buffer_append(&link->sending, length, LENGTH_BYTES));
    HR_TRY(hr_buffer_append(&link->sending, hr_buffer_front(&link->out), bytes));
    hr_buffer_consume(&link->out, bytes);
    struct hr_transport *transport = engine->group->transport;
    const uint8_t *front = hr_buffer_front(&link->sending);
    /* Two sends, as the receiver posts two receives; the transport gathers them into one packet. */
    HR_TRY(transport->ops->post_send(transport, link->host, HR_CHANNEL_CONTROL, front, LENGTH_BYTES, &link->send_length));
    HR_TRY(transport->ops->post_send(transport, link->host, HR_CHANNEL_CONTROL, front + LENGTH_BYTES, bytes, &link->send));
    atomic_fetch_add_explicit(&engine->messages_sent, 1, memory_order_relaxed);
    return 1;
}

static int receive_length(const struct hr_engine *engine, struct hr_link *link) {
    const uint8_t *l = link->recv_length;
    const uint32_t bytes = l[0] | (uint32_t)l[1] << 8 | (uint32_t)l[2] << 16 | (uint32_t)l[3] << 24;
    if (bytes == 0 || bytes > HR_WIRE_MESSAGE_MAX) {
        return HORO_ERR_INTERNAL;
    }
    uint8_t *chunk = realloc(link->chunk, bytes);
    if (chunk == NULL) {
        return HORO_ERR_RESOURCE;
    }
    link->chunk = chunk;
    link->chunk_bytes = bytes;
    link->recv_body = 1;
    struct hr_transport *transport = engine->group->transport;
    return transport->ops->post_recv(transport, link->host, HR_CHANNEL_CONTROL, chunk, bytes, &link->recv);
}

static int receive_next(const struct hr_engine *engine, struct hr_link *link) {
    if (link->recv.state == HR_IO_FAILED) {
        return HORO_ERR_PEER_LOST;
    }
    if (link->recv.state != HR_IO_DONE) {
        return 0;
    }
    if (!link->recv_body) {
        HR_TRY(receive_length(engine, link));
        return 1;
    }
    HR_TRY(hr_buffer_append(&link->in, link->chunk, link->chunk_bytes));
    HR_TRY(post_length(engine, link));
    return 1;
}

int hr_link_progress(struct hr_engine *engine, struct hr_link *link) {
    if (!link->open) {
        return 0;
    }
    const int received = receive_next(engine, link);
    if (received < 0) {
        return received;
    }
    const int sent = send_next(engine, link);
    return sent < 0 ? sent : received || sent;
}
