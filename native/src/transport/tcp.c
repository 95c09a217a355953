/*
 * Stream sockets. Bytes go straight between the socket and the posted memory: one sendmsg or recvmsg per direction,
 * link and progress covers several queued ios, so that small messages share a system call and large ones are never
 * copied here.
 *
 * One call per progress and not "until it would block": a short count already says that the socket is drained or full,
 * and one link that always has bytes must not starve the others.
 *
 * Data may have several sockets per peer, which take turns: the n-th io that is not empty travels whole on socket n mod
 * their number, counted per direction, so both ends know the place of each without a word. An empty io stays behind the
 * last one before it.
 */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport/queue.h"
#include "transport/transport.h"

enum { GATHER_MAX = 16, WORD_BITS = 64, KEEPALIVE_PROBES = 5, KEEPALIVE_SECONDS_MAX = 32767 };

struct link {
    int fd;         /* -1: none */
    int peer;
    int is_tcp;     /* else AF_UNIX, without options */
    int lost;       /* shut down; whatever is posted fails */
    enum hr_loss peer_loss; /* of the control link, also where there is none: of its peer on any channel */
    int unchecked;  /* has been idle: an EOF may have come that nobody has read */
    int send_errno; /* sending failed; what the peer said before may still be readable */
    int send_turn;  /* of the first link of several for data: which of them the last io took that was not empty */
    int recv_turn;
    struct hr_queue send;
    struct hr_queue recv;
};

struct tcp {
    struct hr_transport base;
    int host_count;
    int data_sockets; /* per peer, */
    int used_sockets; /* of which so many are in use */
    int link_count;
    int abandoned[HR_CHANNEL_COUNT];
    uint64_t *busy; /* behind the links, a bit per link: something is posted. The lower ones, for control, go first. */
    struct link links[]; /* control by peer, then data: [host_count + peer * data_sockets + socket] */
};

/* The first link to a peer on a channel; those behind it are socket_count - 1. */
static int first_link(const struct tcp *tcp, int peer, enum hr_channel channel) {
    return channel == HR_CHANNEL_CONTROL ? peer : tcp->host_count + peer * tcp->data_sockets;
}

static int socket_count(const struct tcp *tcp, enum hr_channel channel) {
    return channel == HR_CHANNEL_CONTROL ? 1 : tcp->data_sockets;
}

static void clear_busy(struct tcp *tcp, int index) {
    tcp->busy[index / WORD_BITS] &= ~((uint64_t)1 << (index % WORD_BITS));
}

static int fail_link(struct tcp *tcp, int index) {
    struct link *link = &tcp->links[index];
    clear_busy(tcp, index);
    return hr_queue_fail(&link->send) | hr_queue_fail(&link->recv);
}

/*
 * A peer that is out of reach is lost on all channels at once; one that has closed, on each where its end is read,
 * because its last words may be on another. The sockets stay open but shut down: a later sleeper on one wakes at once.
 * The end of one socket of a channel is the end of all: the others are shut down too, and give what has come before
 * their end is read.
 */
static void lose_peer(struct tcp *tcp, const struct link *noticed, int error_number) {
    const int peer = noticed->peer;
    const int closed = error_number == 0 || error_number == EPIPE;
    enum hr_loss *loss = &tcp->links[first_link(tcp, peer, HR_CHANNEL_CONTROL)].peer_loss;
    if (*loss == HR_LOSS_NONE) {
        /* the first is the kernel's when its patience is over, the two others are the network's last answer to it */
        *loss = error_number == ETIMEDOUT || error_number == EHOSTUNREACH || error_number == ENETUNREACH
                    ? HR_LOSS_SILENT
                    : HR_LOSS_CLOSED;
    }
    for (int channel = 0; channel < HR_CHANNEL_COUNT; channel++) {
        const int begin = first_link(tcp, peer, (enum hr_channel)channel);
        const int end = begin + socket_count(tcp, (enum hr_channel)channel);
        const int is_beside = noticed >= &tcp->links[begin] && noticed < &tcp->links[end];
        for (int index = begin; index < end; index++) {
            if (&tcp->links[index] == noticed || !(closed || error_number == ECONNRESET)) {
                struct link *link = &tcp->links[index];
                if (link->fd >= 0 && !link->lost) {
                    link->lost = 1;
                    (void)shutdown(link->fd, SHUT_RDWR);
                    (void)fail_link(tcp, index);
                }
            } else if (is_beside) {
                (void)shutdown(tcp->links[index].fd, SHUT_RDWR);
            }
        }
    }
}

static int is_temporary(int error_number) {
    return error_number == EAGAIN || error_number == EWOULDBLOCK || error_number == EINTR;
}

/* 1: bytes came or the peer is lost. */
static int receive(struct tcp *tcp, struct link *link) {
    struct iovec iov[GATHER_MAX];
    struct msghdr message = {.msg_iov = iov, .msg_iovlen = hr_queue_gather(&link->recv, iov, GATHER_MAX)};
    const ssize_t got = recvmsg(link->fd, &message, MSG_DONTWAIT);
    if (got > 0) {
        (void)hr_queue_advance(&link->recv, (size_t)got);
        return 1;
    }
    if (got < 0 && is_temporary(errno)) {
        return 0;
    }
    lose_peer(tcp, link, got == 0 ? link->send_errno : errno);
    return 1;
}

/* 1: bytes went, or sending has failed. That only stops sending: what the peer said last may still be readable. */
static int send_some(struct link *link) {
    struct iovec iov[GATHER_MAX];
    struct msghdr message = {.msg_iov = iov, .msg_iovlen = hr_queue_gather(&link->send, iov, GATHER_MAX)};
    const ssize_t sent = sendmsg(link->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) {
        (void)hr_queue_advance(&link->send, (size_t)sent);
        return 1;
    }
    if (is_temporary(errno)) {
        return 0;
    }
    link->send_errno = errno;
    return 1;
}

static int link_progress(struct tcp *tcp, int index) {
    struct link *link = &tcp->links[index];
    if (link->lost) {
        return fail_link(tcp, index);
    }
    int moved = hr_queue_advance(&link->recv, 0);
    moved |= hr_queue_advance(&link->send, 0);
    if (link->recv.head == NULL && link->unchecked && link->send.head != NULL) {
        /* Without a posted receive nobody would read an EOF, and the first send after it would seem to succeed. */
        char byte;
        const ssize_t got = recv(link->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        if (got == 0 || (got < 0 && !is_temporary(errno))) {
            lose_peer(tcp, link, got == 0 ? 0 : errno);
        }
        moved |= link->lost;
    }
    link->unchecked = 0;
    /* Sending first: what others wait for leaves before a look at what may not have come yet. */
    if (link->send.head != NULL && link->send_errno == 0) {
        moved |= send_some(link);
    }
    if (link->recv.head != NULL) {
        moved |= receive(tcp, link);
    }
    if (link->send_errno != 0 && !link->lost && !moved) {
        lose_peer(tcp, link, link->send_errno);
        moved = 1;
    }
    if (link->recv.head == NULL && link->send.head == NULL) {
        clear_busy(tcp, index);
    }
    return moved;
}

static int tcp_progress(struct hr_transport *transport) {
    struct tcp *tcp = (struct tcp *)transport;
    int moved = 0;
    for (int word = 0; word * WORD_BITS < tcp->link_count; word++) {
        for (uint64_t bits = tcp->busy[word]; bits != 0; bits &= bits - 1) {
            moved |= link_progress(tcp, word * WORD_BITS + __builtin_ctzll(bits));
        }
    }
    return moved;
}

static int tcp_post(struct hr_transport *transport, enum hr_direction direction, int peer, enum hr_channel channel,
                    char *data, size_t bytes, struct hr_io *io) {
    struct tcp *tcp = (struct tcp *)transport;
    if (peer < 0 || peer >= tcp->host_count) {
        return HORO_ERR_INTERNAL;
    }
    int index = first_link(tcp, peer, channel);
    struct link *link = &tcp->links[index];
    if (link->fd < 0) {
        return HORO_ERR_INTERNAL;
    }
    if (tcp->abandoned[channel]) {
        return HORO_ERR_ABORTED;
    }
    const int count = channel == HR_CHANNEL_CONTROL ? 1 : tcp->used_sockets;
    if (count > 1) {
        int *turn = direction == HR_SEND ? &link->send_turn : &link->recv_turn;
        if (bytes > 0) { /* an empty io takes no turn */
            *turn = *turn + 1 < count ? *turn + 1 : 0;
        }
        index += *turn;
        link = &tcp->links[index];
    }
    if (link->send.head == NULL && link->recv.head == NULL) {
        link->unchecked = 1;
        tcp->busy[index / WORD_BITS] |= (uint64_t)1 << (index % WORD_BITS);
    }
    hr_queue_push(direction == HR_SEND ? &link->send : &link->recv, data, bytes, io);
    return HORO_OK;
}

static size_t tcp_sleep_fds(struct hr_transport *transport, struct pollfd *fds, size_t capacity) {
    const struct tcp *tcp = (struct tcp *)transport;
    size_t used = 0;
    for (int word = 0; word * WORD_BITS < tcp->link_count; word++) {
        for (uint64_t bits = tcp->busy[word]; bits != 0; bits &= bits - 1) {
            const struct link *link = &tcp->links[word * WORD_BITS + __builtin_ctzll(bits)];
            const int events = (link->recv.head == NULL ? 0 : POLLIN) | (link->send.head == NULL ? 0 : POLLOUT);
            if (used < capacity) {
                fds[used] = (struct pollfd){.fd = link->fd, .events = (short)events};
            }
            used++;
        }
    }
    return used;
}

static enum hr_loss tcp_loss(const struct hr_transport *transport, int peer) {
    const struct tcp *tcp = (const struct tcp *)transport;
    return tcp->links[first_link(tcp, peer, HR_CHANNEL_CONTROL)].peer_loss;
}

static void tcp_watch(struct hr_transport *transport, int enabled) {
    struct tcp *tcp = (struct tcp *)transport;
    const int on = enabled != 0;
    for (int i = 0; i < tcp->link_count; i++) {
        if (tcp->links[i].fd >= 0 && tcp->links[i].is_tcp) {
            (void)setsockopt(tcp->links[i].fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
        }
    }
}

static void tcp_use_sockets(struct hr_transport *transport, int count) {
    struct tcp *tcp = (struct tcp *)transport;
    if (count < 1 || count > tcp->data_sockets) {
        return;
    }
    tcp->used_sockets = count;
    for (int peer = 0; peer < tcp->host_count; peer++) {
        struct link *link = &tcp->links[first_link(tcp, peer, HR_CHANNEL_DATA)];
        link->send_turn = link->recv_turn = count - 1; /* so that the next io takes the first */
    }
}

static void tcp_abandon(struct hr_transport *transport, enum hr_channel channel) {
    struct tcp *tcp = (struct tcp *)transport;
    tcp->abandoned[channel] = 1;
    const int begin = first_link(tcp, 0, channel);
    for (int index = begin; index < begin + tcp->host_count * socket_count(tcp, channel); index++) {
        (void)fail_link(tcp, index);
    }
}

static void tcp_destroy(struct hr_transport *transport) {
    struct tcp *tcp = (struct tcp *)transport;
    for (int i = 0; i < tcp->link_count; i++) {
        (void)fail_link(tcp, i);
        if (tcp->links[i].fd >= 0) {
            (void)close(tcp->links[i].fd);
        }
    }
    free(tcp);
}

static const struct hr_transport_ops tcp_ops = {
    .name = "tcp",
    .post = tcp_post,
    .progress = tcp_progress,
    .sleep_fds = tcp_sleep_fds,
    .loss = tcp_loss,
    .watch = tcp_watch,
    .use_sockets = tcp_use_sockets,
    .abandon = tcp_abandon,
    .destroy = tcp_destroy,
};

/* As the kernel takes it for TCP_KEEPIDLE and TCP_KEEPINTVL. */
static int keepalive_seconds(int seconds) {
    return seconds < 1 ? 1 : seconds < KEEPALIVE_SECONDS_MAX ? seconds : KEEPALIVE_SECONDS_MAX;
}

/*
 * Two cases of silence: with data unacknowledged the retransmission gives up after TCP_USER_TIMEOUT; with nothing in
 * flight the keepalive probes do (first after half the time, the last when it is over; the kernel counts them in whole
 * seconds). Where these times are cut to what the kernel takes, it probes more often.
 *
 * TCP_USER_TIMEOUT also ends a connection whose peer answers but reads nothing, and its clock goes on while all
 * processes are stopped. A job that is suspended in the middle of a transfer would lose its links, so those for data
 * are left to the kernel's own patience with data unacknowledged: that a host is out of reach is found out by the
 * control links, which are idle then and probed. Those carry too little to fill what their peer's kernel buffers.
 */
static int set_options(int fd, enum hr_channel channel, int peer_timeout_ms) {
    const int off = 0;
    const int on = 1;
    const int idle_s = keepalive_seconds(peer_timeout_ms / 2000);
    const int interval_s = keepalive_seconds(peer_timeout_ms / 2000 / KEEPALIVE_PROBES);
    const int left_s = peer_timeout_ms / 1000 - idle_s;
    const int probes = left_s <= interval_s ? 1 : (left_s + interval_s - 1) / interval_s;
    const unsigned user_timeout_ms = channel == HR_CHANNEL_CONTROL ? (unsigned)peer_timeout_ms : 0;
    return setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &off, sizeof off) == 0 &&
           setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0 &&
           setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s) == 0 &&
           setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s) == 0 &&
           setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes) == 0 &&
           setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &user_timeout_ms, sizeof user_timeout_ms) == 0;
}

static hr_status fail_fd(struct hr_error *error, int fd, int host, const char *what) {
    return hr_fail(error, HORO_ERR_USAGE, "descriptor %d for host %d %s: %s", fd, host, what, strerror(errno));
}

static hr_status link_open(struct link *link, int fd, enum hr_channel channel, int host, int peer_timeout_ms,
                           struct hr_error *error) {
    link->fd = fd;
    link->peer = host;
    if (fd < 0) {
        return HORO_OK;
    }
    int type = 0;
    struct sockaddr_storage address;
    socklen_t type_bytes = sizeof type;
    socklen_t address_bytes = sizeof address;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &type_bytes) != 0) {
        return fail_fd(error, fd, host, "is no socket");
    }
    if (type != SOCK_STREAM) {
        return hr_fail(error, HORO_ERR_USAGE, "descriptor %d for host %d is no stream socket (its type is %d)", fd,
                       host, type);
    }
    if (getpeername(fd, (struct sockaddr *)&address, &address_bytes) != 0) {
        return fail_fd(error, fd, host, "is not connected");
    }
    const int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) {
        return fail_fd(error, fd, host, "cannot be made nonblocking");
    }
    link->is_tcp = address.ss_family != AF_UNIX;
    if (link->is_tcp && !set_options(fd, channel, peer_timeout_ms)) {
        return fail_fd(error, fd, host, "refuses a TCP option");
    }
    return HORO_OK;
}

/* All sockets of one host, or none. */
static hr_status open_host(struct tcp *tcp, enum hr_channel channel, const int *fds, int host, int peer_timeout_ms,
                           struct hr_error *error) {
    const int count = socket_count(tcp, channel);
    struct link *links = &tcp->links[first_link(tcp, host, channel)];
    for (int i = 0; i < count; i++) {
        const int fd = fds == NULL ? -1 : fds[host * count + i];
        HR_TRY(link_open(&links[i], fd, channel, host, peer_timeout_ms, error));
        if ((fd < 0) != (links[0].fd < 0)) {
            return hr_fail(error, HORO_ERR_USAGE, "of %d sockets for host %d only some are given", count, host);
        }
    }
    links[0].send_turn = links[0].recv_turn = count - 1; /* so that the first io takes the first */
    return HORO_OK;
}

struct hr_transport *hr_tcp_create(const int *control_fds, const int *data_fds, int host_count, int data_sockets,
                                   int peer_timeout_ms, struct hr_error *error) {
    if (host_count < 1 || peer_timeout_ms < 1 || data_sockets < 1 || data_sockets > HORO_SOCKETS_PER_PEER_MAX) {
        (void)hr_fail(
            error, HORO_ERR_USAGE,
            "the number of hosts and peer_timeout_ms must be positive, sockets per peer 1 to %d, not %d, %d and %d",
            HORO_SOCKETS_PER_PEER_MAX, host_count, peer_timeout_ms, data_sockets);
        return NULL;
    }
    const size_t link_count = (size_t)host_count * (size_t)(1 + data_sockets);
    struct tcp *tcp = calloc(1, sizeof *tcp + link_count * sizeof tcp->links[0] +
                                    (link_count / WORD_BITS + 1) * sizeof *tcp->busy);
    if (tcp == NULL) {
        (void)hr_fail(error, HORO_ERR_RESOURCE, "no memory for the links to %d hosts", host_count);
        return NULL;
    }
    tcp->base.ops = &tcp_ops;
    tcp->host_count = host_count;
    tcp->data_sockets = tcp->used_sockets = data_sockets;
    tcp->link_count = (int)link_count;
    tcp->busy = (uint64_t *)(void *)(tcp->links + link_count);
    for (int host = 0; host < host_count; host++) {
        if (open_host(tcp, HR_CHANNEL_CONTROL, control_fds, host, peer_timeout_ms, error) != HORO_OK ||
            open_host(tcp, HR_CHANNEL_DATA, data_fds, host, peer_timeout_ms, error) != HORO_OK) {
            free(tcp);
            return NULL;
        }
    }
    return &tcp->base;
}
