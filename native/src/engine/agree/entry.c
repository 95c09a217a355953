/* The entries of the agreement: one per name that has an id or that somebody waits for, in the list of its state. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/traits.h"
#include "engine/agree/private.h"

static size_t entry_bytes(const struct hr_agree *agree, size_t name_bytes) {
    return sizeof(struct hr_agree_entry) + 3 * hr_agree_words(agree) * sizeof(uint64_t) + name_bytes + 1;
}

static void forget_known(struct hr_agree *agree, struct hr_agree_entry *entry) {
    hr_pool_give(&agree->pool, entry->known.bytes, entry->known.count);
    entry->known = (struct hr_agree_copy){0};
}

static void free_entry(struct hr_agree *agree, struct hr_agree_entry *entry) {
    if (!entry->is_call) {
        forget_known(agree, entry);
    }
    free(entry->current.bytes);
    free(entry->failure_text);
    hr_buffer_fini(&entry->rows);
    hr_pool_give(&agree->pool, entry->rows_of_member,
                 (size_t)agree->config.member_count * sizeof *entry->rows_of_member);
    hr_pool_give(&agree->pool, entry, entry_bytes(agree, entry->name_bytes));
}

int hr_agree_init(struct hr_agree *agree, const struct hr_agree_config *config) {
    *agree = (struct hr_agree){.config = *config};
    agree->calls = calloc((size_t)config->member_count, sizeof *agree->calls);
    agree->slots = calloc((size_t)config->capacity + 1, sizeof *agree->slots);
    return agree->calls == NULL || agree->slots == NULL ? HORO_ERR_RESOURCE : HORO_OK;
}

void hr_agree_fini(struct hr_agree *agree) {
    for (size_t i = 0; i < agree->entries.capacity; i++) {
        if (agree->entries.slots[i].value != NULL) {
            free_entry(agree, agree->entries.slots[i].value);
        }
    }
    hr_map_fini(&agree->entries);
    hr_pool_fini(&agree->pool);
    hr_buffer_fini(&agree->merged_rows);
    free(agree->calls);
    free((void *)agree->slots);
}

struct hr_agree_entry *hr_agree_find_id(const struct hr_agree *agree, uint32_t id) {
    struct hr_agree_entry *entry = agree->config.capacity == 0 ? NULL : agree->slots[id % agree->config.capacity];
    return entry != NULL && entry->id == id ? entry : NULL;
}

static void unlink_entry(struct hr_agree *agree, struct hr_agree_entry *entry) {
    struct hr_agree_list *list = &agree->lists[entry->state];
    *(entry->previous == NULL ? &list->first : &entry->previous->next) = entry->next;
    *(entry->next == NULL ? &list->last : &entry->next->previous) = entry->previous;
}

static void link_entry(struct hr_agree *agree, struct hr_agree_entry *entry, enum hr_agree_state state) {
    struct hr_agree_list *list = &agree->lists[state];
    entry->state = state;
    entry->previous = list->last;
    entry->next = NULL;
    *(list->last == NULL ? &list->first : &list->last->next) = entry;
    list->last = entry;
}

void hr_agree_move(struct hr_agree *agree, struct hr_agree_entry *entry, enum hr_agree_state state) {
    unlink_entry(agree, entry);
    link_entry(agree, entry, state);
}

/* The hash by which calls, and forms of calls, are found differs from that of a name. */
enum kind { NAMED, CALL, FORM };

static struct hr_agree_entry *find_kind(const struct hr_agree *agree, struct hr_wire_text name, enum kind kind) {
    return hr_map_find(&agree->entries, hr_hash(name.data, name.bytes) + kind, name.data, name.bytes);
}

struct hr_agree_entry *hr_agree_find(const struct hr_agree *agree, struct hr_wire_text name) {
    return find_kind(agree, name, NAMED);
}

static struct hr_agree_entry *create(struct hr_agree *agree, struct hr_wire_text name, enum kind kind) {
    const size_t words = hr_agree_words(agree);
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
    entry->name_hash = hr_hash(name.data, name.bytes) + kind;
    entry->is_call = kind == CALL;
    if (hr_map_insert(&agree->entries, entry->name_hash, entry->name, entry->name_bytes, entry) != HORO_OK) {
        free_entry(agree, entry);
        return NULL;
    }
    link_entry(agree, entry, HR_AGREE_IDLE);
    return entry;
}

struct hr_agree_entry *hr_agree_find_or_create(struct hr_agree *agree, struct hr_wire_text name) {
    struct hr_agree_entry *entry = hr_agree_find(agree, name);
    return entry != NULL ? entry : create(agree, name, NAMED);
}

/* ---- Ordered calls ---- */

struct hr_agree_entry *hr_agree_call(struct hr_agree *agree, int member) {
    char name[HR_CALL_NAME_BYTES];
    const uint64_t number = member < 0 ? agree->calls_over + 1 : ++agree->calls[member];
    const struct hr_wire_text text = {name, hr_name_call(number, name)};
    struct hr_agree_entry *entry = find_kind(agree, text, CALL);
    return entry != NULL || member < 0 ? entry : create(agree, text, CALL);
}

enum hr_agree_state hr_agree_look_up(const struct hr_agree *agree, struct hr_wire_text name,
                                     const uint64_t **announced) {
    const struct hr_agree_entry *entry = hr_agree_find(agree, name);
    entry = entry == NULL || entry->state == HR_AGREE_IDLE ? find_kind(agree, name, CALL) : entry;
    if (entry == NULL) {
        return HR_AGREE_IDLE;
    }
    *announced = entry->announced;
    return entry->state;
}

void hr_agree_skip_call(struct hr_agree *agree) {
    agree->calls_over++;
    for (int member = 0; member < agree->config.member_count; member++) {
        agree->calls[member]++;
    }
}

struct hr_agree_entry *hr_agree_find_form(const struct hr_agree *agree, const struct hr_agree_entry *call) {
    const struct hr_agree_copy *request = hr_agree_request(call);
    return find_kind(agree, (struct hr_wire_text){(const char *)request->bytes, request->count}, FORM);
}

int hr_agree_sign(struct hr_agree *agree, const struct hr_agree_entry *call, uint32_t id) {
    const struct hr_agree_copy *request = hr_agree_request(call);
    const struct hr_wire_text key = {(const char *)request->bytes, request->count};
    struct hr_agree_entry *form = create(agree, key, FORM);
    if (form == NULL) {
        return HORO_ERR_RESOURCE;
    }
    form->current = *request; /* lent */
    const int status = hr_agree_assign(agree, form, id);
    form->current = (struct hr_agree_copy){0};
    hr_agree_move(agree, form, HR_AGREE_SIGNED);
    return status;
}

/* A round of it has ended. */
static void become_idle(struct hr_agree *agree, struct hr_agree_entry *entry) {
    entry->last_round = ++agree->rounds;
    hr_agree_move(agree, entry, HR_AGREE_IDLE);
}

void hr_agree_reset(struct hr_agree *agree, struct hr_agree_entry *entry) {
    agree->active -= entry->state != HR_AGREE_IDLE;
    free(entry->current.bytes);
    free(entry->failure_text);
    entry->current = (struct hr_agree_copy){0};
    entry->failure_text = NULL;
    entry->failure = 0;
    entry->id_rank = -1;
    entry->is_awaited = 0;
    entry->announced_count = 0;
    hr_buffer_consume(&entry->rows, hr_buffer_size(&entry->rows));
    memset(entry->announced, 0, 3 * hr_agree_words(agree) * sizeof *entry->announced); /* all its sets of members */
    if (entry == agree->absent.entry) {
        agree->absent = (struct hr_agree_absent){0};
        uint64_t most = agree->calls_over; /* a rank that has joined has missed some */
        for (int member = 0; member < agree->config.member_count; member++) {
            most = agree->calls[member] > most ? agree->calls[member] : most;
        }
        for (int member = 0; member < agree->config.member_count; member++) {
            agree->calls[member] = most;
        }
        agree->calls_over = most;
    }
    if (entry->is_call) {
        agree->calls_over++;
        entry->known = (struct hr_agree_copy){0};
        entry->id = 0;
    }
    become_idle(agree, entry);
    if (entry->id == 0) {
        unlink_entry(agree, entry);
        (void)hr_map_remove(&agree->entries, entry->name_hash, entry->name, entry->name_bytes);
        free_entry(agree, entry);
    }
}

/* The entry loses its id. Members that announced it by that id will do so again in full. */
static void evict(struct hr_agree *agree, struct hr_agree_entry *entry) {
    forget_known(agree, entry);
    entry->id = 0;
    if (entry->state == HR_AGREE_REPORTED && (entry->current.bytes != NULL || entry->failure != 0)) {
        return; /* the parent has all it needs; the repeated announcements are ignored as such */
    }
    for (int member = 0; member < agree->config.member_count; member++) {
        if (hr_agree_has(entry->by_id, member)) {
            entry->announced[member / 64] &= ~(1ull << (member % 64));
            entry->announced_count--;
        }
    }
    memset(entry->by_id, 0, hr_agree_words(agree) * sizeof *entry->by_id);
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

/* higher: more hits where names are many times the capacity; lower: new names are cached sooner */
enum { EVICT_AFTER_CAPACITIES = 16 }; /* rounds that an id must have been idle for, in capacities */

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
    if (agree->absent.is_known || oldest == NULL ||
        agree->rounds - oldest->last_round < (uint64_t)EVICT_AFTER_CAPACITIES * capacity) {
        return 0;
    }
    return oldest->id > UINT32_MAX - capacity ? 0 : oldest->id + capacity;
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

int hr_agree_keep(struct hr_agree_entry *entry, const struct hr_agree_copy *request) {
    uint8_t *bytes = malloc(request->count);
    if (bytes == NULL) {
        return HORO_ERR_RESOURCE;
    }
    memcpy(bytes, request->bytes, request->count);
    entry->current = (struct hr_agree_copy){bytes, request->count, request->rank, request->gathers};
    return HORO_OK;
}

/* ---- The rows of an allgather or alltoall, from the announcements of the members to the record ---- */

uint64_t hr_agree_rows_told(const struct hr_agree *agree, const struct hr_wire_request *request) {
    const uint64_t each = request->op == HORO_ALLTOALL ? (uint64_t)agree->config.team_size : 1;
    return hr_op_is(request->op, HR_OP_TELLING_ROWS) ? request->tensor_count * each : 0;
}

int hr_agree_note_rows(struct hr_agree *agree, struct hr_agree_entry *entry, int member, uint64_t gathers,
                       struct hr_wire_rows rows) {
    if (rows.count != gathers * (uint64_t)agree->config.ranks_of_member[member]) {
        return HORO_ERR_INTERNAL;
    }
    if (rows.count == 0) {
        return HORO_OK;
    }
    if (entry->rows_of_member == NULL) {
        entry->rows_of_member =
            hr_pool_take(&agree->pool, (size_t)agree->config.member_count * sizeof *entry->rows_of_member);
        if (entry->rows_of_member == NULL) {
            return HORO_ERR_RESOURCE;
        }
    }
    entry->rows_of_member[member] = (struct hr_agree_rows){hr_buffer_size(&entry->rows), rows.bytes};
    return hr_buffer_append(&entry->rows, rows.data, rows.bytes);
}

static int rank_count(const struct hr_agree *agree) {
    int count = 0;
    for (int member = 0; member < agree->config.member_count; member++) {
        count += agree->config.ranks_of_member[member];
    }
    return count;
}

int hr_agree_check_rows(const struct hr_agree *agree, struct hr_agree_entry *entry) {
    const struct hr_agree_copy *request = hr_agree_request(entry);
    if (request->gathers == 0 || entry->failure != 0) {
        return HORO_OK;
    }
    size_t bytes = 0; /* `rows` may hold more, where an announcement was made twice */
    for (int member = 0; member < agree->config.member_count; member++) {
        bytes += entry->rows_of_member[member].bytes;
    }
    if (bytes + request->count <= HR_WIRE_REQUEST_MAX) {
        return HORO_OK;
    }
    char text[HORO_MESSAGE_MAX];
    struct hr_wire_request call = {0};
    (void)hr_wire_decode_request(request->bytes, request->count, &call); /* it was decoded when it came */
    (void)snprintf(text, sizeof text,
                   "%s '%s': the %s of its %u tensors on %d ranks take %zu bytes with its description; at most %d can "
                   "travel as one request: submit the tensors as several groups",
                   hr_op_name(call.op), entry->name, call.op == HORO_ALLTOALL ? "splits" : "first extents",
                   call.tensor_count, rank_count(agree), bytes + request->count, HR_WIRE_REQUEST_MAX);
    return hr_agree_set_failure(entry, HORO_ERR_USAGE, text, strlen(text));
}

int hr_agree_merge_rows(struct hr_agree *agree, const struct hr_agree_entry *entry, struct hr_wire_rows *merged) {
    const uint64_t gathers = hr_agree_request(entry)->gathers;
    *merged = (struct hr_wire_rows){0};
    if (gathers == 0) {
        return HORO_OK;
    }
    struct hr_buffer *out = &agree->merged_rows;
    const uint8_t *rows = hr_buffer_front(&entry->rows);
    hr_buffer_consume(out, hr_buffer_size(out));
    for (int member = 0; member < agree->config.member_count; member++) {
        const struct hr_agree_rows *theirs = &entry->rows_of_member[member];
        HR_TRY(hr_buffer_append(out, rows + theirs->at, theirs->bytes));
    }
    *merged = (struct hr_wire_rows){hr_buffer_front(out), hr_buffer_size(out),
                                    (uint32_t)(gathers * (uint64_t)rank_count(agree))};
    return HORO_OK;
}
