/*
 * Control links between leaders. Whatever has gathered while the last bytes were on their way goes next, in one piece,
 * and a receive takes whatever has come: the messages of a small operation are one send and one receive. A receive is
 * always posted, so a broken link is noticed while a leader waits for anything.
 */
#include <stdlib.h>

#include "engine/lead/private.h"

enum { RECEIVE_BYTES = 1 << 16 };

static int post_receive(const struct hr_leader *leader, struct hr_link *link) {
    return hr_post_recv_some(leader->team->transport, link->host, link->received, RECEIVE_BYTES, &link->recv);
}

int hr_link_open(const struct hr_leader *leader, struct hr_link *link, int host) {
    *link = (struct hr_link){
        .host = host, .leader_rank = leader->team->job_rank[leader->team->leader_of_host[host]], .open = 1};
    link->received = malloc(RECEIVE_BYTES);
    return link->received == NULL ? HORO_ERR_RESOURCE : post_receive(leader, link);
}

void hr_link_close(struct hr_link *link) {
    hr_buffer_fini(&link->in);
    hr_buffer_fini(&link->out);
    hr_buffer_fini(&link->sending);
    free(link->received);
    link->received = NULL;
    link->open = 0;
}

static int send_next(const struct hr_leader *leader, struct hr_link *link) {
    if (link->send.state == HR_IO_POSTED || hr_buffer_size(&link->out) == 0) {
        return HR_STILL;
    }
    struct hr_buffer sent = link->sending;
    hr_buffer_consume(&sent, hr_buffer_size(&sent));
    link->sending = link->out;
    link->out = sent;
    struct hr_transport *transport = leader->team->transport;
    HR_TRY(transport->ops->post(transport, HR_SEND, link->host, HR_CHANNEL_CONTROL,
                                (char *)link->sending.data + link->sending.begin, hr_buffer_size(&link->sending),
                                &link->send));
    atomic_fetch_add_explicit(&leader->team->node->counts.messages_sent, 1, memory_order_relaxed);
    return HR_MOVED;
}

static int receive_next(const struct hr_leader *leader, struct hr_link *link) {
    if (link->recv.state == HR_IO_FAILED) {
        return HORO_ERR_PEER_LOST;
    }
    if (link->recv.state != HR_IO_DONE) {
        return HR_STILL;
    }
    HR_TRY(hr_buffer_append(&link->in, link->received, link->recv.done_bytes));
    HR_TRY(post_receive(leader, link));
    return HR_MOVED;
}

int hr_link_progress(const struct hr_leader *leader, struct hr_link *link) {
    if (!link->open) {
        return HR_STILL;
    }
    const int received = link->has_no_memory ? HR_STILL : receive_next(leader, link);
    if (received < 0) {
        link->has_no_memory = received != HORO_ERR_PEER_LOST;
        return received;
    }
    const int sent = send_next(leader, link);
    return sent < 0 ? sent : received | sent;
}
