/*
 * The leader's further work for its host: it collects what its ranks and child hosts announce, agrees (the root) or
 * reports (the others), hands the records of the log down, and tells neighbours of an abort.
 */
#include <stdlib.h>

#include "engine/engine.h"
#include "wire/frame.h"

/* Sanitizers and the stress program take every turn that would be spared, and end the process if one moves. */
#ifndef HR_CHECK_QUIET
#define HR_CHECK_QUIET 0
#endif

/* higher: more hits where names are many times the capacity; lower: new names are cached sooner */
enum { EVICT_AFTER_CAPACITIES = 16 };

int hr_lane_announce_own(struct hr_lane *lane, const struct hr_request *request, uint32_t id) {
    lane->leader.has_news = 1;
    if (id != 0) {
        return hr_agree_announce_id(&lane->leader.agree, 0, id, request->rows, request->submit_ns);
    }
    struct hr_wire_message message = {.type = HR_WIRE_REQUEST,
                                      .rank = lane->node->rank,
                                      .status = request->refused,
                                      .text = hr_request_reason(request),
                                      .rows = request->rows};
    HR_TRY(hr_wire_decode_request(request->bytes, request->byte_count, &message.request));
    return hr_agree_announce_request(&lane->leader.agree, 0, &message, request->submit_ns);
}

/* On a host and all those below it in the tree, which are the ones up to the next of its parent's (node/linked.h). */
static int ranks_below(struct hr_lane *lane, int host, int member) {
    const struct hr_team *team = lane->team;
    const int end = host + (host & -host);
    int count = 0;
    for (int rank = 0; rank < team->size; rank++) {
        if (team->host_of_rank[rank] >= host && team->host_of_rank[rank] < end) {
            lane->leader.member_of_rank[team->job_rank[rank]] = member;
            count++;
        }
    }
    return count;
}

static int init_agreement(struct hr_lane *lane, uint64_t fusion_bytes) {
    struct hr_node *node = lane->node;
    const struct hr_team *team = lane->team;
    const int children = lane->leader.link_count - lane->leader.has_parent;
    const int members = team->local_size + children;
    lane->leader.member_ranks = calloc((size_t)members, sizeof *lane->leader.member_ranks);
    lane->leader.ranks_of_member = calloc((size_t)members, sizeof *lane->leader.ranks_of_member);
    lane->leader.request_in = calloc((size_t)team->local_size, sizeof *lane->leader.request_in);
    if (lane->leader.member_ranks == NULL || lane->leader.ranks_of_member == NULL || lane->leader.request_in == NULL) {
        return HORO_ERR_RESOURCE;
    }
    lane->leader.member_of_rank = malloc((size_t)node->size * sizeof *lane->leader.member_of_rank);
    if (lane->leader.member_of_rank == NULL) {
        return HORO_ERR_RESOURCE;
    }
    for (int rank = 0; rank < node->size; rank++) {
        lane->leader.member_of_rank[rank] = -1;
    }
    for (int i = 0; i < members; i++) {
        if (i < team->local_size) {
            lane->leader.member_ranks[i] = team->job_rank[team->rank_of_local[i]];
            lane->leader.ranks_of_member[i] = 1;
            lane->leader.member_of_rank[lane->leader.member_ranks[i]] = i;
        } else {
            const struct hr_link *link = &lane->leader.links[lane->leader.has_parent + i - team->local_size];
            lane->leader.member_ranks[i] = link->leader_rank;
            lane->leader.ranks_of_member[i] = ranks_below(lane, link->host, i);
        }
    }
    const struct hr_agree_config config = {
        .is_root = lane->is_root,
        .member_count = members,
        .local_count = team->local_size,
        .rank_of_member = lane->leader.member_ranks,
        .ranks_of_member = lane->leader.ranks_of_member,
        .member_of_rank = lane->leader.member_of_rank,
        .host_name_of_rank = (const char *const *)node->host_name_of_rank,
        .team_size = lane->team->size,
        .rank_count = node->size,
        .capacity = lane->announcer.capacity,
        .evict_after = (uint64_t)EVICT_AFTER_CAPACITIES * lane->announcer.capacity,
        .fusion_bytes = fusion_bytes,
        .recorder = lane->is_root ? &node->recorder : NULL,
        .team_number = team->number,
    };
    return hr_agree_init(&lane->leader.agree, &config);
}

int hr_lane_init_leader(struct hr_lane *lane, uint64_t fusion_bytes, struct hr_error *error) {
    HR_TRY(hr_leader_open_links(lane, error));
    const int status = init_agreement(lane, fusion_bytes);
    return status == HORO_OK ? HORO_OK : hr_fail(error, status, "out of memory for the agreement");
}

void hr_lane_fini_leader(struct hr_lane *lane) {
    for (int i = 0; i < lane->leader.link_count; i++) {
        hr_link_close(&lane->leader.links[i]);
    }
    free(lane->leader.links);
    for (int i = 0; i < lane->team->local_size && lane->leader.request_in != NULL; i++) {
        hr_buffer_fini(&lane->leader.request_in[i]);
    }
    free(lane->leader.request_in);
    free(lane->leader.member_ranks);
    free(lane->leader.ranks_of_member);
    free(lane->leader.member_of_rank);
    hr_buffer_fini(&lane->leader.log_out);
    hr_buffer_fini(&lane->leader.joined_ranks);
    hr_buffer_fini(&lane->leader.leave_record);
    hr_carry_fini(lane);
    hr_deadlock_fini(&lane->leader.deadlock);
    hr_agree_fini(&lane->leader.agree);
}

/* ---- What comes in ---- */

static int announce_ids(struct hr_lane *lane, int member, const struct hr_wire_message *message, int64_t now_ns) {
    for (uint32_t i = 0; i < message->count; i++) {
        HR_TRY(
            hr_agree_announce_id(&lane->leader.agree, member, hr_wire_u32(message->items, i), message->rows, now_ns));
    }
    return HORO_OK;
}

int hr_leader_note_leaver(struct hr_lane *lane, int rank, int status, struct hr_wire_text words) {
    if (lane->leader.leaver != 0) {
        return HORO_OK; /* one LEAVE record closes the log for all */
    }
    lane->leader.leaver = rank + 1;
    lane->leader.has_news = 1;
    size_t mark;
    struct hr_buffer *out = &lane->leader.leave_record; /* see form_batches */
    if (!lane->is_root) {
        out = &lane->leader.links[0].out;
        HR_TRY(hr_leader_collect(lane)); /* earlier announcements travel first */
    }
    HR_TRY(hr_frame_begin(out, &mark));
    HR_TRY(hr_wire_put(
        out, &(struct hr_wire_message){.type = HR_WIRE_LEAVE, .rank = rank, .status = status, .text = words}));
    hr_frame_end(out, mark);
    return HORO_OK;
}

int hr_leader_announce(struct hr_lane *lane, int member, const struct hr_wire_message *message, int64_t now_ns) {
    lane->leader.has_news = 1;
    switch (message->type) {
    case HR_WIRE_IDS: return announce_ids(lane, member, message, now_ns);
    case HR_WIRE_DATA:
        hr_carry_add(lane, member, message->id, message->data, message->data_bytes);
        return hr_agree_announce_id(&lane->leader.agree, member, message->id, message->rows, now_ns);
    case HR_WIRE_ROWS:
        return hr_agree_announce_id(&lane->leader.agree, member, message->id, message->rows, now_ns);
    case HR_WIRE_REQUEST: return hr_agree_announce_request(&lane->leader.agree, member, message, now_ns);
    case HR_WIRE_JOINED:
        return message->rank < lane->node->size ? hr_leader_note_joined(lane, member, message, now_ns)
                                                : HORO_ERR_INTERNAL;
    case HR_WIRE_BLOCKED: return hr_leader_note_blocked(lane, message);
    case HR_WIRE_LEAVE:
        return message->rank < lane->node->size && lane->team->number == 0
                   ? hr_leader_note_leaver(lane, message->rank, message->status, message->text)
                   : HORO_ERR_INTERNAL;
    default: return HORO_ERR_INTERNAL;
    }
}

static int announce_frames(struct hr_lane *lane, struct hr_buffer *in, int member, int64_t now_ns) {
    const uint8_t *data;
    size_t bytes;
    int status;
    while ((status = hr_frame_peek(in, &data, &bytes)) == HORO_OK) {
        struct hr_wire_message message;
        HR_TRY(hr_wire_decode(data, bytes, &message));
        HR_TRY(hr_leader_announce(lane, member, &message, now_ns));
        hr_buffer_consume(in, 4 + bytes);
    }
    return status < 0 ? status : HORO_OK;
}

static int collect_requests(struct hr_lane *lane, int local_rank, int64_t now_ns) {
    const int index = lane->team->index_of_local[local_rank];
    const struct hr_partition *partition = &lane->team->partition;
    struct hr_partition_block *block = &partition->blocks[index];
    uint64_t read = atomic_load_explicit(&block->requests_read, memory_order_relaxed); /* ours alone */
    const size_t available = (size_t)(atomic_load(&block->requests.written) - read);
    if (available == 0) {
        return HORO_OK;
    }
    struct hr_buffer *in = &lane->leader.request_in[local_rank];
    HR_TRY(hr_buffer_reserve(in, available));
    in->end += hr_ring_read(&block->requests, hr_partition_request_ring(partition, index), HR_REQUEST_RING_BYTES, &read,
                            in->data + in->end, available);
    atomic_store(&block->requests_read, read); /* partner: hr_lane_flush_requests */
    if (atomic_load(&block->wants_room) != 0) {
        atomic_store(&block->wants_room, 0);
        hr_node_wake(lane->node, index);
    }
    return announce_frames(lane, in, local_rank, now_ns);
}

static int collect_local(struct hr_lane *lane) {
    /* before looking: what comes later counts anew */
    const uint64_t announced = atomic_load(&lane->team->partition.header->announced);
    if (announced == lane->leader.announced_seen) {
        return HR_STILL;
    }
    lane->leader.announced_seen = announced;
    const int64_t now_ns = hr_now_ns();
    for (int i = 1; i < lane->team->local_size; i++) {
        HR_TRY(collect_requests(lane, i, now_ns));
    }
    return HR_MOVED;
}

/* ---- What goes out ---- */

int hr_leader_send_down(struct hr_lane *lane, const void *frames, size_t bytes) {
    for (int i = lane->leader.has_parent; i < lane->leader.link_count; i++) {
        if (lane->leader.links[i].open) {
            HR_TRY(hr_buffer_append(&lane->leader.links[i].out, frames, bytes));
        }
    }
    return HORO_OK;
}

/* Records (framed) at the end of log_out from `mark` on also go to the child hosts. */
int hr_leader_hand_down(struct hr_lane *lane, size_t mark) {
    const uint8_t *front = hr_buffer_front(&lane->leader.log_out);
    const size_t bytes = hr_buffer_size(&lane->leader.log_out) - mark;
    if (bytes == 0) {
        return HORO_OK;
    }
    hr_carry_clear(lane);
    return hr_leader_send_down(lane, front + mark, bytes);
}

/* Behind the LEAVE record nothing is agreed on. */
static int may_collect(const struct hr_lane *lane) {
    return hr_agree_is_complete(&lane->leader.agree) && !(lane->is_root && lane->leader.log_closed);
}

/* Reports to the parent. */
static int report(struct hr_lane *lane) {
    struct hr_buffer *out = &lane->leader.links[0].out;
    uint32_t frames = 0;
    return hr_carry_is_all(lane) ? hr_carry_write(lane, out) : hr_agree_collect(&lane->leader.agree, out, &frames);
}

int hr_leader_collect(struct hr_lane *lane) {
    if (!may_collect(lane)) {
        return HR_STILL;
    }
    if (!lane->is_root) {
        HR_TRY(report(lane));
        return HR_MOVED;
    }
    uint32_t frames = 0;
    const size_t mark = hr_buffer_size(&lane->leader.log_out);
    HR_TRY(hr_agree_collect(&lane->leader.agree, &lane->leader.log_out, &frames));
    HR_TRY(hr_leader_hand_down(lane, mark));
    return HR_MOVED;
}

/*
 * Whether the log is all executed here, or nearly: between hosts a record takes a while to get down, so the next one is
 * on its way while the last bytes of the batch before it are.
 */
static int log_runs_out(const struct hr_lane *lane) {
    /* by me */
    const uint64_t written = atomic_load_explicit(&lane->team->partition.header->log.written, memory_order_relaxed);
    const uint64_t left = written + lane->lone.rounds - hr_lane_place(lane);
    return hr_buffer_size(&lane->leader.log_out) == 0 &&
           (left == 0 ||
            (lane->team->host_count > 1 && left == lane->executor.record_bytes && hr_lane_is_ending_batch(lane)));
}

/* The log is the clock: the next batch is formed when the last one has run, of what became ready meanwhile. */
static int may_form_batch(struct hr_lane *lane) {
    lane->leader.batch_due_ns = HR_NEVER;
    if (!lane->is_root || lane->leader.log_closed || !hr_agree_is_ready(&lane->leader.agree) || !log_runs_out(lane)) {
        return 0;
    }
    if (lane->leader.cycle_ns == 0) {
        return 1;
    }
    uint64_t bytes;
    const int64_t since_ns = hr_agree_ready_since(&lane->leader.agree, &bytes);
    if (bytes >= lane->leader.agree.config.fusion_bytes || hr_now_ns() - since_ns >= lane->leader.cycle_ns) {
        return 1;
    }
    lane->leader.batch_due_ns = since_ns + lane->leader.cycle_ns;
    hr_part_expect(&lane->part, lane->leader.batch_due_ns);
    return 0;
}

/* One batch, or all that is ready. */
static int write_batches(struct hr_lane *lane, int all) {
    uint32_t frames = 0;
    do {
        const size_t mark = hr_buffer_size(&lane->leader.log_out);
        if (hr_carry_is_all(lane)) {
            HR_TRY(hr_carry_write(lane, &lane->leader.log_out));
            return hr_leader_hand_down(lane, mark);
        }
        HR_TRY(hr_agree_form_batch(&lane->leader.agree, &lane->leader.log_out, &frames));
        HR_TRY(hr_leader_hand_down(lane, mark));
    } while (frames > 0 && all);
    return HORO_OK;
}

static int may_close(const struct hr_lane *lane) {
    return lane->is_root && lane->leader.leaver != 0 && !lane->leader.log_closed;
}

void hr_leader_close_log(struct hr_lane *lane) {
    /* by me */
    const uint64_t written = atomic_load_explicit(&lane->team->partition.header->log.written, memory_order_relaxed);
    atomic_store(&lane->node->arena.header->leave_at,
                 written + hr_buffer_size(&lane->leader.log_out) + lane->lone.rounds + 1);
    lane->leader.log_closed = 1;
}

/* Closes the log with the LEAVE record, behind what all have announced before the leaver asked, which still runs. */
static int close_log(struct hr_lane *lane) {
    HR_TRY(write_batches(lane, 1));
    const struct hr_buffer *record = &lane->leader.leave_record;
    const size_t begin = hr_buffer_size(&lane->leader.log_out);
    hr_leader_close_log(lane);
    HR_TRY(hr_buffer_append(&lane->leader.log_out, hr_buffer_front(record), hr_buffer_size(record)));
    return hr_leader_hand_down(lane, begin);
}

static int form_batches(struct hr_lane *lane) {
    if (hr_leader_may_tell_joined(lane)) {
        return hr_leader_tell_joined(lane);
    }
    if (may_close(lane)) {
        HR_TRY(close_log(lane));
        return HR_MOVED;
    }
    if (!may_form_batch(lane)) {
        return HR_STILL;
    }
    HR_TRY(lane->leader.tuning.is_due ? hr_leader_write_tuning(lane) : HORO_OK);
    HR_TRY(write_batches(lane, lane->team->host_count > 1)); /* between hosts what is ready goes at once */
    return HR_MOVED;
}

static uint64_t slowest_reader(const struct hr_lane *lane) {
    const struct hr_team *team = lane->team;
    uint64_t slowest = lane->executor.log_position;
    for (int i = 1; i < team->local_size; i++) {
        const int index = team->index_of_local[i];
        const uint64_t read = atomic_load(&team->partition.blocks[index].log_read); /* partner: take_log */
        if (read < slowest && atomic_load(&lane->node->arena.blocks[index].state) != HR_MEMBER_LEFT) {
            slowest = read;
        }
    }
    return slowest;
}

static int flush_log(struct hr_lane *lane) {
    struct hr_buffer *out = &lane->leader.log_out;
    if (hr_buffer_size(out) == 0) {
        return HR_STILL;
    }
    const struct hr_partition *partition = &lane->team->partition;
    /* before looking for room: a reader that makes some wakes us */
    atomic_store(&partition->header->log_wants_room, 1);
    const size_t written = hr_ring_write(&partition->header->log, partition->log_ring, HR_LOG_RING_BYTES,
                                         slowest_reader(lane), hr_buffer_front(out), hr_buffer_size(out));
    hr_buffer_consume(out, written);
    if (hr_buffer_size(out) == 0) {
        atomic_store(&partition->header->log_wants_room, 0);
    }
    if (written > 0) {
        if (hr_buffer_size(out) == 0) {
            hr_lone_reopen(lane);
        }
        hr_team_wake_all(lane->team);
    }
    return written > 0 ? HR_MOVED : HR_STILL;
}

/* ---- The step ---- */

/* A batch that all have counted themselves in for comes before any record: 1, or 0 where it is to be executed first. */
static int close_lone(struct hr_lane *lane) {
    const int agrees = lane->leader.agree.active > 0 || may_collect(lane) || hr_leader_may_tell_joined(lane) ||
                       may_close(lane);
    return agrees && lane->team->host_count == 1 ? hr_lone_close(lane) : 1;
}

/* Agrees on what has been announced, forms batches, and writes the log. HR_STILL, HR_MOVED or a status. */
static int agree_and_write(struct hr_lane *lane) {
    struct hr_leader *leader = &lane->leader;
    const int may_agree = close_lone(lane);
    if (may_agree <= 0) {
        return may_agree;
    }
    const int collected = hr_leader_collect(lane);
    HR_TRY(collected);
    const int formed = form_batches(lane);
    HR_TRY(formed);
    const int flushed = flush_log(lane);
    HR_TRY(flushed);
    const int moved = collected | formed | flushed;
    /* tensors that are ready wait for the log or for their time, and records for room in it: none of it is news */
    leader->has_news = moved || hr_agree_is_ready(&leader->agree) || hr_buffer_size(&leader->log_out) > 0;
    return moved;
}

/*
 * Without news this moves nothing, and is spared. Whatever could let it move sets has_news; a turn before a sleep does
 * not rely on that.
 */
static int agree_on_news(struct hr_lane *lane) {
    const int has_news = lane->leader.has_news;
    if (!has_news && !lane->node->looks_at_all && !HR_CHECK_QUIET) {
        return HR_STILL;
    }
    const int moved = agree_and_write(lane);
    if (HR_CHECK_QUIET && !has_news && moved != HR_STILL) {
        __builtin_trap(); /* it would have been missed */
    }
    return moved;
}

/*
 * Sends what was just written, before this rank executes it, and before a caller that then has what it waits for stops
 * driving.
 */
static int send_at_once(struct hr_lane *lane) {
    HR_TRY(hr_leader_progress_links(lane));
    if (hr_leader_sends_left(lane)) {
        struct hr_transport *transport = lane->team->transport;
        (void)transport->ops->progress(transport);
    }
    return HR_MOVED;
}

int hr_lane_lead(struct hr_lane *lane) {
    const int collected = collect_local(lane);
    HR_TRY(collected);
    const int linked = lane->leader.link_count > 0 ? hr_leader_progress_links(lane) : HR_STILL;
    HR_TRY(linked);
    const int agreed = agree_on_news(lane);
    HR_TRY(agreed);
    const int moved = collected | linked | agreed;
    return moved && lane->leader.link_count > 0 ? send_at_once(lane) : moved;
}
