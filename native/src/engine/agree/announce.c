/* The agreement's way in: who has announced which tensor, and whether they mean the same. */
#include <string.h>

#include "base/op.h"
#include "engine/agree/private.h"

/* For the coordinator's timeline. */
static void note_announced(const struct hr_agree *agree, const struct hr_agree_entry *entry, int member) {
    hr_recorder_add(agree->config.recorder, &(struct hr_event){
                                                .event = HR_EVENT_ANNOUNCED,
                                                .op = -1,
                                                .team = agree->config.team_number,
                                                .number = (int32_t)entry->name_hash,
                                                .bytes = agree->config.rank_of_member[member],
                                            });
}

/* Counts the member in; 0 if it had announced already (a repetition after an eviction). */
static int count_in(struct hr_agree *agree, struct hr_agree_entry *entry, int member, int by_id, int64_t now_ns) {
    if (hr_agree_has(entry->announced, member)) {
        return 0;
    }
    if (entry->state == HR_AGREE_IDLE) {
        entry->first_ns = now_ns;
        hr_agree_move(agree, entry, HR_AGREE_WAITING);
        agree->active++;
        hr_agree_count_absent(agree, entry);
    }
    entry->announced[member / 64] |= 1ull << (member % 64);
    if (by_id) {
        entry->by_id[member / 64] |= 1ull << (member % 64);
    }
    entry->announced_count++;
    if (agree->config.recorder != NULL && hr_recorder_is_traced(agree->config.recorder)) {
        note_announced(agree, entry, member);
    }
    return 1;
}

static int note_mismatch(struct hr_agree *agree, struct hr_agree_entry *entry, const struct hr_agree_copy *one,
                         const struct hr_agree_copy *two) {
    char text[HORO_MESSAGE_MAX];
    if (entry->failure != 0) {
        return HORO_OK; /* perhaps a call that was refused, which has no form to be compared */
    }
    hr_agree_mismatch_text(&agree->config, one, two, text, sizeof text);
    return hr_agree_set_failure(entry, HORO_ERR_MISMATCH, text, strlen(text));
}

int hr_agree_announce_id(struct hr_agree *agree, int member, uint32_t id, struct hr_wire_rows rows, int64_t now_ns) {
    struct hr_agree_entry *entry = hr_agree_find_id(agree, id);
    if (entry == NULL || !count_in(agree, entry, member, 1, now_ns)) {
        return HORO_OK; /* stale */
    }
    entry->is_awaited = 1;
    HR_TRY(hr_agree_note_rows(agree, entry, member, entry->known.gathers, rows));
    const int rank = agree->config.rank_of_member[member];
    if (entry->id_rank < 0) {
        entry->id_rank = rank;
    }
    /* Somebody sent a changed request in full; this rank still means what the id stands for. */
    if (entry->current.bytes != NULL && (entry->current.count != entry->known.count ||
                                         memcmp(entry->current.bytes, entry->known.bytes, entry->known.count) != 0)) {
        const struct hr_agree_copy mine = {entry->known.bytes, entry->known.count, rank, entry->known.gathers};
        HR_TRY(note_mismatch(agree, entry, &entry->current, &mine));
    }
    return hr_agree_complete_if_all(agree, entry);
}

/* Compares a full request with what this round has so far and keeps the first one. */
static int compare_in(struct hr_agree *agree, struct hr_agree_entry *entry, const struct hr_agree_copy *request) {
    const struct hr_agree_copy *other = NULL;
    struct hr_agree_copy by_id = entry->known;
    if (entry->current.bytes != NULL) {
        other = &entry->current;
    } else if (entry->id_rank >= 0) {
        by_id.rank = entry->id_rank;
        other = &by_id;
    }
    if (other != NULL &&
        (other->count != request->count || memcmp(other->bytes, request->bytes, request->count) != 0)) {
        HR_TRY(note_mismatch(agree, entry, other, request));
    }
    return entry->current.bytes == NULL ? hr_agree_keep(entry, request) : HORO_OK;
}

int hr_agree_announce_request(struct hr_agree *agree, int member, const struct hr_wire_message *message,
                              int64_t now_ns) {
    if (message->type != HR_WIRE_REQUEST || message->rank < 0 || message->rank >= agree->config.rank_count) {
        return HORO_ERR_INTERNAL;
    }
    struct hr_agree_entry *entry = hr_agree_find_or_create(agree, message->request.name);
    if (entry == NULL) {
        return HORO_ERR_RESOURCE;
    }
    if (!count_in(agree, entry, member, 0, now_ns)) {
        return HORO_OK;
    }
    entry->is_awaited |= message->status == HORO_OK || message->request.op != HORO_BARRIER;
    const uint64_t gathers = hr_agree_rows_told(agree, &message->request);
    const struct hr_agree_copy request = {(uint8_t *)(uintptr_t)message->request.bytes, message->request.byte_count,
                                          message->rank, gathers};
    HR_TRY(hr_agree_note_rows(agree, entry, member, message->status == HORO_OK ? gathers : 0, message->rows));
    if (message->status != HORO_OK) {
        HR_TRY(hr_agree_set_failure(entry, message->status, message->text.data, message->text.bytes));
    }
    HR_TRY(compare_in(agree, entry, &request));
    if (hr_op_is_last(message->request.op)) {
        HR_TRY(hr_agree_begin_absence(agree, entry));
    }
    return hr_agree_complete_if_all(agree, entry);
}

int hr_agree_list_waiting(const struct hr_agree *agree, int64_t now_ns, int64_t age_ns, struct hr_agree_waiting *out,
                          int capacity) {
    int count = 0;
    for (int is_awaited = 1; is_awaited >= 0; is_awaited--) {
        for (const struct hr_agree_entry *entry = agree->lists[HR_AGREE_WAITING].first; entry != NULL;
             entry = entry->next) {
            if (entry->is_awaited != is_awaited || now_ns - entry->first_ns < age_ns) {
                continue;
            }
            if (count < capacity) {
                out[count] = (struct hr_agree_waiting){.name = entry->name,
                                                       .since_ns = entry->first_ns,
                                                       .is_awaited = is_awaited,
                                                       .announced = entry->announced};
            }
            count++;
        }
    }
    return count;
}

int64_t hr_agree_waiting_since(const struct hr_agree *agree) {
    const struct hr_agree_entry *first = agree->lists[HR_AGREE_WAITING].first;
    return first == NULL ? 0 : first->first_ns;
}
