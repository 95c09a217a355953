#include "shim.h"

#include <stdlib.h>
#include <string.h>

#include "base/cut.h"
#include "collective/collective.h"
#include "node/team.h"
#include "transport/queue.h"

enum { PARTS_MAX = 32 };
static const uint64_t TURNS_MAX = 20000000;

static const struct hr_cross_ops *algorithm_of(const shim_cross_call *call) {
    static const struct hr_cross_ops *const table[] = {
        &hr_cross_ring,        &hr_cross_doubling,        &hr_cross_tree,         &hr_cross_chain,
        &hr_cross_gather_ring, &hr_cross_gather_doubling, &hr_cross_scatter_ring,
    };
    return table[call->algorithm];
}

void shim_share(size_t bytes, int index, int owners, size_t *offset, size_t *length) {
    const struct hr_range share = hr_share(bytes, index, owners);
    *offset = share.offset;
    *length = share.bytes;
}

size_t shim_share_most(size_t bytes, int owners) {
    return hr_share_most(bytes, owners);
}

size_t shim_two_level_reserved(int hosts, int owners, size_t value_bytes, size_t segment_bytes) {
    return hr_two_level_scratch_bytes(&hr_tuning_defaults, hosts, value_bytes, hr_share_most(segment_bytes, owners),
                                      &hr_cross_ring);
}

size_t shim_two_level_needed(int hosts, int owners, size_t value_bytes, size_t segment_bytes, int index) {
    const size_t bytes = hr_share(segment_bytes, index, owners).bytes;
    const struct hr_cross_ops *cross = bytes <= hr_tuning_defaults.doubling ? &hr_cross_doubling : &hr_cross_ring;
    return hr_cross_scratch_bytes(cross, hosts, value_bytes, bytes, hr_tuning_defaults.piece);
}

/* Exactly as much as the algorithm asks for, so that the address sanitizer sees one byte too many. */
static int scratch_create(const shim_cross_call *call, void **scratch) {
    const size_t bytes = call->count * hr_dtype_bytes(call->dtype);
    const size_t wanted = hr_cross_scratch_bytes(algorithm_of(call), call->host_count, hr_dtype_bytes(call->dtype),
                                                 bytes, call->piece_bytes);
    *scratch = wanted == 0 ? NULL : aligned_alloc(HR_CROSS_ALIGNMENT, wanted);
    return wanted == 0 || *scratch != NULL ? HORO_OK : HORO_ERR_RESOURCE;
}

/* parts: memory for PARTS_MAX of them. */
static struct hr_cross_call call_of(const shim_cross_call *call, void *transport, int host, void *data, void *scratch,
                                    struct hr_cross_part *parts) {
    static _Atomic uint64_t sent; /* nobody looks at it */
    size_t offset = 0;
    for (int i = 0; call->part_bytes != NULL && i < call->host_count && i < PARTS_MAX; i++) {
        const size_t bytes = call->part_bytes[i];
        parts[i] = (struct hr_cross_part){bytes == 0 ? NULL : (char *)data + offset, bytes};
        offset += bytes;
    }
    return (struct hr_cross_call){
        .transport = transport,
        .host = host,
        .host_count = call->host_count,
        .data = data,
        .codec = hr_codec_find(call->dtype, 0),
        .count = call->count,
        .reduce_op = call->reduce_op,
        .kernel = hr_kernel_find(NULL),
        .sent_bytes = &sent,
        .root_host = call->root_host,
        .parts = call->part_bytes == NULL ? NULL : parts,
        .piece_bytes = call->piece_bytes,
        .scratch = scratch,
    };
}

/* A linear congruential generator (Knuth's MMIX); the high bits are the good ones. */
static unsigned draw(uint64_t *seed, unsigned below) {
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(*seed >> 33) % below;
}

/* One member of a simulation: a transport inside this thread, with the links of the rule, and its call. */
struct member {
    struct hr_transport base;
    struct simulation *simulation;
    int host, is_closed, is_abandoned, misused, status;
    struct hr_queue send[PARTS_MAX], recv[PARTS_MAX]; /* by peer */
    size_t pulled[PARTS_MAX];                         /* what a peer has taken of the first send; it is not told yet */
    size_t sent_bytes;
    const struct hr_io *ios[2 * HR_CROSS_WINDOW]; /* that are posted, to look at their memory */
    int is_recv[2 * HR_CROSS_WINDOW];
    int io_count;
    struct hr_cross state;
    void *scratch;
    struct hr_cross_part parts[PARTS_MAX];
};

struct simulation {
    int host_count;
    uint64_t seed;
    size_t piece_bytes; /* that move at once, at most; 0: whatever there is */
    int cut_a, cut_b, turns_until_cut;
    struct member *members;
};

/* No memory is received into while it is in use. Drops what is over and the old life of `io`, and adds the new one. */
static void look_at_memory(struct member *self, const struct hr_io *io, int is_recv) {
    int kept = 0;
    for (int i = 0; i < self->io_count; i++) {
        const struct hr_io *other = self->ios[i];
        if (other == io || other->state != HR_IO_POSTED) {
            continue;
        }
        const int overlaps = io->data < other->data + other->bytes && other->data < io->data + io->bytes;
        self->misused |= overlaps && (is_recv || self->is_recv[i]);
        self->ios[kept] = other;
        self->is_recv[kept++] = self->is_recv[i];
    }
    self->ios[kept] = io;
    self->is_recv[kept] = is_recv;
    self->io_count = kept + 1;
}

static int post(struct member *self, int peer, enum hr_channel channel, struct hr_queue *queues, char *data,
                size_t bytes, struct hr_io *io) {
    if (channel != HR_CHANNEL_DATA || peer < 0 || peer >= self->simulation->host_count || peer == self->host ||
        !hr_hosts_are_linked(channel, self->simulation->host_count, self->host, peer)) {
        return HORO_ERR_INTERNAL;
    }
    if (self->is_abandoned) {
        return HORO_ERR_ABORTED;
    }
    hr_queue_push(&queues[peer], data, bytes, io);
    look_at_memory(self, io, queues == self->recv);
    return HORO_OK;
}

static int member_post(struct hr_transport *transport, enum hr_direction direction, int peer, enum hr_channel channel,
                       char *data, size_t bytes, struct hr_io *io) {
    struct member *self = (struct member *)transport;
    self->sent_bytes += direction == HR_SEND ? bytes : 0;
    return post(self, peer, channel, direction == HR_SEND ? self->send : self->recv, data, bytes, io);
}

static void member_abandon(struct hr_transport *transport, enum hr_channel channel) {
    struct member *self = (struct member *)transport;
    (void)channel;
    self->is_abandoned = 1;
    for (int peer = 0; peer < PARTS_MAX; peer++) {
        (void)hr_queue_fail(&self->send[peer]);
        (void)hr_queue_fail(&self->recv[peer]);
    }
}

static const struct hr_transport_ops member_ops = {
    .post = member_post,
    .abandon = member_abandon,
};

static int is_lost(const struct simulation *simulation, int host, int peer) {
    const int is_cut = simulation->turns_until_cut < 0 && ((host == simulation->cut_a && peer == simulation->cut_b) ||
                                                           (host == simulation->cut_b && peer == simulation->cut_a));
    return is_cut || simulation->members[peer].is_closed;
}

/* Takes a part of what a peer sends, and learns what the peer has taken. */
static void move(struct member *self, int number) {
    struct simulation *simulation = self->simulation;
    struct member *peer = &simulation->members[number];
    struct hr_queue *recv = &self->recv[number];
    if (is_lost(simulation, self->host, number)) {
        (void)hr_queue_fail(recv);
        (void)hr_queue_fail(&self->send[number]);
        return;
    }
    (void)hr_queue_advance(&self->send[number], self->pulled[number]);
    self->pulled[number] = 0;
    (void)hr_queue_advance(recv, 0);
    const struct hr_io *from = peer->send[self->host].head;
    if (recv->head == NULL || from == NULL || peer->pulled[self->host] > 0) {
        return;
    }
    const size_t there = from->bytes - from->done_bytes;
    const size_t room = recv->head->bytes - recv->head->done_bytes;
    size_t bytes = there < room ? there : room;
    bytes = simulation->piece_bytes > 0 && simulation->piece_bytes < bytes ? simulation->piece_bytes : bytes;
    memcpy(recv->head->data + recv->head->done_bytes, from->data + from->done_bytes, bytes);
    peer->pulled[self->host] = bytes;
    (void)hr_queue_advance(recv, bytes);
}

static int member_begin(struct member *member, struct simulation *simulation, int host, const shim_cross_call *call,
                        void *data) {
    member->base.ops = &member_ops;
    member->simulation = simulation;
    member->host = host;
    HR_TRY(scratch_create(call, &member->scratch));
    const struct hr_cross_call full = call_of(call, member, host, data, member->scratch, member->parts);
    hr_cross_begin(algorithm_of(call), &member->state, &full);
    member->status = HORO_IN_PROGRESS;
    return HORO_OK;
}

/* Turns until the call is over, then the transport alone: what was sent must still go out. */
static void member_turn(struct member *member) {
    if (member->is_closed) {
        return;
    }
    if (member->status == HORO_OK || draw(&member->simulation->seed, 2)) {
        for (int peer = 0; peer < member->simulation->host_count; peer++) {
            if (peer != member->host && draw(&member->simulation->seed, 4) > 0) {
                move(member, peer);
            }
        }
        return;
    }
    member->status = hr_cross_progress(&member->state);
    if (member->status < 0) {
        member->is_closed = 1;
        member_abandon(&member->base, HR_CHANNEL_DATA);
    }
}

static int all_over(const struct simulation *simulation) {
    for (int i = 0; i < simulation->host_count; i++) {
        if (simulation->members[i].status == HORO_IN_PROGRESS) {
            return 0;
        }
    }
    return 1;
}

int shim_cross_simulate(const shim_cross_call *call, void *const *data, size_t link_piece_bytes, uint64_t seed,
                        int cut_a, int cut_b, int cut_turn, int *statuses, size_t *sent_bytes) {
    const int host_count = call->host_count;
    struct member *members = calloc((size_t)host_count, sizeof *members);
    struct simulation simulation = {host_count, seed, link_piece_bytes, cut_a, cut_b, cut_turn, members};
    int status = members == NULL ? HORO_ERR_RESOURCE : HORO_OK;
    for (int i = 0; i < host_count && status == HORO_OK; i++) {
        status = member_begin(&members[i], &simulation, i, call, data[i]);
    }
    for (uint64_t turn = 0; status == HORO_OK && turn < TURNS_MAX && !all_over(&simulation); turn++) {
        const int host = (int)draw(&simulation.seed, (unsigned)host_count);
        simulation.turns_until_cut -= host == cut_a || host == cut_b;
        member_turn(&members[host]);
    }
    for (int i = 0; members != NULL && i < host_count; i++) {
        statuses[i] = members[i].status;
        sent_bytes[i] = members[i].sent_bytes;
        status = members[i].misused ? HORO_ERR_USAGE : status;
        free(members[i].scratch);
    }
    free(members);
    return status;
}

int shim_hosts_are_linked(int channel, int host_count, int host, int other) {
    return hr_hosts_are_linked((enum hr_channel)channel, host_count, host, other);
}
