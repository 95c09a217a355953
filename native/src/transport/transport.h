/*
 * Bytes between two ranks. A transport knows peers (by host index) and channels, never operations.
 *
 * Contract of every transport, held by one conformance suite:
 *  - Sends and receives on one (peer, channel) match one to one in order, and a matching pair has the same size. (One
 *    stream does not need the rule; several, and message transports, do.) Control is one stream always: there a receive
 *    may take whatever has come (takes_some).
 *  - post never blocks and copies nothing: the memory and the hr_io stay the caller's to keep until io->state is
 *    not HR_IO_POSTED.
 *  - A send may have to wait for its receive to be posted, however small it is: stream transports buffer, MPI does not.
 *  - progress moves what it can without blocking. Only it, abandon and destroy change the state of a posted io.
 *  - All functions of one transport are called by one thread at a time (the driver of the engine).
 *  - A zero-byte io is done when it reaches the head of its queue.
 *  - Ios of one (peer, channel, direction) are done in the order of posting where one connection carries them. Where
 *    several do, a later one may be done, or failed, before an earlier one: callers look at each io.
 *  - After a peer is lost, its posted and later ios become HR_IO_FAILED, on all channels; other peers go on. What a
 *    peer that closed its end had sent before (its send was done) is delivered first, on every channel: each ends
 *    where its own end is read.
 */
#ifndef HR_TRANSPORT_TRANSPORT_H
#define HR_TRANSPORT_TRANSPORT_H

#include <poll.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum hr_channel {
    HR_CHANNEL_CONTROL = 0, /* between leaders, along the tree of hosts */
    HR_CHANNEL_DATA = 1,    /* between ranks of equal local index; which hosts: node/team.h */
    HR_CHANNEL_COUNT = 2,
};

enum hr_direction { HR_SEND = 0, HR_RECV = 1 };

enum hr_io_state {
    HR_IO_IDLE = 0,
    HR_IO_POSTED = 1,
    HR_IO_DONE = 2,
    HR_IO_FAILED = 3,
};

enum hr_loss {
    HR_LOSS_NONE = 0,
    HR_LOSS_CLOSED = 1, /* its connection ended, or an error broke it */
    HR_LOSS_SILENT = 2, /* it did not answer, or read nothing, for the peer timeout */
};

/* One posted send or receive; lives in the caller's memory. Callers read `state` and `done_bytes` only. */
struct hr_io {
    char *data;
    size_t bytes;
    size_t done_bytes; /* grows as bytes move, so that a receiver may work on what has come */
    int takes_some;    /* a receive that is done as soon as any bytes have come; set behind post, on control alone */
    enum hr_io_state state;
    struct hr_io *next;
    size_t given_bytes; /* to MPI, as what follows: all of this and no more than `bytes` has gone there */
    uint64_t request;   /* of what lies between done_bytes and given_bytes */
};

struct hr_transport;

struct hr_transport_ops {
    const char *name;

    /*
     * HORO_OK; or HORO_ERR_INTERNAL for a peer that has no link on this channel, HORO_ERR_ABORTED on one that is
     * abandoned. What is sent is not written to.
     */
    int (*post)(struct hr_transport *transport, enum hr_direction direction, int peer, enum hr_channel channel,
                char *data, size_t bytes, struct hr_io *io);

    /* 1: something moved or was lost; 0: nothing to do now. */
    int (*progress)(struct hr_transport *transport);

    /*
     * Descriptors to sleep on until progress may move something: fills up to `capacity` entries, returns how many there
     * are. Only links with something posted are named, so an idle link wakes nobody.
     */
    size_t (*sleep_fds)(struct hr_transport *transport, struct pollfd *fds, size_t capacity);

    /* The longest sleep while something is posted of which no descriptor tells; -1: any. NULL: always -1. */
    int64_t (*poll_within_ns)(const struct hr_transport *transport);

    /* Whether a peer is lost, also one that has closed its end in order, and how it was first noticed. */
    enum hr_loss (*loss)(const struct hr_transport *transport, int peer);

    /* Supervises the links (keepalive probes) while work is pending; not when idle: an idle job sends nothing. */
    void (*watch)(struct hr_transport *transport, int enabled);

    /*
     * From the next io on, data takes so many of its sockets to each peer, from the first one on; at both ends alike,
     * and while nothing is posted for data. NULL: it has no sockets for data.
     */
    void (*use_sockets)(struct hr_transport *transport, int count);

    /*
     * Gives a channel up after an error in the middle of a transfer: fails all its posted ios, so that their memory is
     * free, and refuses later ones. Peers are told nothing and see no end of the link: they shall learn the true cause
     * by other ways. (MPI may keep some memory: see hr_mpi_transport_create.)
     */
    void (*abandon)(struct hr_transport *transport, enum hr_channel channel);

    /* Fails all posted ios, closes descriptors, frees. */
    void (*destroy)(struct hr_transport *transport);
};

struct hr_transport {
    const struct hr_transport_ops *ops;
    int is_quiet; /* the driver's: nothing of its team is under way here, so it is moved now and then only */
};

static inline int64_t hr_transport_poll_within_ns(const struct hr_transport *transport) {
    return transport->ops->poll_within_ns == NULL ? -1 : transport->ops->poll_within_ns(transport);
}

/*
 * Over connected stream sockets (TCP, or AF_UNIX in tests), -1 for none; made nonblocking here: one per peer for
 * control, control_fds [host_count], and data_sockets (1 to HORO_SOCKETS_PER_PEER_MAX) per peer for data, data_fds[host
 * * data_sockets + i], in the same order at both ends. Either array may be NULL: no links on that channel. The loss of
 * one socket is the loss of the peer. On control, a peer silent for peer_timeout_ms with data unacknowledged or under
 * watch counts as lost (TCP_USER_TIMEOUT, keepalive); so does one that reads nothing for so long while data waits for
 * it, even if its host answers. On data, one silent for so long under watch with nothing unacknowledged (keepalive);
 * with data unacknowledged the kernel decides, which waits for a host that answers as long as it takes: a process may
 * be stopped in the middle of a transfer. Probing counts in whole seconds, so timeouts below 2 s hold for
 * unacknowledged data on control only. Owns the descriptors on success only. NULL with *error set: HORO_ERR_USAGE for a
 * bad descriptor or argument (it is named), HORO_ERR_RESOURCE for lack of memory.
 */
struct hr_transport *hr_tcp_create(const int *control_fds, const int *data_fds, int host_count, int data_sockets,
                                   int peer_timeout_ms, struct hr_error *error);

struct hr_mpi;

/*
 * Data by MPI, control by `control`: a transport that has the control channel only, and that becomes a part of this
 * one, on success only. control_fds [host_count] are its descriptors, looked at for their end and not owned; NULL:
 * none. Peers, their tags and the largest message are those of mpi->calls, which must outlive the transport; its arrays
 * need not.
 *
 * - MPI has no descriptor to sleep on: poll_within_ns says how often to look while data is posted.
 * - A send is done when its receiver has begun to receive it, not before.
 * - MPI does not tell of the end of a process. A peer counts as lost when MPI says so, when no send to it has gone on
 *   for peer_timeout_ms in which this process ran, and when its control connection has ended and nothing has moved
 *   since for half a second.
 * - abandon, destroy and a loss wait up to 200 ms for MPI to give posted memory back: receives are cancelled, sends
 *   cannot be. What it still holds then is counted in mpi->stranded: MPI may read or write that memory whenever it is
 *   called again.
 *
 * NULL with *error set, as hr_tcp_create.
 */
struct hr_transport *hr_mpi_transport_create(struct hr_mpi *mpi, struct hr_transport *control, const int *control_fds,
                                             int host_count, int peer_timeout_ms, struct hr_error *error);

#endif
