#include "engine/agree.h"

#include <stdlib.h>
#include <string.h>

#include "base/op.h"
#include "engine/agree_entry.h"

static size_t word_count(const struct hr_agree *agree) {
    return ((size_t)agree->config.member_count + 63) / 64;
}

static size_t entry_bytes(const struct hr_agree *agree, size_t name_bytes) {
    return sizeof(struct hr_agree_entry) + 3 * word_count(agree) * sizeof(uint64_t) + name_bytes + 1;
}

static void forget_known(struct hr_agree *agree, struct hr_agree_entry *entry) {
    hr_pool_give(&agree->pool, entry->known.bytes, entry->known.count);
    entry->known = (struct hr_agree_copy){0};
}

static void free_entry(struct hr_agree *agree, struct hr_agree_entry *entry) {
    forget_known(agree, entry);
    free(entry->current.bytes);
    free(entry->failure_text);
    hr_buffer_fini(&entry->rows);
    hr_pool_give(&agree->pool, entry->rows_of_member,
                 (size_t)agree->config.member_count * sizeof *entry->rows_of_member);
    hr_pool_give(&agree->pool, entry, entry_bytes(agree, entry->name_bytes));
}

int hr_agree_init(struct hr_agree *agree, const struct hr_agree_config *config) {
    *agree = (struct hr_agree){.config = *config};
    if (config->capacity > 0) {
        agree->slots = calloc(config->capacity, sizeof *agree->slots);
        if (agree->slots == NULL) {
            return HORO_ERR_RESOURCE;
        }
    }
    return HORO_OK;
}

void hr_agree_fini(struct hr_agree *agree) {
    for (size_t i = 0; i < agree->entries.capacity; i++) {
        if (agree->entries.slots[i].value != NULL) {
            free_entry(agree, agree->entries.slots[i].value);
        }
    }
    hr_map_fini(&agree->entries);
    hr_pool_fini(&agree->pool);
    hr_buffer_fini(&agree->joined_rows);
    free((void *)agree->slots);
    *agree = (struct hr_agree){0};
}

struct hr_agree_entry *hr_agree_find(const struct hr_agree *agree, struct hr_wire_text name) {
    return hr_map_find(&agree->entries, hr_hash(name.data, name.bytes), name.data, name.bytes);
}

struct hr_agree_entry *hr_agree_find_id(const struct hr_agree *agree, uint32_t id) {
    if (agree->config.capacity == 0 || id == 0) {
        return NULL;
    }
    struct hr_agree_entry *entry = agree->slots[id % agree->config.capacity];
    return entry != NULL && entry->id == id ? entry : NULL;
}

void hr_agree_unlink(struct hr_agree *agree, struct hr_agree_entry *entry) {
    struct hr_agree_list *list = &agree->lists[entry->state];
    *(entry->previous == NULL ? &list->first : &entry->previous->next) = entry->next;
    *(entry->next == NULL ? &list->last : &entry->next->previous) = entry->previous;
}

void hr_agree_link(struct hr_agree *agree, struct hr_agree_entry *entry, enum hr_agree_state state) {
    struct hr_agree_list *list = &agree->lists[state];
    entry->state = state;
    entry->previous = list->last;
    entry->next = NULL;
    *(list->last == NULL ? &list->first : &list->last->next) = entry;
    list->last = entry;
}

static struct hr_agree_entry *create_entry(struct hr_agree *agree, struct hr_wire_text name) {
    const size_t words = word_count(agree);
    struct hr_agree_entry *entry = hr_pool_take(&agree->pool, entry_bytes(agree, name.bytes));
    if (entry == NULL) {
        return NULL;
    }
    entry->id_rank = -1;
    entry->rows.pool = &agree->pool;
    entry->announced = (uint64_t *)(void *)(entry + 1);
    entry->by_id = entry->announced + words;
    entry->stood_in = entry->by_id + words;
    entry->name = (char *)(entry->stood_in + words);
    memcpy(entry->name, name.data, name.bytes);
    entry->name[name.bytes] = '\0';
    entry->name_bytes = name.bytes;
    entry->name_hash = hr_hash(name.data, name.bytes);
    if (hr_map_insert(&agree->entries, entry->name_hash, entry->name, entry->name_bytes, entry) != HORO_OK) {
        free_entry(agree, entry);
        return NULL;
    }
    hr_agree_link(agree, entry, HR_AGREE_IDLE);
    return entry;
}

struct hr_agree_entry *hr_agree_find_or_create(struct hr_agree *agree, struct hr_wire_text name) {
    struct hr_agree_entry *entry = hr_agree_find(agree, name);
    return entry == NULL ? create_entry(agree, name) : entry;
}

/* A round of it has ended. */
static void become_idle(struct hr_agree *agree, struct hr_agree_entry *entry) {
    entry->last_round = ++agree->rounds;
    hr_agree_move(agree, entry, HR_AGREE_IDLE);
}

static void clear_round(struct hr_agree *agree, struct hr_agree_entry *entry) {
    agree->active -= entry->state != HR_AGREE_IDLE;
    free(entry->current.bytes);
    free(entry->failure_text);
    entry->current = (struct hr_agree_copy){0};
    entry->failure_text = NULL;
    entry->failure = 0;
    entry->id_rank = -1;
    entry->reported_full = 0;
    entry->is_awaited = 0;
    entry->announced_count = 0;
    hr_buffer_consume(&entry->rows, hr_buffer_size(&entry->rows));
    memset(entry->announced, 0, word_count(agree) * sizeof *entry->announced);
    memset(entry->by_id, 0, word_count(agree) * sizeof *entry->by_id);
    memset(entry->stood_in, 0, word_count(agree) * sizeof *entry->stood_in);
    if (entry == agree->joined.entry) {
        agree->joined = (struct hr_agree_joined){0};
    }
    become_idle(agree, entry);
}

void hr_agree_reset(struct hr_agree *agree, struct hr_agree_entry *entry) {
    clear_round(agree, entry);
    if (entry->id == 0) {
        hr_agree_unlink(agree, entry);
        (void)hr_map_remove(&agree->entries, entry->name_hash, entry->name, entry->name_bytes);
        free_entry(agree, entry);
    }
}

/* The entry loses its id. Members that announced it by that id will do so again in full. */
static void evict(struct hr_agree *agree, struct hr_agree_entry *entry) {
    forget_known(agree, entry);
    entry->id = 0;
    if (entry->state == HR_AGREE_REPORTED && entry->reported_full) {
        return; /* the parent has all it needs; the repeated announcements are ignored as such */
    }
    for (int member = 0; member < agree->config.member_count; member++) {
        if (hr_agree_has(entry->by_id, member)) {
            entry->announced[member / 64] &= ~(1ull << (member % 64));
            entry->announced_count--;
        }
    }
    memset(entry->by_id, 0, word_count(agree) * sizeof *entry->by_id);
    entry->id_rank = -1;
    if (entry->state != HR_AGREE_IDLE) {
        hr_agree_move(agree, entry, HR_AGREE_WAITING);
    }
    if (entry->announced_count == 0) {
        hr_agree_reset(agree, entry);
    }
}

int hr_agree_assign(struct hr_agree *agree, struct hr_agree_entry *entry, uint32_t id) {
    struct hr_agree_entry **slot = &agree->slots[id % agree->config.capacity];
    const struct hr_agree_copy *request = hr_agree_request(entry);
    uint8_t *bytes = hr_pool_take(&agree->pool, request->count);
    if (bytes == NULL) {
        return HORO_ERR_RESOURCE;
    }
    memcpy(bytes, request->bytes, request->count);
    const struct hr_agree_copy known = {bytes, request->count, request->rank, request->gathers};
    if (*slot != NULL && *slot != entry) {
        evict(agree, *slot);
    }
    if (entry->id != 0 && entry->id % agree->config.capacity != id % agree->config.capacity) {
        agree->slots[entry->id % agree->config.capacity] = NULL;
    }
    *slot = entry;
    forget_known(agree, entry);
    entry->known = known;
    entry->id = id;
    return HORO_OK;
}

void hr_agree_note_use(struct hr_agree *agree, uint32_t id) {
    struct hr_agree_entry *entry = hr_agree_find_id(agree, id);
    if (entry != NULL && entry->state == HR_AGREE_IDLE) {
        become_idle(agree, entry);
    }
}

/*
 * Training asks for the same names in the same order, step after step. With a few names more than slots, to evict the
 * least recently used one for each newcomer would evict every name just before it is needed, and the cache would never
 * be hit. So a newcomer stays without an id as long as all that have one are used now and then.
 */
uint32_t hr_agree_pick_id(struct hr_agree *agree) {
    const uint32_t capacity = agree->config.capacity;
    if (agree->slots_used < capacity) {
        return capacity + agree->slots_used++;
    }
    const struct hr_agree_entry *oldest = agree->lists[HR_AGREE_IDLE].first;
    /* a rank that joins must not have to announce again what it has announced by id, see join.c */
    if (agree->joined.is_known || oldest == NULL || agree->rounds - oldest->last_round < agree->config.evict_after) {
        return 0;
    }
    return oldest->id > UINT32_MAX - capacity ? 0 : oldest->id + capacity;
}

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
        hr_agree_count_joined(agree, entry);
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

int hr_agree_complete_if_all(struct hr_agree *agree, struct hr_agree_entry *entry) {
    if (entry->state == HR_AGREE_WAITING && entry->announced_count == agree->config.member_count) {
        HR_TRY(hr_agree_stand_in(agree, entry));
        hr_agree_move(agree, entry, HR_AGREE_COMPLETE);
    }
    return HORO_OK;
}

int hr_agree_set_failure(struct hr_agree_entry *entry, int status, const char *text, size_t bytes) {
    if (entry->failure != 0) {
        return HORO_OK; /* the first one found is told */
    }
    entry->failure_text = malloc(bytes + 1);
    if (entry->failure_text == NULL) {
        return HORO_ERR_RESOURCE;
    }
    memcpy(entry->failure_text, text, bytes);
    entry->failure_text[bytes] = '\0';
    entry->failure = status;
    return HORO_OK;
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

int hr_agree_keep(struct hr_agree_entry *entry, const struct hr_agree_copy *request) {
    uint8_t *bytes = malloc(request->count);
    if (bytes == NULL) {
        return HORO_ERR_RESOURCE;
    }
    memcpy(bytes, request->bytes, request->count);
    free(entry->current.bytes);
    entry->current = (struct hr_agree_copy){bytes, request->count, request->rank, request->gathers};
    return HORO_OK;
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

uint64_t hr_agree_rows_told(const struct hr_agree *agree, const struct hr_wire_request *request) {
    if (!hr_op_tells_rows(request->op)) {
        return 0;
    }
    return (uint64_t)request->tensor_count * (request->op == HORO_ALLTOALL ? (uint64_t)agree->config.team_size : 1);
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
    if (message->request.op == HORO_JOIN) {
        HR_TRY(hr_agree_note_join(agree, entry));
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
