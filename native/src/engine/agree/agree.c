#include <string.h>

#include "base/traits.h"
#include "engine/agree/private.h"
#include "wire/frame.h"

/* ---- The way in: who has announced which tensor, and whether they mean the same ---- */

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
        hr_recorder_add(agree->config.recorder, &(struct hr_event){
            .event = HR_EVENT_ANNOUNCED, .op = -1, .team = agree->config.team_number,
            .number = (int32_t)entry->name_hash, .bytes = agree->config.rank_of_member[member]});
    }
    return 1;
}

/* Compares what a member means with what this round has so far. */
static int compare_in(struct hr_agree *agree, struct hr_agree_entry *entry, const struct hr_agree_copy *request) {
    struct hr_agree_copy other = entry->current;
    if (other.bytes == NULL) {
        other = entry->known;
        other.rank = entry->id_rank;
    }
    const int is_first = other.bytes == NULL || other.rank < 0;
    if (is_first || other.bytes == request->bytes ||
        (other.count == request->count && memcmp(other.bytes, request->bytes, other.count) == 0) ||
        entry->failure != 0) { /* perhaps a call that was refused, which has no form to be compared */
        return HORO_OK;
    }
    char text[HORO_MESSAGE_MAX];
    hr_agree_mismatch_text(&agree->config, entry, &other, request, text, sizeof text);
    return hr_agree_set_failure(entry, HORO_ERR_MISMATCH, text, strlen(text));
}

int hr_agree_announce_id(struct hr_agree *agree, int member, uint32_t id, struct hr_wire_rows rows, int64_t now_ns) {
    struct hr_agree_entry *entry = hr_agree_find_id(agree, id);
    const struct hr_agree_copy *known = entry == NULL ? NULL : &entry->known;
    if (entry != NULL && entry->state == HR_AGREE_SIGNED) {
        entry = hr_agree_call(agree, member);
        if (entry == NULL) {
            return HORO_ERR_RESOURCE;
        }
        if (entry->id == 0) {
            entry->id = id;
            entry->known = *known; /* lent: a form keeps it */
        }
    }
    if (entry == NULL || !count_in(agree, entry, member, 1, now_ns)) {
        return HORO_OK; /* stale */
    }
    entry->is_awaited = 1;
    HR_TRY(hr_agree_note_rows(agree, entry, member, known->gathers, rows));
    /* somebody may have sent a changed request in full, or another id where it is an ordered call */
    struct hr_agree_copy mine = *known;
    mine.rank = agree->config.rank_of_member[member];
    HR_TRY(compare_in(agree, entry, &mine));
    entry->id_rank = entry->id_rank < 0 ? mine.rank : entry->id_rank;
    return hr_agree_complete_if_all(agree, entry);
}

int hr_agree_announce_request(struct hr_agree *agree, int member, const struct hr_wire_message *message,
                              int64_t now_ns) {
    struct hr_agree_entry *entry = hr_wire_is_call(message->request.name)
                                       ? hr_agree_call(agree, member)
                                       : hr_agree_find_or_create(agree, message->request.name);
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
    HR_TRY(entry->current.bytes == NULL ? hr_agree_keep(entry, &request) : HORO_OK);
    if (hr_op_is(message->request.op, HR_OP_LAST)) {
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
                out[count] = (struct hr_agree_waiting){
                    .name = entry->name, .since_ns = entry->first_ns, .announced = entry->announced,
                    .holds_up = is_awaited && entry != agree->absent.entry};
            }
            count++;
        }
    }
    return count;
}

int64_t hr_agree_since(const struct hr_agree *agree, enum hr_agree_state state) {
    const struct hr_agree_entry *first = agree->lists[state].first;
    return first == NULL ? 0 : first->first_ns;
}

/* ---- The way out: what is complete is reported or agreed on, what is agreed on becomes records of the log ---- */

enum {
    IDS_PER_MESSAGE = 1024,
    MISFITS_MAX = 64,
    BATCH_MAX = 1 << 15, /* entries: with the longest of names the record stays below HR_WIRE_MESSAGE_MAX */
};

static struct hr_wire_text name_of(const struct hr_agree_entry *entry) {
    return entry->is_call ? (struct hr_wire_text){"", 1} : (struct hr_wire_text){entry->name, entry->name_bytes};
}

static struct hr_wire_text failure_text_of(const struct hr_agree_entry *entry) {
    return (struct hr_wire_text){entry->failure_text, entry->failure == 0 ? 0 : strlen(entry->failure_text)};
}

static int put_request(struct hr_buffer *out, const struct hr_agree_entry *entry, struct hr_wire_rows rows) {
    const struct hr_agree_copy *request = hr_agree_request(entry);
    return hr_frame_put(out, &(struct hr_wire_message){
        .type = HR_WIRE_REQUEST, .rank = request->rank, .status = entry->failure, .text = failure_text_of(entry),
        .rows = rows, .request = {.bytes = request->bytes, .byte_count = request->count}});
}

static int put_failure(struct hr_agree *agree, struct hr_agree_entry *entry, struct hr_buffer *out) {
    HR_TRY(hr_frame_put(out, &(struct hr_wire_message){
        .type = HR_WIRE_FAIL, .status = entry->failure, .name = name_of(entry), .text = failure_text_of(entry)}));
    hr_agree_reset(agree, entry);
    return HORO_OK;
}

static int collect_at_root(struct hr_agree *agree, struct hr_agree_entry *entry, struct hr_buffer *out) {
    if (entry->failure != 0 && !entry->is_call) {
        return put_failure(agree, entry, out);
    }
    struct hr_wire_request *decoded = &entry->decoded;
    entry->dtypes = HR_AGREE_NO_DTYPE;
    entry->bytes = 0;
    *decoded = (struct hr_wire_request){.op = -1}; /* of a call that fails, in its turn */
    if (entry->failure == 0) {
        const struct hr_agree_copy *copy = hr_agree_request(entry);
        (void)hr_wire_decode_request(copy->bytes, copy->count, decoded); /* it was decoded when it came */
    }
    const uint8_t *cursor = decoded->tensors;
    for (uint32_t i = 0; i < decoded->tensor_count; i++) {
        struct hr_wire_tensor tensor;
        hr_wire_next_tensor(&cursor, &tensor);
        int64_t bytes = 0;
        (void)hr_wire_tensor_bytes(decoded->op, tensor.shape, tensor.ndim, tensor.dtype, &bytes);
        if (__builtin_add_overflow(entry->bytes, (uint64_t)bytes, &entry->bytes)) {
            entry->bytes = UINT64_MAX; /* as large as can be: it shares a batch with nothing */
        }
        const int dtypes = tensor.dtype + HORO_ANY_DTYPE_COUNT * tensor.wire_dtype;
        const int is_only = entry->dtypes == HR_AGREE_NO_DTYPE || entry->dtypes == dtypes;
        entry->dtypes = is_only ? dtypes : HR_AGREE_MIXED_DTYPES;
    }
    agree->ready_bytes += entry->bytes;
    hr_agree_move(agree, entry, HR_AGREE_READY);
    return HORO_OK;
}

int hr_agree_collect(struct hr_agree *agree, struct hr_buffer *out) {
    uint32_t ids[IDS_PER_MESSAGE];
    uint32_t id_count = 0;
    struct hr_agree_entry *entry;
    while ((entry = agree->lists[HR_AGREE_COMPLETE].first) != NULL) {
        HR_TRY(hr_agree_check_rows(agree, entry));
        if (agree->config.is_root) {
            HR_TRY(collect_at_root(agree, entry, out));
            continue;
        }
        hr_agree_move(agree, entry, HR_AGREE_REPORTED);
        const int in_full = entry->current.bytes != NULL || entry->failure != 0;
        const int is_bare = !in_full && entry->known.gathers == 0;
        if (!is_bare || id_count == IDS_PER_MESSAGE) { /* calls are counted; JOIN is the last */
            HR_TRY(hr_frame_put_ids(out, ids, &id_count));
        }
        if (is_bare) {
            ids[id_count++] = entry->id;
            continue;
        }
        struct hr_wire_rows rows = {0};
        HR_TRY(entry->failure != 0 ? HORO_OK : hr_agree_merge_rows(agree, entry, &rows));
        const struct hr_wire_message by_id = {.type = HR_WIRE_ROWS, .id = entry->id, .rows = rows};
        HR_TRY(in_full ? put_request(out, entry, rows) : hr_frame_put(out, &by_id));
    }
    return hr_frame_put_ids(out, ids, &id_count);
}

static int may_share(const struct hr_agree_entry *one, const struct hr_agree_entry *other) {
    const struct hr_wire_request *a = &one->decoded;
    const struct hr_wire_request *b = &other->decoded;
    if (a->op != b->op || a->on_gpu != b->on_gpu || a->root_rank != b->root_rank) {
        return 0;
    }
    if (a->op == HORO_BROADCAST) {
        return 1; /* moved as bytes */
    }
    return hr_op_is(a->op, HR_OP_REDUCTION) && one->dtypes >= 0 && one->dtypes == other->dtypes &&
           a->reduce_op == b->reduce_op && a->prescale == b->prescale && a->postscale == b->postscale;
}

/*
 * Chooses the first ready entry and what shares a batch with it; returns how many. Of what would share it but is too
 * large for the room that is left, only some are looked at: else thousands of large tensors would cost a walk over all
 * of them for each batch.
 */
static uint32_t choose_batch(struct hr_agree *agree) {
    const uint64_t most = agree->config.fusion_bytes;
    struct hr_agree_entry *entry = agree->lists[HR_AGREE_READY].first;
    const struct hr_agree_entry *first = entry;
    struct hr_agree_entry *next = may_share(first, first) ? entry->next : NULL;
    uint64_t bytes = first->bytes;
    uint32_t count = 1;
    int misfits = 0;
    int calls_wait = 0; /* for one that comes before them */
    hr_agree_move(agree, entry, HR_AGREE_CHOSEN);
    while (next != NULL && misfits < MISFITS_MAX && count < BATCH_MAX) {
        entry = next;
        next = entry->next;
        if (!may_share(first, entry) || (entry->is_call && calls_wait)) {
            calls_wait |= entry->is_call;
            continue;
        }
        if (entry->bytes > most || bytes > most - entry->bytes) {
            calls_wait |= entry->is_call;
            misfits++;
            continue;
        }
        bytes += entry->bytes;
        count++;
        hr_agree_move(agree, entry, HR_AGREE_CHOSEN);
    }
    agree->ready_bytes -= bytes;
    return count;
}

static int is_known_by_id(const struct hr_agree_entry *entry) {
    return entry->id != 0 && entry->current.bytes == NULL;
}

/* One ref; a tensor that is new or has changed gets an id with it. */
static int put_entry(struct hr_agree *agree, struct hr_agree_entry *entry, struct hr_buffer *out) {
    if (is_known_by_id(entry)) {
        return hr_wire_put_ref(out, entry->id, (struct hr_wire_text){NULL, 0});
    }
    uint32_t id = 0;
    if (entry->is_call) {
        const struct hr_agree_entry *form = hr_agree_find_form(agree, entry);
        if (form != NULL) {
            return hr_wire_put_ref(out, form->id, (struct hr_wire_text){NULL, 0});
        }
        const struct hr_agree_copy *request = hr_agree_request(entry);
        const uint32_t hash = (uint32_t)hr_hash((const char *)request->bytes, request->count);
        uint32_t *seen = &agree->forms_seen[hash % HR_AGREE_FORMS_SEEN];
        id = *seen == hash && agree->config.capacity > 0 && !entry->decoded.transient ? hr_agree_pick_id(agree) : 0;
        *seen = hash;
        HR_TRY(id != 0 ? hr_agree_sign(agree, entry, id) : HORO_OK);
        return hr_wire_put_ref(out, id, name_of(entry));
    }
    if (agree->config.capacity > 0 && !entry->decoded.transient) {
        id = entry->id != 0 ? entry->id : hr_agree_pick_id(agree);
    }
    HR_TRY(id != 0 ? hr_agree_assign(agree, entry, id) : HORO_OK);
    return hr_wire_put_ref(out, id, name_of(entry));
}

int hr_agree_form_batch(struct hr_agree *agree, struct hr_buffer *out) {
    struct hr_agree_entry *entry = agree->lists[HR_AGREE_READY].first;
    if (entry == NULL) {
        return HORO_OK;
    }
    if (entry->failure != 0) {
        return put_failure(agree, entry, out);
    }
    const uint32_t count = choose_batch(agree);
    struct hr_agree_entry **first = &agree->lists[HR_AGREE_CHOSEN].first;
    /*
     * A rank that has joined and has not submitted what comes by name learns of it by a REQUEST in front of it. An
     * ordered call needs all ranks, so it has been submitted by all.
     */
    for (entry = *first; agree->absent.is_known && entry != NULL; entry = entry->next) {
        if (entry != agree->absent.entry && !entry->is_call && !is_known_by_id(entry)) {
            HR_TRY(put_request(out, entry, (struct hr_wire_rows){0}));
        }
    }
    size_t mark;
    HR_TRY(hr_frame_begin(out, &mark));
    HR_TRY(hr_wire_put(out, &(struct hr_wire_message){.type = HR_WIRE_BATCH, .count = count}));
    struct hr_wire_rows rows = {0}; /* an allgather shares its batch with none */
    uint8_t last[HR_WIRE_VAR_MAX];
    if (*first == agree->absent.entry) {
        rows = hr_wire_encode_row(agree->absent.last, last);
    }
    while ((entry = *first) != NULL) {
        HR_TRY(entry == agree->absent.entry ? HORO_OK : hr_agree_merge_rows(agree, entry, &rows));
        HR_TRY(put_entry(agree, entry, out));
        hr_agree_reset(agree, entry);
    }
    HR_TRY(hr_wire_end_batch(out, rows));
    hr_frame_end(out, mark);
    return HORO_OK;
}

/* Of the entries that go out next. */
static enum hr_agree_state last_state(const struct hr_agree *agree) {
    return agree->config.is_root ? HR_AGREE_READY : HR_AGREE_COMPLETE;
}

uint32_t hr_agree_lone(const struct hr_agree *agree) {
    const struct hr_agree_list *list = &agree->lists[last_state(agree)];
    const struct hr_agree_entry *entry = list->first;
    const int is_lone = entry != NULL && entry == list->last && entry->current.bytes == NULL && entry->failure == 0;
    return is_lone ? entry->id : 0;
}

void hr_agree_take_lone(struct hr_agree *agree) {
    struct hr_agree_entry *entry = agree->lists[last_state(agree)].first;
    if (agree->config.is_root) {
        agree->ready_bytes -= entry->bytes;
        hr_agree_reset(agree, entry);
    } else {
        hr_agree_move(agree, entry, HR_AGREE_REPORTED);
    }
}

static int apply_ref(struct hr_agree *agree, const struct hr_wire_ref *ref, int fails) {
    struct hr_agree_entry *entry =
        ref->name.bytes == 0 ? hr_agree_find_id(agree, ref->id) : hr_agree_find(agree, ref->name);
    const int is_call = hr_wire_is_call(ref->name) || (entry != NULL && entry->state == HR_AGREE_SIGNED);
    entry = is_call ? hr_agree_call(agree, -1) : entry;
    if ((entry == NULL || entry->state == HR_AGREE_IDLE) && (fails || ref->name.bytes == 0) &&
        hr_agree_are_all_absent(agree)) {
        return HORO_OK;
    }
    if (entry == NULL || entry->state != HR_AGREE_REPORTED) {
        return HORO_ERR_INTERNAL; /* nothing runs here that this subtree has not announced */
    }
    if (ref->name.bytes > 0 && ref->id != 0) {
        if (agree->config.capacity == 0) {
            return HORO_ERR_INTERNAL;
        }
        HR_TRY(is_call ? hr_agree_sign(agree, entry, ref->id) : hr_agree_assign(agree, entry, ref->id));
    }
    hr_agree_reset(agree, entry);
    return HORO_OK;
}

int hr_agree_apply(struct hr_agree *agree, const struct hr_wire_message *record) {
    const uint8_t *cursor = record->items;
    struct hr_wire_ref ref = {0};
    if (hr_agree_is_complete(agree)) {
        return HORO_ERR_INTERNAL; /* collect comes before apply: a complete entry must not lose its id unreported */
    }
    switch (record->type) {
    case HR_WIRE_FAIL: ref.name = record->name; return apply_ref(agree, &ref, 1);
    case HR_WIRE_RESULT: ref.id = record->id; return apply_ref(agree, &ref, 0);
    case HR_WIRE_REQUEST: return hr_agree_describe(agree, record);
    case HR_WIRE_JOINED: return HORO_OK;
    case HR_WIRE_BATCH: break;
    default: return HORO_ERR_INTERNAL;
    }
    for (uint32_t i = 0; i < record->count; i++) {
        hr_wire_next_ref(&cursor, &ref);
        HR_TRY(apply_ref(agree, &ref, 0));
    }
    return HORO_OK;
}
