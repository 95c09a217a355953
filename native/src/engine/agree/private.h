/*
 * The bookkeeping of one tensor name. Files of this room, each of which calls only those before it: text.c, entry.c,
 * join.c, agree.c.
 */
#ifndef HR_ENGINE_AGREE_PRIVATE_H
#define HR_ENGINE_AGREE_PRIVATE_H

#include "engine/agree/agree.h"

/* A request in canonical bytes with the rank it came from. */
struct hr_agree_copy {
    uint8_t *bytes;
    size_t count;
    int rank;
    uint64_t gathers; /* how many rows each rank tells: of an allgather or alltoall; 0: it is another operation */
};

/* Of a member, in the bytes of its entry. */
struct hr_agree_rows {
    size_t at, bytes;
};

enum { HR_AGREE_NO_DTYPE = -1, HR_AGREE_MIXED_DTYPES = -2 };

/* One allocation, but for copies, texts and rows. */
struct hr_agree_entry {
    struct hr_agree_entry *previous, *next; /* in the list of its state */
    char *name;                      /* points into this allocation, as the sets of members do */
    size_t name_bytes;
    uint64_t name_hash;
    enum hr_agree_state state;
    int is_call;                     /* an ordered one, named by its number */
    uint32_t id;                     /* 0: not cached; of a call, that of its form */
    struct hr_agree_copy known;      /* the request that the id stands for; bytes NULL without id; a call's is lent */
    struct hr_agree_copy current;    /* the first full request of this round; bytes NULL if all came by id */
    int id_rank;                     /* a rank that announced by id this round, -1 */
    int announced_count;
    uint64_t *announced;             /* bit per member */
    uint64_t *by_id;                 /* bit per member: announced by id */
    uint64_t *stood_in;              /* bit per member: counts as announced, since it has joined */
    int failure;                     /* status, 0: none so far */
    char *failure_text;
    struct hr_buffer rows;                /* of all members that have announced it, as they did */
    struct hr_agree_rows *rows_of_member; /* [member_count]; NULL: it never was one */
    int64_t first_ns;                /* first announcement of this round */
    int is_awaited;                  /* a member that has announced it this round has not refused it */
    uint64_t last_round;             /* agree->rounds when its last one ended */
    /* set when it becomes READY: they decide with what it may share a batch */
    struct hr_wire_request decoded; /* op -1: a call that fails in its turn */
    int dtypes; /* dtype and wire dtype of all tensors in one number; a group of several runs alone */
    uint64_t bytes;
};

/* Words of a set of members. */
static inline size_t hr_agree_words(const struct hr_agree *agree) {
    return ((size_t)agree->config.member_count + 63) / 64;
}
/* The bytes that describe the entry's request this round. */
static inline const struct hr_agree_copy *hr_agree_request(const struct hr_agree_entry *entry) {
    return entry->current.bytes != NULL ? &entry->current : &entry->known;
}

/* text.c: one sentence on how two requests of the same name differ. */
void hr_agree_mismatch_text(const struct hr_agree_config *config, const struct hr_agree_entry *entry,
                            const struct hr_agree_copy *one, const struct hr_agree_copy *two, char *out,
                            size_t out_bytes);

/* entry.c. Puts it at the end of the list of a state, which becomes its own. */
void hr_agree_move(struct hr_agree *agree, struct hr_agree_entry *entry, enum hr_agree_state state);
/* Ends the round: forgets announcements; drops the entry if it has no id. */
void hr_agree_reset(struct hr_agree *agree, struct hr_agree_entry *entry);
/* The entry of a name or id, NULL if there is none; of a name a new one if needed, NULL: no memory. */
struct hr_agree_entry *hr_agree_find(const struct hr_agree *agree, struct hr_wire_text name);
struct hr_agree_entry *hr_agree_find_id(const struct hr_agree *agree, uint32_t id);
struct hr_agree_entry *hr_agree_find_or_create(struct hr_agree *agree, struct hr_wire_text name);
/*
 * The next ordered call of a member, which counts as announced and is made if it is the first (NULL: no memory); member
 * -1: the first that is not over (NULL: there is none).
 */
struct hr_agree_entry *hr_agree_call(struct hr_agree *agree, int member);
/* The form of a call; NULL: it has no id. sign: gives it one. */
struct hr_agree_entry *hr_agree_find_form(const struct hr_agree *agree, const struct hr_agree_entry *call);
int hr_agree_sign(struct hr_agree *agree, const struct hr_agree_entry *call, uint32_t id);
/* Keeps the request as this round's first one in full. */
int hr_agree_keep(struct hr_agree_entry *entry, const struct hr_agree_copy *request);
/* The entry fails, for all, unless it has failed already. HORO_OK or HORO_ERR_RESOURCE. */
int hr_agree_set_failure(struct hr_agree_entry *entry, int status, const char *text, size_t bytes);
/* Gives the entry an id, evicting the slot's owner; the known request becomes this round's. */
int hr_agree_assign(struct hr_agree *agree, struct hr_agree_entry *entry, uint32_t id);
/* Root: an id for a new entry: in an unused slot, or in that of the one idle longest; 0: none is idle long enough. */
uint32_t hr_agree_pick_id(struct hr_agree *agree);

/*
 * Rows. told: how many rows each rank tells; 0: it is another operation than an allgather or alltoall. note: those of
 * a member; HORO_ERR_INTERNAL for any other number of them. check: fails an entry where those of all cannot
 * travel together, like one with a difference. merge: all of them in the order of the members, valid until the next
 * merge.
 */
uint64_t hr_agree_rows_told(const struct hr_agree *agree, const struct hr_wire_request *request);
int hr_agree_note_rows(struct hr_agree *agree, struct hr_agree_entry *entry, int member, uint64_t gathers,
                       struct hr_wire_rows rows);
int hr_agree_check_rows(const struct hr_agree *agree, struct hr_agree_entry *entry);
int hr_agree_merge_rows(struct hr_agree *agree, const struct hr_agree_entry *entry, struct hr_wire_rows *merged);

/*
 * join.c. Members that have joined are absent. count_absent: they count as announced, in an entry that has just been
 * announced. complete_if_all: puts an entry that all members have announced among the complete ones, with no rows of
 * those that are absent, or failed. begin_absence: a member has announced JOIN, which is this entry. All HORO_OK or
 * HORO_ERR_RESOURCE. are_all_absent: not the root, all of this subtree are, and the parent knows. describe: the parent
 * tells of a request that this subtree has not announced.
 */
void hr_agree_count_absent(struct hr_agree *agree, struct hr_agree_entry *entry);
int hr_agree_complete_if_all(struct hr_agree *agree, struct hr_agree_entry *entry);
int hr_agree_begin_absence(struct hr_agree *agree, struct hr_agree_entry *entry);
int hr_agree_are_all_absent(const struct hr_agree *agree);
int hr_agree_describe(struct hr_agree *agree, const struct hr_wire_message *message);

#endif
