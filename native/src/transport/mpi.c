/*
 * Data by MPI, control over sockets (docs/adr/0013-mpi-carries-data-tcp-agrees.md).
 *
 * Sends are synchronous ones (MPI_Issend). After a buffered send is done, its bytes may sit in the library until that
 * is called again; but a rank that has finished its part does not call it until the next batch, and the receiver would
 * wait for ever.
 *
 * Messages of one stream match in the order in which they are handed to MPI, which is the order of posting. An io that
 * is too large for one call of MPI goes in parts, one after the other, and those behind it wait for the last one.
 * Requests are tested from the head of each stream; any test makes MPI work on all of them.
 */
#include <poll.h>
#include <sched.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/cut.h"
#include "mpi/mpi.h"
#include "transport/queue.h"

enum { SEND = HR_SEND, RECV = HR_RECV, DIRECTIONS = 2, WORD_BITS = 64 };

/* Ios given to MPI at once, as many as an algorithm has in flight: few, for all must be taken back in the end. */
enum { STARTED_MAX = 8 };

#define POLL_WITHIN_NS 20000ll /* a piece of 128 KiB takes 100 us on a link of 10 Gbit/s, and several are in flight */
#define LOOK_EVERY_NS 10000000ll        /* at the connections of peers that something is posted with */
#define END_GRACE_NS 500000000ll        /* for messages that a peer has sent before it shut down */
#define TAKE_BACK_WITHIN_NS 200000000ll /* an MPI that has not given memory back by then hardly will */

/* One direction of data with one peer. */
struct stream {
    struct hr_queue queue;
    int64_t moved_ns; /* when it last went on, or began to wait */
};

struct peer {
    int rank; /* -1: none */
    int tag[DIRECTIONS];
    int control_fd;
    enum hr_loss lost;
    int64_t ended_ns; /* when its control connection was seen to have ended; 0: has not */
    struct stream stream[DIRECTIONS];
};

struct mpi_transport {
    struct hr_transport base;
    struct hr_mpi *mpi;
    struct hr_transport *control;
    int host_count;
    int abandoned;
    int64_t peer_timeout_ns;
    int64_t look_ns; /* when to look at silent peers again */
    uint64_t *busy; /* behind the peers, a bit for each: something is posted */
    struct peer peers[];
};

static int is_busy(const struct mpi_transport *self) {
    uint64_t any = 0;
    for (int word = 0; word * WORD_BITS < self->host_count; word++) {
        any |= self->busy[word];
    }
    return any != 0;
}

static void settle_busy(struct mpi_transport *self, int peer) {
    const struct peer *at = &self->peers[peer];
    const uint64_t bit = (uint64_t)1 << (peer % WORD_BITS);
    if (at->stream[SEND].queue.head == NULL && at->stream[RECV].queue.head == NULL) {
        self->busy[peer / WORD_BITS] &= ~bit;
    } else {
        self->busy[peer / WORD_BITS] |= bit;
    }
}

/* ---- Taking memory back ---- */

/* Whether MPI has a part of it. */
static int is_held(const struct hr_io *io) {
    return io->given_bytes > io->done_bytes;
}

static void let_go(struct hr_io *io) {
    io->given_bytes = io->done_bytes;
}

enum taking { CANCEL, TEST, STRAND }; /* a send cannot be cancelled; an error of MPI about a request ends it too */

/* Does something with all of peers [begin, end) that MPI has; returns how much it has afterwards. */
static int take_back(struct mpi_transport *self, int begin, int end, enum taking how) {
    const struct hr_mpi_ops *ops = self->mpi->ops;
    int held = 0;
    for (int i = begin * DIRECTIONS; i < end * DIRECTIONS; i++) {
        struct hr_io *io = self->peers[i / DIRECTIONS].stream[i % DIRECTIONS].queue.head;
        for (; io != NULL; io = io->next) {
            int done = 0;
            if (!is_held(io)) {
                continue;
            }
            if (how == CANCEL && i % DIRECTIONS == RECV) {
                (void)ops->change(self->mpi, HORO_MPI_CANCEL, &io->request);
            } else if (how == TEST && (ops->test(self->mpi, &io->request, &done) != 0 || done)) {
                let_go(io);
            } else if (how == STRAND) {
                atomic_fetch_add_explicit(&self->mpi->stranded, 1, memory_order_relaxed);
                (void)ops->change(self->mpi, HORO_MPI_REQUEST_FREE, &io->request);
                let_go(io);
            }
            held += is_held(io);
        }
    }
    return held;
}

/* 1: there was something to fail. Nothing of peers [begin, end) is with MPI afterwards, or it is stranded. */
static int fail_peers(struct mpi_transport *self, int begin, int end) {
    int any = 0;
    if (hr_mpi_is_usable(self->mpi)) {
        (void)take_back(self, begin, end, CANCEL);
        const int64_t end_ns = hr_now_ns() + TAKE_BACK_WITHIN_NS;
        while (take_back(self, begin, end, TEST) > 0 && hr_now_ns() < end_ns) {
            (void)sched_yield();
        }
        (void)take_back(self, begin, end, STRAND);
    }
    for (int peer = begin; peer < end; peer++) {
        any |= hr_queue_fail(&self->peers[peer].stream[SEND].queue);
        any |= hr_queue_fail(&self->peers[peer].stream[RECV].queue);
        settle_busy(self, peer);
    }
    return any;
}

/* 1: it is lost. */
static int lose_peer(struct mpi_transport *self, int peer, enum hr_loss how) {
    if (self->peers[peer].lost == HR_LOSS_NONE) {
        self->peers[peer].lost = how;
    }
    (void)fail_peers(self, peer, peer + 1);
    return 1;
}

/* ---- Moving ---- */

/* Hands to MPI what may go there, of each io one part at a time. An error code of MPI. */
static int start_messages(struct mpi_transport *self, struct peer *peer, int direction) {
    const struct hr_mpi_ops *ops = self->mpi->ops;
    const size_t most = (size_t)self->mpi->calls.message_bytes;
    int started = 0;
    for (struct hr_io *io = peer->stream[direction].queue.head; io != NULL && started < STARTED_MAX; io = io->next) {
        if (io->bytes > io->done_bytes && !is_held(io)) {
            char *data = io->data + io->done_bytes;
            const size_t bytes = hr_smaller(io->bytes - io->done_bytes, most);
            const enum horo_mpi_function function = direction == SEND ? HORO_MPI_ISSEND : HORO_MPI_IRECV;
            const int code =
                ops->start(self->mpi, function, data, bytes, peer->rank, peer->tag[direction], &io->request);
            if (code != 0) {
                return code;
            }
            io->given_bytes = io->done_bytes + bytes;
        }
        if (io->given_bytes < io->bytes) { /* the next io goes behind its last part */
            break;
        }
        started++;
    }
    return 0;
}

static int peer_progress(struct mpi_transport *self, int peer) {
    struct peer *at = &self->peers[peer];
    if (at->lost) {
        return fail_peers(self, peer, peer + 1);
    }
    int moved = 0;
    for (int direction = 0; direction < DIRECTIONS; direction++) {
        struct stream *stream = &at->stream[direction];
        struct hr_io *head = stream->queue.head;
        int is_over = 0;
        if (head != NULL && is_held(head) && self->mpi->ops->test(self->mpi, &head->request, &is_over) != 0) {
            let_go(head);
            return lose_peer(self, peer, HR_LOSS_CLOSED);
        }
        /* finishes the head, if it is over, and empty ones behind it */
        if (hr_queue_advance(&stream->queue, is_over ? head->given_bytes - head->done_bytes : 0) || is_over) {
            moved = 1;
            stream->moved_ns = hr_now_ns();
        }
        if (start_messages(self, at, direction) != 0) {
            return lose_peer(self, peer, HR_LOSS_CLOSED);
        }
    }
    settle_busy(self, peer);
    return moved;
}

/* ---- Silence ---- */

/* 1: the peer is lost now. */
static int look_at(struct mpi_transport *self, int peer, int64_t now_ns) {
    struct peer *at = &self->peers[peer];
    const struct stream *send = &at->stream[SEND];
    const int64_t moved_ns = send->moved_ns > at->stream[RECV].moved_ns ? send->moved_ns : at->stream[RECV].moved_ns;
    if (send->queue.head != NULL && now_ns - send->moved_ns >= self->peer_timeout_ns) {
        return lose_peer(self, peer, HR_LOSS_SILENT);
    }
    struct pollfd connection = {.fd = at->control_fd, .events = POLLRDHUP};
    if (at->ended_ns == 0 && connection.fd >= 0 && poll(&connection, 1, 0) > 0 &&
        (connection.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0) {
        at->ended_ns = now_ns;
    }
    if (at->ended_ns != 0 && now_ns - (moved_ns > at->ended_ns ? moved_ns : at->ended_ns) >= END_GRACE_NS) {
        return lose_peer(self, peer, HR_LOSS_CLOSED);
    }
    return 0;
}

/* Nothing has moved just now. 1: a peer is lost. */
static int look_at_the_silent(struct mpi_transport *self) {
    const int64_t now_ns = hr_now_ns();
    if (now_ns < self->look_ns || !is_busy(self)) {
        return 0;
    }
    if (now_ns - self->look_ns >= self->peer_timeout_ns / 2) {
        /* This process has not looked for long: it was stopped, and the peers may have been, too. */
        for (int peer = 0; peer < self->host_count; peer++) {
            self->peers[peer].stream[SEND].moved_ns = now_ns;
            self->peers[peer].stream[RECV].moved_ns = now_ns;
        }
    }
    self->look_ns = now_ns + LOOK_EVERY_NS;
    int lost = 0;
    for (int word = 0; word * WORD_BITS < self->host_count; word++) {
        for (uint64_t bits = self->busy[word]; bits != 0; bits &= bits - 1) {
            lost |= look_at(self, word * WORD_BITS + __builtin_ctzll(bits), now_ns);
        }
    }
    return lost;
}

/* ---- The table ---- */

static int mpi_progress(struct hr_transport *transport) {
    struct mpi_transport *self = (struct mpi_transport *)transport;
    int moved = self->control->ops->progress(self->control);
    int moved_data = 0;
    for (int word = 0; word * WORD_BITS < self->host_count; word++) {
        for (uint64_t bits = self->busy[word]; bits != 0; bits &= bits - 1) {
            moved_data |= peer_progress(self, word * WORD_BITS + __builtin_ctzll(bits));
        }
    }
    return moved | (moved_data || look_at_the_silent(self));
}

static int mpi_post(struct hr_transport *transport, enum hr_direction direction, int peer, enum hr_channel channel,
                    char *data, size_t bytes, struct hr_io *io) {
    struct mpi_transport *self = (struct mpi_transport *)transport;
    if (channel == HR_CHANNEL_CONTROL) {
        return self->control->ops->post(self->control, direction, peer, channel, data, bytes, io);
    }
    if (peer < 0 || peer >= self->host_count || self->peers[peer].rank < 0) {
        return HORO_ERR_INTERNAL;
    }
    if (self->abandoned) {
        return HORO_ERR_ABORTED;
    }
    struct peer *at = &self->peers[peer];
    struct stream *stream = &at->stream[direction];
    if (stream->queue.head == NULL) {
        stream->moved_ns = hr_now_ns();
    }
    hr_queue_push(&stream->queue, data, bytes, io);
    settle_busy(self, peer);
    const int code = at->lost ? 0 : start_messages(self, at, direction);
    if (code != 0) {
        (void)lose_peer(self, peer, HR_LOSS_CLOSED);
    }
    return HORO_OK;
}

static size_t mpi_sleep_fds(struct hr_transport *transport, struct pollfd *fds, size_t capacity) {
    struct mpi_transport *self = (struct mpi_transport *)transport;
    return self->control->ops->sleep_fds(self->control, fds, capacity);
}

static int64_t mpi_poll_within_ns(const struct hr_transport *transport) {
    return is_busy((const struct mpi_transport *)transport) ? POLL_WITHIN_NS : -1;
}

static enum hr_loss mpi_loss(const struct hr_transport *transport, int peer) {
    const struct mpi_transport *self = (const struct mpi_transport *)transport;
    const enum hr_loss loss = self->peers[peer].lost;
    return loss != HR_LOSS_NONE ? loss : self->control->ops->loss(self->control, peer);
}

static void mpi_watch(struct hr_transport *transport, int enabled) {
    struct mpi_transport *self = (struct mpi_transport *)transport;
    self->control->ops->watch(self->control, enabled);
}

static void mpi_abandon(struct hr_transport *transport, enum hr_channel channel) {
    struct mpi_transport *self = (struct mpi_transport *)transport;
    if (channel == HR_CHANNEL_CONTROL) {
        self->control->ops->abandon(self->control, channel);
        return;
    }
    self->abandoned = 1;
    (void)fail_peers(self, 0, self->host_count);
}

static void mpi_destroy(struct hr_transport *transport) {
    struct mpi_transport *self = (struct mpi_transport *)transport;
    (void)fail_peers(self, 0, self->host_count);
    self->control->ops->destroy(self->control);
    free(self);
}

static const struct hr_transport_ops mpi_ops = {
    .name = "mpi",
    .post = mpi_post,
    .progress = mpi_progress,
    .sleep_fds = mpi_sleep_fds,
    .poll_within_ns = mpi_poll_within_ns,
    .loss = mpi_loss,
    .watch = mpi_watch,
    .abandon = mpi_abandon,
    .destroy = mpi_destroy,
};

struct hr_transport *hr_mpi_transport_create(struct hr_mpi *mpi, struct hr_transport *control, const int *control_fds,
                                             int host_count, int peer_timeout_ms, struct hr_error *error) {
    const horo_mpi *calls = &mpi->calls;
    if (calls->rank_of_host == NULL) {
        (void)hr_fail(error, HORO_ERR_USAGE, "data is to travel by MPI, but no ranks of other hosts are given");
        return NULL;
    }
    for (int host = 0; host < host_count; host++) {
        const int rank = calls->rank_of_host[host];
        if (rank < -1 || rank >= calls->size) {
            (void)hr_fail(error, HORO_ERR_USAGE, "data for host %d is to go to rank %d of an MPI communicator of %d",
                          host, rank, calls->size);
            return NULL;
        }
    }
    struct mpi_transport *self = calloc(1, sizeof *self + (size_t)host_count * sizeof self->peers[0] +
                                               ((size_t)host_count / WORD_BITS + 1) * sizeof *self->busy);
    if (self == NULL) {
        (void)hr_fail(error, HORO_ERR_RESOURCE, "no memory for the links to %d hosts", host_count);
        return NULL;
    }
    self->base.ops = &mpi_ops;
    self->mpi = mpi;
    self->control = control;
    self->host_count = host_count;
    self->peer_timeout_ns = (int64_t)peer_timeout_ms * 1000000;
    self->busy = (uint64_t *)(void *)(self->peers + host_count);
    for (int host = 0; host < host_count; host++) {
        self->peers[host] = (struct peer){
            .rank = calls->rank_of_host[host],
            .tag = {[SEND] = calls->send_tags == NULL ? 0 : calls->send_tags[host],
                    [RECV] = calls->recv_tags == NULL ? 0 : calls->recv_tags[host]},
            .control_fd = control_fds == NULL ? -1 : control_fds[host],
        };
    }
    return &self->base;
}
