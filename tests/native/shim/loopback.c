/*
 * Links inside one process. The hub holds one bounded pipe per (lane, from, to, channel), as a socket pair
 * would; both ends copy under the hub's one mutex. An io belongs to the thread of its endpoint: only that endpoint's
 * progress touches it, so callers read its state without a lock.
 */
#include "loopback.h"

#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "pipe.h"
#include "transport/queue.h"

struct endpoint {
    struct hr_transport base;
    struct loopback_hub *hub;
    struct lane *lane;
    int host;
    int event_fd;
    /* under the hub's mutex */
    int signalled;
    uint64_t polls;
    int pieces; /* that may still move in this progress call */
    /* the endpoint's thread only */
    int abandoned[HR_CHANNEL_COUNT];
    struct peer {
        int lost;
        struct hr_queue send[HR_CHANNEL_COUNT];
        struct hr_queue recv[HR_CHANNEL_COUNT];
    } peers[];
};

struct lane {
    int number;
    struct lane *next;
    struct pipe **pipes;         /* [(from * hosts + to) * channels + channel], made when first used */
    struct endpoint **endpoints; /* [host], NULL before its creation and after its end */
    char *ended;                 /* [host] */
};

struct loopback_hub {
    pthread_mutex_t mutex;
    int host_count;
    struct loopback_timing timing;
    char *cut; /* [a * hosts + b] */
    struct lane *lanes;
};

static struct endpoint *endpoint_of(struct hr_transport *transport) {
    return (struct endpoint *)transport;
}

static void lane_free(struct lane *lane, int host_count) {
    const size_t pipe_count = (size_t)host_count * (size_t)host_count * HR_CHANNEL_COUNT;
    for (size_t i = 0; lane->pipes != NULL && i < pipe_count; i++) {
        free(lane->pipes[i]);
    }
    free(lane->pipes);
    free(lane->endpoints);
    free(lane->ended);
    free(lane);
}

struct loopback_hub *loopback_hub_create(int host_count, const struct loopback_timing *timing) {
    struct loopback_hub *hub = calloc(1, sizeof *hub);
    char *cut = calloc((size_t)host_count * (size_t)host_count, 1);
    if (hub == NULL || cut == NULL || pthread_mutex_init(&hub->mutex, NULL) != 0) {
        free(hub);
        free(cut);
        return NULL;
    }
    hub->host_count = host_count;
    hub->timing = *timing;
    hub->cut = cut;
    return hub;
}

void loopback_hub_destroy(struct loopback_hub *hub) {
    if (hub == NULL) {
        return;
    }
    while (hub->lanes != NULL) {
        struct lane *lane = hub->lanes;
        hub->lanes = lane->next;
        lane_free(lane, hub->host_count);
    }
    (void)pthread_mutex_destroy(&hub->mutex);
    free(hub->cut);
    free(hub);
}

/* All below that say "locked" are called with the hub's mutex held. */

/* locked; NULL for lack of memory */
static struct lane *lane_find_or_add(struct loopback_hub *hub, int number) {
    for (struct lane *lane = hub->lanes; lane != NULL; lane = lane->next) {
        if (lane->number == number) {
            return lane;
        }
    }
    const size_t hosts = (size_t)hub->host_count;
    struct lane *lane = calloc(1, sizeof *lane);
    if (lane == NULL) {
        return NULL;
    }
    lane->number = number;
    lane->pipes = calloc(hosts * hosts * HR_CHANNEL_COUNT, sizeof(struct pipe *));
    lane->endpoints = calloc(hosts, sizeof(struct endpoint *));
    lane->ended = calloc(hosts, 1);
    if (lane->pipes == NULL || lane->endpoints == NULL || lane->ended == NULL) {
        lane_free(lane, hub->host_count);
        return NULL;
    }
    lane->next = hub->lanes;
    hub->lanes = lane;
    return lane;
}

static struct pipe **pipe_slot(const struct endpoint *endpoint, int from, int to, int channel) {
    return &endpoint->lane->pipes[(from * endpoint->hub->host_count + to) * HR_CHANNEL_COUNT + channel];
}

/* locked: makes the endpoint's descriptor readable */
static void signal_endpoint(struct endpoint *endpoint) {
    if (endpoint != NULL && !endpoint->signalled) {
        const uint64_t one = 1;
        endpoint->signalled = 1;
        (void)!write(endpoint->event_fd, &one, sizeof one);
    }
}

/* locked */
static void drain_signal(struct endpoint *endpoint) {
    if (endpoint->signalled) {
        uint64_t value;
        endpoint->signalled = 0;
        (void)!read(endpoint->event_fd, &value, sizeof value);
    }
}

/* locked */
static int is_cut(const struct endpoint *endpoint, int peer) {
    return endpoint->hub->cut[endpoint->host * endpoint->hub->host_count + peer];
}

/* locked; 1: a range of bytes went into the pipe */
static int push_one(struct endpoint *endpoint, int peer, int channel) {
    if (endpoint->pieces == 0) {
        return 0;
    }
    struct hr_queue *queue = &endpoint->peers[peer].send[channel];
    struct pipe **slot = pipe_slot(endpoint, endpoint->host, peer, channel);
    if (*slot == NULL) {
        *slot = calloc(1, sizeof **slot);
    }
    const size_t room = *slot == NULL ? 0 : pipe_room(*slot);
    if (room == 0) {
        return 0;
    }
    const struct hr_io *io = queue->head;
    const size_t piece_bytes = endpoint->hub->timing.piece_bytes;
    size_t bytes = io->bytes - io->done_bytes;
    bytes = bytes < room ? bytes : room;
    bytes = piece_bytes != 0 && piece_bytes < bytes ? piece_bytes : bytes;
    struct endpoint *receiver = endpoint->lane->endpoints[peer];
    const uint64_t polls = receiver == NULL ? 0 : receiver->polls;
    pipe_push(*slot, io->data + io->done_bytes, bytes, polls + (uint64_t)endpoint->hub->timing.delay_polls[channel]);
    (void)hr_queue_advance(queue, bytes);
    signal_endpoint(receiver);
    endpoint->pieces--;
    return 1;
}

/* locked; 1: bytes of one range that is due came out of the pipe */
static int pull_one(struct endpoint *endpoint, int peer, int channel) {
    if (endpoint->pieces == 0) {
        return 0;
    }
    struct hr_queue *queue = &endpoint->peers[peer].recv[channel];
    struct pipe *pipe = *pipe_slot(endpoint, peer, endpoint->host, channel);
    const struct hr_io *io = queue->head;
    const size_t bytes =
        pipe == NULL ? 0 : pipe_pull(pipe, io->data + io->done_bytes, io->bytes - io->done_bytes, endpoint->polls);
    if (bytes == 0) {
        return 0;
    }
    (void)hr_queue_advance(queue, bytes);
    signal_endpoint(endpoint->lane->endpoints[peer]);
    endpoint->pieces--;
    return 1;
}

static int fail_peer(struct peer *peer) {
    int any = 0;
    for (int channel = 0; channel < HR_CHANNEL_COUNT; channel++) {
        any |= hr_queue_fail(&peer->send[channel]);
        any |= hr_queue_fail(&peer->recv[channel]);
    }
    return any;
}

static void lose_peer(struct endpoint *endpoint, int peer) {
    endpoint->peers[peer].lost = 1;
    (void)fail_peer(&endpoint->peers[peer]);
}

static int has_posted(const struct peer *peer) {
    for (int channel = 0; channel < HR_CHANNEL_COUNT; channel++) {
        if (peer->send[channel].head != NULL || peer->recv[channel].head != NULL) {
            return 1;
        }
    }
    return 0;
}

/* locked. A peer that has ended is lost only after what it sent last has been read; one that is cut off, at once. */
static int peer_progress(struct endpoint *endpoint, int number) {
    struct peer *peer = &endpoint->peers[number];
    if (peer->lost) {
        return fail_peer(peer);
    }
    if (is_cut(endpoint, number)) {
        lose_peer(endpoint, number);
        return 1;
    }
    const int ended = endpoint->lane->ended[number];
    int moved = 0;
    int waiting = 0;
    for (int channel = 0; channel < HR_CHANNEL_COUNT; channel++) {
        const struct hr_queue *recv = &peer->recv[channel];
        const struct pipe *pipe = *pipe_slot(endpoint, number, endpoint->host, channel);
        moved |= hr_queue_advance(&peer->recv[channel], 0);
        moved |= hr_queue_advance(&peer->send[channel], 0);
        waiting |= recv->head != NULL && pipe != NULL && !pipe_is_empty(pipe);
    }
    /* Which channel and direction goes first changes with every call, lest one piece per call starve the others. */
    for (int i = 0; i < 2 * HR_CHANNEL_COUNT; i++) {
        const unsigned turn = ((unsigned)endpoint->polls + (unsigned)i) % (2 * HR_CHANNEL_COUNT);
        const int channel = (int)(turn / 2);
        const int sends = turn % 2 != 0;
        if (sends && peer->send[channel].head != NULL && !ended) {
            moved |= push_one(endpoint, number, channel);
        } else if (!sends && peer->recv[channel].head != NULL) {
            moved |= pull_one(endpoint, number, channel);
        }
    }
    if (ended && !waiting && !moved && has_posted(peer)) {
        lose_peer(endpoint, number);
        moved = 1;
    }
    return moved;
}

static int loopback_progress(struct hr_transport *transport) {
    struct endpoint *endpoint = endpoint_of(transport);
    int moved = 0;
    (void)pthread_mutex_lock(&endpoint->hub->mutex);
    drain_signal(endpoint);
    endpoint->polls++;
    const int host_count = endpoint->hub->host_count;
    endpoint->pieces = endpoint->hub->timing.one_piece ? 1 : INT_MAX;
    for (int i = 0; i < host_count; i++) {
        const int peer = (int)((endpoint->polls / (2 * HR_CHANNEL_COUNT) + (uint64_t)i) % (uint64_t)host_count);
        if (has_posted(&endpoint->peers[peer])) {
            moved |= peer_progress(endpoint, peer);
        }
    }
    (void)pthread_mutex_unlock(&endpoint->hub->mutex);
    return moved;
}

/* The statuses of post_send. */
static int check_post(const struct endpoint *endpoint, int peer, enum hr_channel channel) {
    const int is_peer = peer >= 0 && peer < endpoint->hub->host_count && peer != endpoint->host;
    if (!is_peer || (channel == HR_CHANNEL_CONTROL && endpoint->lane->number != 0)) {
        return HORO_ERR_INTERNAL;
    }
    return endpoint->abandoned[channel] ? HORO_ERR_ABORTED : HORO_OK;
}

static int loopback_post_send(struct hr_transport *transport, int peer, enum hr_channel channel, const void *data,
                              size_t bytes, struct hr_io *io) {
    struct endpoint *endpoint = endpoint_of(transport);
    HR_TRY(check_post(endpoint, peer, channel));
    hr_queue_push(&endpoint->peers[peer].send[channel], (char *)(uintptr_t)data, bytes, io);
    return HORO_OK;
}

static int loopback_post_recv(struct hr_transport *transport, int peer, enum hr_channel channel, void *data,
                              size_t bytes, struct hr_io *io) {
    struct endpoint *endpoint = endpoint_of(transport);
    HR_TRY(check_post(endpoint, peer, channel));
    hr_queue_push(&endpoint->peers[peer].recv[channel], data, bytes, io);
    return HORO_OK;
}

/* locked; whether the next progress call may move something of this peer, delayed bytes included */
static int may_move(const struct endpoint *endpoint, int number) {
    const struct peer *peer = &endpoint->peers[number];
    if (peer->lost || is_cut(endpoint, number) || endpoint->lane->ended[number]) {
        return 1;
    }
    for (int channel = 0; channel < HR_CHANNEL_COUNT; channel++) {
        const struct hr_io *recv = peer->recv[channel].head;
        const struct hr_io *send = peer->send[channel].head;
        const struct pipe *in = *pipe_slot(endpoint, number, endpoint->host, channel);
        const struct pipe *out = *pipe_slot(endpoint, endpoint->host, number, channel);
        if (recv != NULL && (recv->bytes == 0 || (in != NULL && !pipe_is_empty(in)))) {
            return 1;
        }
        if (send != NULL && (send->bytes == 0 || out == NULL || pipe_room(out) > 0)) {
            return 1;
        }
    }
    return 0;
}

static size_t loopback_sleep_fds(struct hr_transport *transport, struct pollfd *fds, size_t capacity) {
    struct endpoint *endpoint = endpoint_of(transport);
    int posted = 0;
    (void)pthread_mutex_lock(&endpoint->hub->mutex);
    for (int peer = 0; peer < endpoint->hub->host_count; peer++) {
        if (has_posted(&endpoint->peers[peer])) {
            posted = 1;
            if (may_move(endpoint, peer)) {
                signal_endpoint(endpoint);
            }
        }
    }
    (void)pthread_mutex_unlock(&endpoint->hub->mutex);
    if (!posted) {
        return 0;
    }
    if (capacity > 0) {
        fds[0] = (struct pollfd){.fd = endpoint->event_fd, .events = POLLIN};
    }
    return 1;
}

/* Nothing can go silent inside one process. */
static enum hr_loss loopback_loss(const struct hr_transport *transport, int peer) {
    const struct endpoint *endpoint = (const struct endpoint *)transport;
    return endpoint->peers[peer].lost ? HR_LOSS_CLOSED : HR_LOSS_NONE;
}

static void loopback_watch(struct hr_transport *transport, int enabled) {
    (void)transport;
    (void)enabled;
}

static void loopback_abandon(struct hr_transport *transport, enum hr_channel channel) {
    struct endpoint *endpoint = endpoint_of(transport);
    endpoint->abandoned[channel] = 1;
    for (int peer = 0; peer < endpoint->hub->host_count; peer++) {
        (void)hr_queue_fail(&endpoint->peers[peer].send[channel]);
        (void)hr_queue_fail(&endpoint->peers[peer].recv[channel]);
    }
}

static void loopback_destroy(struct hr_transport *transport) {
    if (transport == NULL) {
        return;
    }
    struct endpoint *endpoint = endpoint_of(transport);
    struct loopback_hub *hub = endpoint->hub;
    (void)pthread_mutex_lock(&hub->mutex);
    endpoint->lane->endpoints[endpoint->host] = NULL;
    endpoint->lane->ended[endpoint->host] = 1;
    for (int peer = 0; peer < hub->host_count; peer++) {
        signal_endpoint(endpoint->lane->endpoints[peer]);
        (void)fail_peer(&endpoint->peers[peer]);
    }
    (void)pthread_mutex_unlock(&hub->mutex);
    (void)close(endpoint->event_fd);
    free(endpoint);
}

static const struct hr_transport_ops loopback_ops = {
    .name = "loopback",
    .post_send = loopback_post_send,
    .post_recv = loopback_post_recv,
    .progress = loopback_progress,
    .sleep_fds = loopback_sleep_fds,
    .loss = loopback_loss,
    .watch = loopback_watch,
    .abandon = loopback_abandon,
    .destroy = loopback_destroy,
};

/* Joins the lane. HORO_OK or an error. */
static int endpoint_join(struct endpoint *endpoint, int lane_number, struct hr_error *error) {
    struct loopback_hub *hub = endpoint->hub;
    int status = HORO_OK;
    (void)pthread_mutex_lock(&hub->mutex);
    struct lane *lane = lane_find_or_add(hub, lane_number);
    if (lane == NULL) {
        status = hr_fail(error, HORO_ERR_RESOURCE, "no memory for lane %d of the loopback hub", lane_number);
    } else if (lane->endpoints[endpoint->host] != NULL || lane->ended[endpoint->host]) {
        status = hr_fail(error, HORO_ERR_USAGE, "host %d has had a loopback endpoint on lane %d already",
                         endpoint->host, lane_number);
    } else {
        endpoint->lane = lane;
        lane->endpoints[endpoint->host] = endpoint;
    }
    (void)pthread_mutex_unlock(&hub->mutex);
    return status;
}

struct hr_transport *loopback_create(struct loopback_hub *hub, int host, int lane, struct hr_error *error) {
    if (host < 0 || host >= hub->host_count) {
        (void)hr_fail(error, HORO_ERR_USAGE, "host %d is not one of the %d hosts of the hub", host, hub->host_count);
        return NULL;
    }
    struct endpoint *endpoint = calloc(1, sizeof *endpoint + (size_t)hub->host_count * sizeof endpoint->peers[0]);
    const int event_fd = endpoint == NULL ? -1 : eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (event_fd < 0) {
        (void)hr_fail(error, HORO_ERR_RESOURCE, "no memory or descriptor for a loopback endpoint");
        free(endpoint);
        return NULL;
    }
    endpoint->base.ops = &loopback_ops;
    endpoint->hub = hub;
    endpoint->host = host;
    endpoint->event_fd = event_fd;
    if (endpoint_join(endpoint, lane, error) != HORO_OK) {
        (void)close(event_fd);
        free(endpoint);
        return NULL;
    }
    return &endpoint->base;
}

void loopback_hub_cut(struct loopback_hub *hub, int host_a, int host_b) {
    (void)pthread_mutex_lock(&hub->mutex);
    hub->cut[host_a * hub->host_count + host_b] = 1;
    hub->cut[host_b * hub->host_count + host_a] = 1;
    for (struct lane *lane = hub->lanes; lane != NULL; lane = lane->next) {
        signal_endpoint(lane->endpoints[host_a]);
        signal_endpoint(lane->endpoints[host_b]);
    }
    (void)pthread_mutex_unlock(&hub->mutex);
}
