#include "engine/lead/leader.h"

#include <stdlib.h>
#include <string.h>

#include "wire/frame.h"

static int init_agreement(struct hr_leader *leader, uint64_t fusion_bytes) {
    const struct hr_team *team = leader->team;
    struct hr_node *node = team->node;
    const int members = team->local_size + leader->link_count - leader->has_parent;
    leader->request_in = calloc((size_t)team->local_size, sizeof *leader->request_in);
    leader->member_ranks = calloc(2 * (size_t)members + (size_t)node->size, sizeof *leader->member_ranks);
    if (leader->request_in == NULL || leader->member_ranks == NULL) {
        return HORO_ERR_RESOURCE;
    }
    int *rank_of_member = leader->member_ranks;
    int *ranks_of_member = rank_of_member + members;
    int *member_of_rank = ranks_of_member + members;
    for (int rank = 0; rank < node->size; rank++) {
        member_of_rank[rank] = -1;
    }
    for (int i = 0; i < team->local_size; i++) {
        rank_of_member[i] = team->job_rank[team->rank_of_local[i]];
        ranks_of_member[i] = 1;
        member_of_rank[rank_of_member[i]] = i;
    }
    for (int i = team->local_size; i < members; i++) {
        /* a host and all those below it in the tree, which are the ones up to the next of its parent's (node/team.h) */
        const struct hr_link *link = hr_leader_link_of(leader, i);
        const int end = link->host + (link->host & -link->host);
        rank_of_member[i] = link->leader_rank;
        for (int rank = 0; rank < team->size; rank++) {
            if (team->host_of_rank[rank] >= link->host && team->host_of_rank[rank] < end) {
                member_of_rank[team->job_rank[rank]] = i;
                ranks_of_member[i]++;
            }
        }
    }
    leader->carry.members = members;
    const struct hr_agree_config config = {
        .is_root = leader->is_root, .member_count = members, .team_size = team->size, .rank_count = node->size,
        .rank_of_member = rank_of_member, .ranks_of_member = ranks_of_member, .member_of_rank = member_of_rank,
        .host_name_of_rank = (const char *const *)node->host_name_of_rank,
        .capacity = leader->announcer->capacity, .fusion_bytes = fusion_bytes,
        .recorder = leader->is_root ? &node->recorder : NULL, .team_number = team->number,
    };
    return hr_agree_init(&leader->agree, &config);
}

int hr_leader_init(struct hr_leader *leader, const struct hr_leader_setup *setup, struct hr_announcer *announcer,
                   struct hr_round *round, struct hr_lane *lane, struct hr_error *error) {
    *leader = (struct hr_leader){
        .team = announcer->team, .announcer = announcer, .round = round, .lane = lane,
        .drive = setup->drive, .handlers = setup->handlers, .cycle_ns = setup->cycle_ns,
        .is_root = announcer->team->rank == 0, .batch_due_ns = HR_NEVER,
    };
    HR_TRY(hr_leader_open_links(leader, error));
    const int status = init_agreement(leader, setup->fusion_bytes);
    return status == HORO_OK ? HORO_OK : hr_fail(error, status, "out of memory for the agreement");
}

void hr_leader_fini(struct hr_leader *leader) {
    for (int i = 0; i < leader->link_count; i++) {
        struct hr_link *link = &leader->links[i];
        hr_buffer_fini(&link->in);
        hr_buffer_fini(&link->out);
        hr_buffer_fini(&link->sending);
        free(link->received);
    }
    free(leader->links);
    for (int i = 0; leader->request_in != NULL && i < leader->team->local_size; i++) {
        hr_buffer_fini(&leader->request_in[i]);
    }
    free(leader->request_in);
    free(leader->member_ranks);
    hr_buffer_fini(&leader->log_out);
    hr_buffer_fini(&leader->leave_record);
    free((void *)leader->carry.contributions);
    hr_agree_fini(&leader->agree);
}

/* ---- What comes in ---- */

static int announce_frames(struct hr_leader *leader, struct hr_buffer *in, int member, int64_t now_ns) {
    struct hr_wire_message message;
    size_t bytes;
    int status;
    while ((status = hr_frame_peek(in, &message, &bytes)) == HORO_OK) {
        HR_TRY(hr_leader_announce(leader, member, &message, now_ns));
        hr_buffer_consume(in, bytes);
    }
    return status < 0 ? status : HORO_OK;
}

static int collect_own(struct hr_leader *leader) {
    struct hr_announcer *announcer = leader->announcer;
    if (hr_announcer_is_idle(announcer)) {
        return HR_STILL;
    }
    HR_TRY(hr_announcer_write_ids(announcer));
    HR_TRY(announce_frames(leader, &announcer->out, 0, hr_now_ns()));
    return HR_MOVED;
}

int hr_leader_collect(struct hr_leader *leader) {
    const struct hr_team *team = leader->team;
    const struct hr_partition *partition = &team->partition;
    const int owned = collect_own(leader);
    HR_TRY(owned);
    /* before looking at the others here: what comes later counts anew */
    const uint64_t announced = atomic_load(&partition->header->announced);
    const int is_new = announced != leader->announced_seen;
    const int64_t now_ns = is_new ? hr_now_ns() : 0;
    leader->announced_seen = announced;
    for (int i = 1; is_new && i < team->local_size; i++) {
        const int index = team->index_of_local[i];
        struct hr_partition_block *block = &partition->blocks[index];
        struct hr_buffer *in = &leader->request_in[i];
        uint64_t read = atomic_load_explicit(&block->requests_read, memory_order_relaxed); /* ours alone */
        const size_t available = (size_t)(atomic_load(&block->requests.written) - read);
        if (available == 0) {
            continue;
        }
        HR_TRY(hr_buffer_reserve(in, available));
        in->end += hr_ring_read(&block->requests, hr_partition_request_ring(partition, index), HR_REQUEST_RING_BYTES,
                                &read, in->data + in->end, available);
        atomic_store(&block->requests_read, read); /* partner: hr_announcer_flush */
        if (atomic_load(&block->wants_room) != 0) {
            atomic_store(&block->wants_room, 0);
            hr_node_wake(team->node, index);
        }
        HR_TRY(announce_frames(leader, in, i, now_ns));
    }
    const int linked = leader->link_count > 0 ? hr_leader_progress_links(leader, 0) : HR_STILL;
    return linked < 0 ? linked : owned | linked | (is_new ? HR_MOVED : HR_STILL);
}

/* ---- What goes out ---- */

int hr_leader_tell_up(struct hr_leader *leader, const struct hr_wire_message *message) {
    if (!leader->is_root) {
        return hr_frame_put(&leader->links[0].out, message);
    }
    const size_t mark = hr_buffer_size(&leader->log_out);
    HR_TRY(leader->log_closed ? HORO_OK : hr_frame_put(&leader->log_out, message));
    return hr_leader_hand_down(leader, mark);
}

void hr_leader_make_due(struct hr_leader *leader, const uint64_t *values, int is_final) {
    memcpy(leader->tuning, values, sizeof leader->tuning);
    leader->is_tuning_final = is_final;
    atomic_store(&leader->is_tuning_due, 1);
}

/* One batch, or all that is ready. */
static int write_batches(struct hr_leader *leader, int all) {
    do {
        const size_t mark = hr_buffer_size(&leader->log_out);
        const int carried = hr_leader_put_carried(leader, &leader->log_out);
        HR_TRY(carried);
        HR_TRY(carried == HR_MOVED ? HORO_OK : hr_agree_form_batch(&leader->agree, &leader->log_out));
        HR_TRY(hr_leader_hand_down(leader, mark));
    } while (all && hr_agree_is_ready(&leader->agree));
    return HORO_OK;
}

/* The log is the clock: the next batch is formed when the last one has run, of what became ready meanwhile. */
static int form_batches(struct hr_leader *leader, uint64_t place) {
    const struct hr_buffer *leave = &leader->leave_record;
    const struct hr_agree *agree = &leader->agree;
    leader->batch_due_ns = HR_NEVER;
    if (hr_buffer_size(leave) > 0 && !leader->log_closed) {
        /* it stands behind what all have announced before the leaver asked, which still runs */
        HR_TRY(write_batches(leader, 1));
        hr_leader_close_log(leader);
        const size_t mark = hr_buffer_size(&leader->log_out);
        HR_TRY(hr_buffer_append(&leader->log_out, hr_buffer_front(leave), hr_buffer_size(leave)));
        HR_TRY(hr_leader_hand_down(leader, mark));
        return HR_MOVED;
    }
    if (!leader->is_root || leader->log_closed || !hr_agree_is_ready(agree) || hr_buffer_size(&leader->log_out) > 0) {
        return HR_STILL;
    }
    /* by me */
    const uint64_t written = atomic_load_explicit(&leader->team->partition.header->log.written, memory_order_relaxed);
    if (written + leader->round->rounds != place) {
        return HR_STILL;
    }
    const int64_t due_ns = leader->cycle_ns == 0 ? 0 : hr_agree_since(agree, HR_AGREE_READY) + leader->cycle_ns;
    if (due_ns != 0 && agree->ready_bytes < agree->config.fusion_bytes && hr_now_ns() < due_ns) {
        leader->batch_due_ns = due_ns;
        return HR_STILL;
    }
    if (leader->is_tuning_due) {
        uint8_t items[sizeof leader->tuning];
        uint8_t *at = items;
        hr_drive_lock(leader->drive);
        for (int i = 0; i < HORO_KNOB_COUNT; i++) {
            at = hr_store_u64(at, leader->tuning[i]);
        }
        const struct hr_wire_message tune = {
            .type = HR_WIRE_TUNE, .is_final = leader->is_tuning_final, .count = HORO_KNOB_COUNT, .items = items};
        atomic_store(&leader->is_tuning_due, 0);
        hr_drive_unlock(leader->drive);
        HR_TRY(hr_leader_tell_up(leader, &tune));
    }
    HR_TRY(write_batches(leader, leader->team->host_count > 1)); /* between hosts what is ready goes at once */
    return HR_MOVED;
}

int hr_leader_is_idle(const struct hr_leader *leader) {
    return leader->agree.active == 0 && hr_buffer_size(&leader->log_out) == 0 && leader->leaver == 0 &&
           !leader->log_closed && !leader->is_tuning_due;
}

static int flush_log(struct hr_leader *leader) {
    struct hr_buffer *out = &leader->log_out;
    if (hr_buffer_size(out) == 0) {
        return HR_STILL;
    }
    const struct hr_team *team = leader->team;
    const struct hr_partition *partition = &team->partition;
    uint64_t slowest = UINT64_MAX;
    /* before looking for room: a reader that makes some wakes us */
    atomic_store(&partition->header->log_wants_room, 1);
    for (int i = 0; i < team->local_size; i++) {
        const int index = team->index_of_local[i];
        const uint64_t read = atomic_load(&partition->blocks[index].log_read); /* partner: execute_next */
        if (read < slowest && atomic_load(&team->node->arena.blocks[index].state) != HR_MEMBER_LEFT) {
            slowest = read;
        }
    }
    const size_t written = hr_ring_write(&partition->header->log, partition->log_ring, HR_LOG_RING_BYTES, slowest,
                                         hr_buffer_front(out), hr_buffer_size(out));
    hr_buffer_consume(out, written);
    if (hr_buffer_size(out) == 0) {
        atomic_store(&partition->header->log_wants_room, 0);
    }
    if (written == 0) {
        return HR_STILL;
    }
    if (hr_leader_is_idle(leader)) {
        hr_round_reopen(leader->round);
    }
    hr_team_wake_all(team);
    return HR_MOVED;
}

int hr_leader_agree(struct hr_leader *leader, uint64_t place) {
    HR_TRY(collect_own(leader)); /* the request of a round that has been closed */
    const int had_news = leader->has_news;
    const int reported = hr_leader_report(leader);
    HR_TRY(reported);
    const int formed = form_batches(leader, place);
    HR_TRY(formed);
    const int flushed = flush_log(leader);
    HR_TRY(flushed);
    const int moved = reported | formed | flushed;
    if (HR_CHECK_QUIET && !had_news && moved != HR_STILL) {
        __builtin_trap(); /* it would have been missed */
    }
    /* tensors that are ready wait for the log or for their time, and records for room in it: none of it is news */
    leader->has_news = moved || hr_agree_is_ready(&leader->agree) || hr_buffer_size(&leader->log_out) > 0;
    if (leader->link_count == 0 || (!moved && !hr_leader_sends_left(leader))) {
        return moved;
    }
    /* before this rank executes it, and before a caller that then has what it waits for stops driving */
    const int sent = hr_leader_progress_links(leader, 0);
    if (sent >= 0 && hr_leader_sends_left(leader)) {
        struct hr_transport *transport = leader->team->transport;
        (void)transport->ops->progress(transport);
    }
    return sent < 0 ? sent : moved | sent;
}
