#include "shim_cross.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/cut.h"
#include "collective/collective.h"
#include "local/shares.h"
#include "collective/two_level.h"
#include "horo.h"
#include "loopback.h"
#include "node/linked.h"
#include "shim_transport.h"

enum { RUNNING_MAX = 2, PARTS_MAX = 32 };
static const uint64_t TURNS_MAX = 20000000;

static const struct hr_cross_ops *algorithm_of(const shim_cross_call *call) {
    static const struct hr_cross_ops *const table[] = {
        &hr_cross_ring,        &hr_cross_doubling,        &hr_cross_tree,         &hr_cross_chain,
        &hr_cross_gather_ring, &hr_cross_gather_doubling, &hr_cross_scatter_ring,
    };
    return table[call->algorithm];
}

void shim_part(size_t count, size_t part_count, size_t index, size_t *begin, size_t *length) {
    hr_part(count, part_count, index, begin, length);
}

void shim_share(size_t block_bytes, size_t bytes, int index, int owners, size_t *offset, size_t *length) {
    const struct hr_range share = hr_share(hr_share_unit(block_bytes), bytes, index, owners);
    *offset = share.offset;
    *length = share.bytes;
}

size_t shim_share_most(size_t block_bytes, size_t bytes, int owners) {
    return hr_share_most(hr_share_unit(block_bytes), bytes, owners);
}

size_t shim_two_level_reserved(int hosts, int owners, size_t block_bytes, size_t segment_bytes) {
    return hr_two_level_scratch_bytes(&hr_tuning_defaults, hosts, owners, block_bytes, segment_bytes);
}

size_t shim_two_level_needed(int hosts, int owners, size_t block_bytes, size_t segment_bytes, int index) {
    const size_t bytes = hr_share(hr_share_unit(block_bytes), segment_bytes, index, owners).bytes;
    const struct hr_cross_ops *cross = hr_two_level_cross(&hr_tuning_defaults, bytes);
    return hr_cross_scratch_bytes(cross, hosts, block_bytes, bytes, hr_tuning_defaults.piece);
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
        .kernel = hr_kernel_best(),
        .root_host = call->root_host,
        .parts = call->part_bytes == NULL ? NULL : parts,
        .piece_bytes = call->piece_bytes,
        .scratch = scratch,
    };
}

int shim_cross_begin(void *transport, int host, const shim_cross_call *call, void *data) {
    struct hr_cross state;
    struct hr_cross_part parts[PARTS_MAX];
    const struct hr_cross_call full = call_of(call, transport, host, data, NULL, parts);
    return hr_cross_begin(algorithm_of(call), &state, &full);
}

/* The calls in flight on one member; entry i % RUNNING_MAX is call i. */
struct run {
    const shim_cross_call *call;
    void *transport;
    int host;
    char *data;
    int repeats;
    int begun, done;
    struct hr_cross states[RUNNING_MAX];
    void *scratch[RUNNING_MAX];
    struct hr_cross_part parts[RUNNING_MAX][PARTS_MAX];
};

static int begin_next(struct run *run) {
    const size_t block_bytes = run->call->count * hr_dtype_bytes(run->call->dtype);
    const int slot = run->begun % RUNNING_MAX;
    const struct hr_cross_call full =
        call_of(run->call, run->transport, run->host, run->data + (size_t)run->begun * block_bytes, run->scratch[slot],
                run->parts[slot]);
    run->begun++;
    return hr_cross_begin(algorithm_of(run->call), &run->states[slot], &full);
}

/* Progress of all calls in flight. HORO_IN_PROGRESS, HORO_OK when all repeats are done, or an error. */
static int run_progress(struct run *run) {
    for (;;) {
        for (int i = run->done; i < run->begun; i++) {
            struct hr_cross *state = &run->states[i % RUNNING_MAX];
            const int status = hr_cross_progress(state);
            if (status < 0) {
                return status;
            }
            run->done += status == HORO_OK && i == run->done;
        }
        const int may_begin =
            run->begun < run->repeats && run->begun - run->done < RUNNING_MAX &&
            (run->begun == run->done || hr_cross_all_posted(&run->states[(run->begun - 1) % RUNNING_MAX]));
        if (!may_begin) {
            return run->done == run->repeats ? HORO_OK : HORO_IN_PROGRESS;
        }
        HR_TRY(begin_next(run));
    }
}

static int run_until_done(struct run *run, int timeout_ms) {
    const int64_t deadline_ns = hr_now_ns() + (int64_t)timeout_ms * 1000000;
    for (;;) {
        const int status = run_progress(run);
        if (status != HORO_IN_PROGRESS) {
            return status;
        }
        if (shim_progress(run->transport)) {
            continue;
        }
        const int64_t left_ms = (deadline_ns - hr_now_ns()) / 1000000;
        if (left_ms <= 0) {
            shim_abandon(run->transport, HR_CHANNEL_DATA);
            return HORO_ERR_TIMEOUT;
        }
        (void)shim_sleep(run->transport, (int)left_ms);
    }
}

int shim_cross_run(void *transport, int host, const shim_cross_call *call, void *data, int repeats, int timeout_ms) {
    struct run run = {.call = call, .transport = transport, .host = host, .data = data, .repeats = repeats};
    int status = HORO_OK;
    for (int i = 0; i < RUNNING_MAX && status == HORO_OK; i++) {
        status = scratch_create(call, &run.scratch[i]);
    }
    if (status == HORO_OK) {
        status = run_until_done(&run, timeout_ms);
    }
    for (int i = 0; i < RUNNING_MAX; i++) {
        free(run.scratch[i]);
    }
    return status;
}

/* A transport that counts what is sent through it and sees to it that no memory is received into while it is in use. */
struct counting {
    struct hr_transport base;
    struct hr_transport *inner;
    size_t sent_bytes;
    int misused;
    const struct hr_io *ios[2 * HR_CROSS_WINDOW];
    int is_recv[2 * HR_CROSS_WINDOW];
    int io_count;
};

/* Drops what is over and the old life of `io` itself; then says whether the new range is in use, and adds it. */
static void look_at_memory(struct counting *self, const char *data, size_t bytes, const struct hr_io *io, int is_recv) {
    int kept = 0;
    for (int i = 0; i < self->io_count; i++) {
        const struct hr_io *other = self->ios[i];
        if (other == io || other->state != HR_IO_POSTED) {
            continue;
        }
        const int overlaps = data < other->data + other->bytes && other->data < data + bytes;
        self->misused |= overlaps && (is_recv || self->is_recv[i]);
        self->ios[kept] = other;
        self->is_recv[kept++] = self->is_recv[i];
    }
    self->ios[kept] = io;
    self->is_recv[kept] = is_recv;
    self->io_count = kept + 1;
}

static int counting_post_send(struct hr_transport *transport, int peer, enum hr_channel channel, const void *data,
                              size_t bytes, struct hr_io *io) {
    struct counting *self = (struct counting *)transport;
    self->sent_bytes += bytes;
    look_at_memory(self, data, bytes, io, 0);
    return self->inner->ops->post_send(self->inner, peer, channel, data, bytes, io);
}

static int counting_post_recv(struct hr_transport *transport, int peer, enum hr_channel channel, void *data,
                              size_t bytes, struct hr_io *io) {
    struct counting *self = (struct counting *)transport;
    look_at_memory(self, data, bytes, io, 1);
    return self->inner->ops->post_recv(self->inner, peer, channel, data, bytes, io);
}

static void counting_abandon(struct hr_transport *transport, enum hr_channel channel) {
    struct counting *self = (struct counting *)transport;
    self->inner->ops->abandon(self->inner, channel);
}

static const struct hr_transport_ops counting_ops = {
    .name = "counting",
    .post_send = counting_post_send,
    .post_recv = counting_post_recv,
    .abandon = counting_abandon,
};

struct member {
    struct counting transport;
    struct hr_cross state;
    void *scratch;
    struct hr_cross_part parts[PARTS_MAX];
    int status;
};

static int member_begin(struct member *member, struct loopback_hub *hub, int host, const shim_cross_call *call,
                        void *data) {
    struct hr_error error = {0};
    member->transport = (struct counting){.base.ops = &counting_ops, .inner = loopback_create(hub, host, 0, &error)};
    if (member->transport.inner == NULL) {
        return error.code;
    }
    HR_TRY(scratch_create(call, &member->scratch));
    const struct hr_cross_call full = call_of(call, &member->transport, host, data, member->scratch, member->parts);
    HR_TRY(hr_cross_begin(algorithm_of(call), &member->state, &full));
    member->status = HORO_IN_PROGRESS;
    return HORO_OK;
}

static void member_close(struct member *member) {
    if (member->transport.inner != NULL) {
        member->transport.inner->ops->destroy(member->transport.inner);
        member->transport.inner = NULL;
    }
    free(member->scratch);
    member->scratch = NULL;
}

/* Turns until the call is over, then the transport alone: what was sent must still go out. */
static void member_turn(struct member *member, int of_transport) {
    if (member->transport.inner == NULL) {
        return;
    }
    if (of_transport || member->status == HORO_OK) {
        (void)member->transport.inner->ops->progress(member->transport.inner);
        return;
    }
    member->status = hr_cross_progress(&member->state);
    if (member->status < 0) {
        member_close(member);
    }
}

static int all_over(const struct member *members, int host_count) {
    for (int i = 0; i < host_count; i++) {
        if (members[i].status == HORO_IN_PROGRESS) {
            return 0;
        }
    }
    return 1;
}

/* A linear congruential generator (Knuth's MMIX); the high bits are the good ones. */
static unsigned draw(uint64_t *seed, unsigned below) {
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(*seed >> 33) % below;
}

int shim_cross_simulate(const shim_cross_call *call, void *const *data, int delay_polls, size_t link_piece_bytes,
                        uint64_t seed, int cut_a, int cut_b, int cut_turn, int *statuses, size_t *sent_bytes) {
    const unsigned host_count = (unsigned)call->host_count;
    const struct loopback_timing timing = {.delay_polls = {delay_polls, delay_polls}, .piece_bytes = link_piece_bytes};
    struct loopback_hub *hub = loopback_hub_create(call->host_count, &timing);
    struct member *members = calloc(host_count, sizeof *members);
    int status = hub == NULL || members == NULL ? HORO_ERR_RESOURCE : HORO_OK;
    for (unsigned i = 0; i < host_count && status == HORO_OK; i++) {
        status = member_begin(&members[i], hub, (int)i, call, data[i]);
    }
    int turns_until_cut = cut_turn;
    for (uint64_t turn = 0; status == HORO_OK && turn < TURNS_MAX && !all_over(members, call->host_count); turn++) {
        const int host = (int)draw(&seed, host_count);
        if ((host == cut_a || host == cut_b) && turns_until_cut-- == 0) {
            loopback_hub_cut(hub, cut_a, cut_b);
        }
        member_turn(&members[host], (int)draw(&seed, 2));
    }
    for (unsigned i = 0; members != NULL && i < host_count; i++) {
        statuses[i] = members[i].status;
        sent_bytes[i] = members[i].transport.sent_bytes;
        status = members[i].transport.misused ? HORO_ERR_USAGE : status;
        member_close(&members[i]);
    }
    free(members);
    loopback_hub_destroy(hub);
    return status;
}

/* A transport that notes whom it is to send to and receive from, moves nothing, and is done at once. */
struct noting {
    struct hr_transport base;
    char *peers;
};

static int note(struct hr_transport *transport, int peer, size_t bytes, struct hr_io *io) {
    ((struct noting *)transport)->peers[peer] = 1;
    *io = (struct hr_io){.bytes = bytes, .done_bytes = bytes, .state = HR_IO_DONE};
    return HORO_OK;
}

static int noting_post_send(struct hr_transport *transport, int peer, enum hr_channel channel, const void *data,
                            size_t bytes, struct hr_io *io) {
    (void)data;
    return channel == HR_CHANNEL_DATA ? note(transport, peer, bytes, io) : HORO_ERR_INTERNAL;
}

static int noting_post_recv(struct hr_transport *transport, int peer, enum hr_channel channel, void *data, size_t bytes,
                            struct hr_io *io) {
    memset(data, 0, bytes);
    return channel == HR_CHANNEL_DATA ? note(transport, peer, bytes, io) : HORO_ERR_INTERNAL;
}

static void noting_abandon(struct hr_transport *transport, enum hr_channel channel) {
    (void)transport;
    (void)channel;
}

static const struct hr_transport_ops noting_ops = {
    .name = "noting", .post_send = noting_post_send, .post_recv = noting_post_recv, .abandon = noting_abandon};

int shim_cross_peers(const shim_cross_call *call, int host, char *peers) {
    struct noting transport = {.base.ops = &noting_ops, .peers = peers};
    struct hr_cross state;
    struct hr_cross_part parts[PARTS_MAX];
    void *scratch = NULL;
    void *data = calloc(call->count + 1, hr_dtype_bytes(call->dtype));
    int status = data == NULL ? HORO_ERR_RESOURCE : scratch_create(call, &scratch);
    if (status == HORO_OK) {
        const struct hr_cross_call full = call_of(call, &transport, host, data, scratch, parts);
        status = hr_cross_begin(algorithm_of(call), &state, &full);
    }
    if (status == HORO_OK) {
        status = hr_cross_progress(&state);
    }
    free(scratch);
    free(data);
    return status;
}

int shim_hosts_are_linked(int channel, int host_count, int host, int other) {
    return hr_hosts_are_linked((enum hr_channel)channel, host_count, host, other);
}
