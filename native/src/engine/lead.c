/*
 * What the leader of a host does besides: it collects what its ranks and child hosts announce, agrees (the root) or reports (the others),
 * hands the records of the log down, and tells neighbours of an abort.
 */
#include <stdlib.h>

#include "engine/engine.h"

enum { EVICT_ONE_IN = 32 }; /* higher: more hits where names are many times the capacity; lower: new names are cached sooner */

int hr_engine_announce_own(struct hr_engine *engine, const struct hr_request *request, uint32_t id) {
    if (id != 0) {
        return hr_agree_announce_id(&engine->leader.agree, 0, id, request->submit_ns);
    }
    struct hr_wire_message message = {.type = HR_WIRE_REQUEST, .rank = engine->node->rank};
    HR_TRY(hr_wire_decode_request(request->bytes, request->byte_count, &message.request));
    return hr_agree_announce_request(&engine->leader.agree, 0, &message, request->submit_ns);
}

static int init_agreement(struct hr_engine *engine, uint64_t fusion_bytes) {
    const struct hr_node *node = engine->node;
    const int children = engine->leader.link_count - engine->leader.has_parent;
    const int members = node->local_size + children;
    engine->leader.member_ranks = calloc((size_t)members, sizeof *engine->leader.member_ranks);
    engine->leader.request_in = calloc((size_t)node->local_size, sizeof *engine->leader.request_in);
    if (engine->leader.member_ranks == NULL || engine->leader.request_in == NULL) {
        return HORO_ERR_RESOURCE;
    }
    for (int i = 0; i < members; i++) {
        engine->leader.member_ranks[i] = i < node->local_size
                                      ? node->rank_of_local[i]
                                      : engine->leader.links[engine->leader.has_parent + i - node->local_size].leader_rank;
    }
    const struct hr_agree_config config = {
        .is_root = engine->is_root,
        .member_count = members,
        .local_count = node->local_size,
        .rank_of_member = engine->leader.member_ranks,
        .host_name_of_rank = (const char *const *)node->host_name_of_rank,
        .rank_count = node->size,
        .capacity = engine->announcer.capacity,
        .evict_one_in = EVICT_ONE_IN,
        .fusion_bytes = fusion_bytes,
    };
    return hr_agree_init(&engine->leader.agree, &config);
}

int hr_engine_init_leader(struct hr_engine *engine, uint64_t fusion_bytes, struct hr_error *error) {
    HR_TRY(hr_leader_open_links(engine, error));
    const int status = init_agreement(engine, fusion_bytes);
    return status == HORO_OK ? HORO_OK : hr_fail(error, status, "out of memory for the agreement");
}

void hr_engine_fini_leader(struct hr_engine *engine) {
    for (int i = 0; i < engine->leader.link_count; i++) {
        hr_link_close(&engine->leader.links[i]);
    }
    free(engine->leader.links);
    for (int i = 0; i < engine->node->local_size && engine->leader.request_in != NULL; i++) {
        hr_buffer_fini(&engine->leader.request_in[i]);
    }
    free(engine->leader.request_in);
    free(engine->leader.member_ranks);
    hr_buffer_fini(&engine->leader.log_out);
    hr_agree_fini(&engine->leader.agree);
}

/* ---- What comes in ---- */

static int announce_ids(struct hr_engine *engine, int member, const struct hr_wire_message *message, int64_t now_ns) {
    for (uint32_t i = 0; i < message->count; i++) {
        HR_TRY(hr_agree_announce_id(&engine->leader.agree, member, hr_wire_id(message, i), now_ns));
    }
    return HORO_OK;
}

int hr_engine_note_leaver(struct hr_engine *engine, int rank) {
    if (engine->leader.leaver != 0) {
        return HORO_OK; /* one LEAVE record closes the log for all */
    }
    engine->leader.leaver = rank + 1;
    if (engine->is_root) {
        return HORO_OK; /* see form_batches */
    }
    size_t mark;
    struct hr_buffer *out = &engine->leader.links[0].out;
    HR_TRY(hr_leader_collect(engine)); /* what was announced before travels before */
    HR_TRY(hr_frame_begin(out, &mark));
    HR_TRY(hr_wire_put_leave(out, rank));
    hr_frame_end(out, mark);
    return HORO_OK;
}

int hr_leader_announce(struct hr_engine *engine, int member, const struct hr_wire_message *message, int64_t now_ns) {
    switch (message->type) {
    case HR_WIRE_IDS: return announce_ids(engine, member, message, now_ns);
    case HR_WIRE_REQUEST: return hr_agree_announce_request(&engine->leader.agree, member, message, now_ns);
    case HR_WIRE_LEAVE:
        return message->rank < engine->node->size ? hr_engine_note_leaver(engine, message->rank) : HORO_ERR_INTERNAL;
    default: return HORO_ERR_INTERNAL;
    }
}

static int announce_frames(struct hr_engine *engine, struct hr_buffer *in, int member, int64_t now_ns) {
    const uint8_t *data;
    size_t bytes;
    int status;
    while ((status = hr_frame_peek(in, &data, &bytes)) == HORO_OK) {
        struct hr_wire_message message;
        HR_TRY(hr_wire_decode(data, bytes, &message));
        HR_TRY(hr_leader_announce(engine, member, &message, now_ns));
        hr_buffer_consume(in, 4 + bytes);
    }
    return status < 0 ? status : HORO_OK;
}

static int collect_requests(struct hr_engine *engine, int local_rank, int64_t now_ns) {
    struct hr_node *node = engine->node;
    struct hr_arena_block *block = &node->arena.blocks[local_rank];
    uint64_t read = atomic_load_explicit(&block->requests_read, memory_order_relaxed); /* ours alone */
    const size_t available = (size_t)(atomic_load(&block->requests.written) - read);
    if (available == 0) {
        return HORO_OK;
    }
    struct hr_buffer *in = &engine->leader.request_in[local_rank];
    HR_TRY(hr_buffer_reserve(in, available));
    in->end += hr_ring_read(&block->requests, hr_arena_request_ring(&node->arena, local_rank), HR_REQUEST_RING_BYTES, &read,
                            in->data + in->end, available);
    atomic_store(&block->requests_read, read); /* partner: hr_engine_flush_requests */
    if (atomic_load(&block->wants_room) != 0) {
        atomic_store(&block->wants_room, 0);
        hr_node_wake(node, local_rank);
    }
    return announce_frames(engine, in, local_rank, now_ns);
}

static int collect_local(struct hr_engine *engine) {
    const struct hr_node *node = engine->node;
    const uint64_t announced = atomic_load(&node->arena.header->announced); /* before looking: what comes later counts anew */
    if (announced == engine->leader.announced_seen) {
        return 0;
    }
    engine->leader.announced_seen = announced;
    const int64_t now_ns = hr_now_ns();
    for (int i = 1; i < node->local_size; i++) {
        HR_TRY(collect_requests(engine, i, now_ns));
    }
    return 1;
}

/* ---- What goes out ---- */

static int send_to_children(struct hr_engine *engine, const void *frames, size_t bytes) {
    for (int i = engine->leader.has_parent; i < engine->leader.link_count; i++) {
        if (engine->leader.links[i].open) {
            HR_TRY(hr_buffer_append(&engine->leader.links[i].out, frames, bytes));
        }
    }
    return HORO_OK;
}

/* Records (framed) at the end of log_out from `mark` on also go to the child hosts. */
int hr_leader_hand_down(struct hr_engine *engine, size_t mark) {
    const uint8_t *front = hr_buffer_front(&engine->leader.log_out);
    const size_t bytes = hr_buffer_size(&engine->leader.log_out) - mark;
    return bytes == 0 ? HORO_OK : send_to_children(engine, front + mark, bytes);
}

/* Behind the LEAVE record nothing is agreed on. */
static int may_collect(const struct hr_engine *engine) {
    return hr_agree_is_complete(&engine->leader.agree) && !(engine->is_root && engine->leader.log_closed);
}

int hr_leader_collect(struct hr_engine *engine) {
    if (!may_collect(engine)) {
        return 0;
    }
    uint32_t frames = 0;
    if (!engine->is_root) {
        HR_TRY(hr_agree_collect(&engine->leader.agree, &engine->leader.links[0].out, &frames));
        return 1;
    }
    const size_t mark = hr_buffer_size(&engine->leader.log_out);
    HR_TRY(hr_agree_collect(&engine->leader.agree, &engine->leader.log_out, &frames));
    HR_TRY(hr_leader_hand_down(engine, mark));
    return 1;
}

/*
 * Whether the log is all executed here, or nearly: between hosts a record takes a while to get down, so the next one is on its way
 * while the last bytes of the batch before it are.
 */
static int log_runs_out(const struct hr_engine *engine) {
    const uint64_t written = atomic_load_explicit(&engine->node->arena.header->log.written, memory_order_relaxed); /* by me */
    const uint64_t left = written - engine->executor.log_executed;
    return hr_buffer_size(&engine->leader.log_out) == 0 &&
           (left == 0 || (engine->team->host_count > 1 && left == engine->executor.record_bytes && hr_engine_is_ending_batch(engine)));
}

/* The log is the clock: the next batch is formed when the last one has run, of what became ready meanwhile. */
static int may_form_batch(const struct hr_engine *engine, int64_t *due_ns) {
    *due_ns = 0;
    if (!engine->is_root || engine->leader.log_closed || !hr_agree_is_ready(&engine->leader.agree) || !log_runs_out(engine)) {
        return 0;
    }
    if (engine->leader.cycle_ns == 0) {
        return 1;
    }
    uint64_t bytes;
    const int64_t since_ns = hr_agree_ready_since(&engine->leader.agree, &bytes);
    if (bytes >= engine->leader.agree.config.fusion_bytes || hr_now_ns() - since_ns >= engine->leader.cycle_ns) {
        return 1;
    }
    *due_ns = since_ns + engine->leader.cycle_ns;
    return 0;
}

/* One batch, or all that is ready. */
static int write_batches(struct hr_engine *engine, int all) {
    uint32_t frames = 0;
    do {
        const size_t mark = hr_buffer_size(&engine->leader.log_out);
        HR_TRY(hr_agree_form_batch(&engine->leader.agree, &engine->leader.log_out, &frames));
        HR_TRY(hr_leader_hand_down(engine, mark));
    } while (frames > 0 && all);
    return HORO_OK;
}

static int may_close(const struct hr_engine *engine) {
    return engine->is_root && engine->leader.leaver != 0 && !engine->leader.log_closed;
}

void hr_leader_close_log(struct hr_engine *engine) {
    struct hr_arena_header *header = engine->node->arena.header;
    const uint64_t written = atomic_load_explicit(&header->log.written, memory_order_relaxed); /* by me */
    atomic_store(&header->leave_at, written + hr_buffer_size(&engine->leader.log_out) + 1);
    engine->leader.log_closed = 1;
}

/* What all have announced before the leaver asked still runs; the LEAVE record follows it, and nothing follows that. */
static int close_log(struct hr_engine *engine) {
    HR_TRY(write_batches(engine, 1));
    const size_t begin = hr_buffer_size(&engine->leader.log_out);
    size_t mark;
    hr_leader_close_log(engine);
    HR_TRY(hr_frame_begin(&engine->leader.log_out, &mark));
    HR_TRY(hr_wire_put_leave(&engine->leader.log_out, engine->leader.leaver - 1));
    hr_frame_end(&engine->leader.log_out, mark);
    return hr_leader_hand_down(engine, begin);
}

static int form_batches(struct hr_engine *engine) {
    int64_t due_ns;
    if (may_close(engine)) {
        HR_TRY(close_log(engine));
        return 1;
    }
    if (!may_form_batch(engine, &due_ns)) {
        return 0;
    }
    HR_TRY(write_batches(engine, engine->team->host_count > 1)); /* between hosts what is ready goes at once */
    return 1;
}

static uint64_t slowest_reader(const struct hr_engine *engine) {
    const struct hr_arena *arena = &engine->node->arena;
    uint64_t slowest = engine->executor.log_position;
    for (int i = 1; i < arena->local_size; i++) {
        const uint64_t read = atomic_load(&arena->blocks[i].log_read); /* partner: hr_engine_execute */
        if (read < slowest && atomic_load(&arena->blocks[i].state) != HR_MEMBER_LEFT) {
            slowest = read;
        }
    }
    return slowest;
}

static int flush_log(struct hr_engine *engine) {
    struct hr_buffer *out = &engine->leader.log_out;
    if (hr_buffer_size(out) == 0) {
        return 0;
    }
    struct hr_arena *arena = &engine->node->arena;
    atomic_store(&arena->header->log_wants_room, 1); /* before looking for room: a reader that makes some wakes us */
    const size_t written = hr_ring_write(&arena->header->log, arena->log_ring, HR_LOG_RING_BYTES, slowest_reader(engine),
                                         hr_buffer_front(out), hr_buffer_size(out));
    hr_buffer_consume(out, written);
    if (hr_buffer_size(out) == 0) {
        atomic_store(&arena->header->log_wants_room, 0);
    }
    if (written > 0) {
        hr_node_wake_all(engine->node);
    }
    return written > 0;
}

/* ---- The step ---- */

int hr_engine_lead(struct hr_engine *engine) {
    static int (*const parts[])(struct hr_engine *) = {collect_local, hr_leader_progress_links, hr_leader_collect, form_batches, flush_log};
    int moved = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        const int status = parts[i](engine);
        if (status < 0) {
            return status;
        }
        moved |= status;
    }
    if (moved && engine->leader.link_count > 0) {
        const int status = hr_leader_progress_links(engine); /* what was just written starts travelling now */
        return status < 0 ? status : 1;
    }
    return moved;
}

int hr_engine_has_lead_work(struct hr_engine *engine) {
    const struct hr_arena *arena = &engine->node->arena;
    int64_t due_ns;
    if (atomic_load(&arena->header->announced) != engine->leader.announced_seen || may_collect(engine) ||
        may_close(engine) || may_form_batch(engine, &due_ns)) {
        return 1;
    }
    if (hr_buffer_size(&engine->leader.log_out) > 0 &&
        atomic_load(&arena->header->log.written) - slowest_reader(engine) < HR_LOG_RING_BYTES) {
        return 1;
    }
    return hr_leader_has_messages(engine);
}

int64_t hr_engine_batch_due_ns(struct hr_engine *engine) {
    int64_t due_ns;
    (void)may_form_batch(engine, &due_ns);
    return due_ns;
}
