/*
 * The agreement, as a pure state machine: who has announced which tensor, do the ranks mean the same, what may run
 * next. No socket, no clock, no lock: one instance per leader, fed and drained by one thread.
 *
 * A *member* is whoever reports here: a local rank, or a child host that speaks for its whole subtree. An announcement
 * is a full request (first time, or changed) or the id of a cached one; that of an allgather also says how many rows
 * each rank gives, which may differ by rank and time and is not compared. When all members have announced a tensor
 *  - the root checks that they mean the same, and either queues it as ready or appends a FAIL record to the log;
 *  - another leader reports it to its parent: by id if all of the subtree did, else with the full request, and the rows
 *    of its members, in their order. So the order of the rows in the record is that of the tree of hosts.
 * Records of the log (wire/wire.h) come back down and are applied by everybody in the same order; they alone change
 * ids.
 *
 * A member that has announced JOIN, which a child host does when all of its subtree has, has nothing more to announce
 * until all members have. Until then it counts as if it had announced whatever another one does (join.c).
 *
 * A REQUEST with a status fails the tensor for all when all have announced it: of a rank that has refused the call
 * (submit.c), or of a leader that has found a difference.
 *
 * Ordered calls have no names. A member announces them in their order, so they are counted as they come: the n-th of
 * each is one entry, which is complete, reported and run in that order. What has an id is their form, in an entry of
 * its own, which never loses it (so no announcement of a call is stale) and gets it when the form comes again.
 *
 * Ids grow; slot = id % capacity. The root alone chooses them. A new id in a slot evicts the slot's former owner
 * everywhere at that position of the log. An announcement by an id that has been evicted meanwhile is stale: it is
 * ignored here and made again, in full, by its rank.
 */
#ifndef HR_ENGINE_AGREE_AGREE_H
#define HR_ENGINE_AGREE_AGREE_H

#include <stdint.h>

#include "base/buffer.h"
#include "base/map.h"
#include "base/pool.h"
#include "base/recorder.h"
#include "wire/wire.h"

struct hr_agree_config {
    int is_root;
    int member_count;
    const int *rank_of_member;            /* [member_count] the rank itself, or the leader of the child host */
    const int *ranks_of_member;           /* [member_count] how many it speaks for */
    const int *member_of_rank;            /* [rank_count] who speaks here for a rank; -1: nobody */
    const char *const *host_name_of_rank; /* for messages; indexed by rank */
    int team_size;                        /* how many rows an alltoall has for each tensor and rank */
    int rank_count;                       /* all ranks: more than the number of any that an announcement names */
    uint32_t capacity;                    /* cached tensors; 0: none */
    uint64_t fusion_bytes;                /* most bytes in one batch of several tensors */
    struct hr_recorder *recorder;         /* root: gets announcements while a timeline is written; NULL: none */
    int team_number;                      /* for that */
};

struct hr_agree_entry; /* private to this room */

enum hr_agree_state {
    HR_AGREE_IDLE,     /* nobody has announced it (kept because it has an id) */
    HR_AGREE_WAITING,  /* some members have */
    HR_AGREE_COMPLETE, /* all have: to be queued or reported */
    HR_AGREE_REPORTED, /* sent to the parent (not root) */
    HR_AGREE_READY,    /* agreed on, waiting for a batch (root) */
    HR_AGREE_CHOSEN,   /* for the batch that is being formed (root) */
    HR_AGREE_SIGNED,   /* stands for all ordered calls of its form, has an id, and is never announced itself */
    HR_AGREE_STATES
};

struct hr_agree_list {
    struct hr_agree_entry *first, *last;
};

/* Members that have joined, from the first announcement of JOIN until its round ends. */
struct hr_agree_absent {
    struct hr_agree_entry *entry; /* NULL: nobody here has joined */
    int is_known;                 /* some rank below has, its member perhaps not wholly; it needs requests in full */
    int last;                     /* the rank below that joined last, and when */
    uint64_t last_at;
};

enum { HR_AGREE_FORMS_SEEN = 512 };

struct hr_agree {
    struct hr_agree_config config;
    struct hr_agree_absent absent;
    struct hr_map entries;            /* by name */
    struct hr_pool pool;              /* of the entries, and of what they keep from round to round */
    struct hr_agree_entry **slots;    /* by id % capacity */
    struct hr_agree_list lists[HR_AGREE_STATES]; /* every entry is in that of its state, the one longest in it first */
    uint64_t ready_bytes;
    uint32_t active;                  /* entries that somebody waits for this round */
    uint32_t slots_used;              /* root: slots that have had an owner; from then on they always have one */
    struct hr_buffer merged_rows;     /* scratch */
    uint64_t rounds;                  /* of all names, ended so far */
    uint64_t *calls;                  /* [member_count] ordered calls that each has announced */
    uint64_t calls_over;              /* and those that are over */
    uint32_t forms_seen[HR_AGREE_FORMS_SEEN]; /* hashes of forms of calls, each at the place of its lower bits */
};

int hr_agree_init(struct hr_agree *agree, const struct hr_agree_config *config);
void hr_agree_fini(struct hr_agree *agree);

/* An announcement. HORO_OK, HORO_ERR_RESOURCE, or HORO_ERR_INTERNAL for what no correct rank sends. */
int hr_agree_announce_id(struct hr_agree *agree, int member, uint32_t id, struct hr_wire_rows rows, int64_t now_ns);
int hr_agree_announce_request(struct hr_agree *agree, int member, const struct hr_wire_message *message,
                              int64_t now_ns);

/*
 * Appends what has become complete to `out` as framed messages (hr_frame_*): IDS, ROWS and REQUEST for the parent, or,
 * at the root, FAIL records; agreed tensors go to the root's ready queue.
 */
int hr_agree_collect(struct hr_agree *agree, struct hr_buffer *out);

/* Whether there is something to collect; root: something for a batch. */
static inline int hr_agree_is_complete(const struct hr_agree *agree) {
    return agree->lists[HR_AGREE_COMPLETE].first != NULL;
}
static inline int hr_agree_is_ready(const struct hr_agree *agree) {
    return agree->lists[HR_AGREE_READY].first != NULL;
}

/*
 * The one tensor that is complete (not root), or ready (root), and that all here have announced by id: its id, else 0.
 * take ends its round as if it had been collected and, at the root, put into a batch: the caller writes it down.
 */
uint32_t hr_agree_lone(const struct hr_agree *agree);
void hr_agree_take_lone(struct hr_agree *agree);

/* The tensor of this id is in use, though nobody has announced it: it is not the next to lose its id. */
void hr_agree_note_use(struct hr_agree *agree, uint32_t id);
/* All have made their next ordered call, which nobody has announced. */
void hr_agree_skip_call(struct hr_agree *agree);

/* Root: appends the next BATCH record, framed, and applies it, if anything is ready. */
int hr_agree_form_batch(struct hr_agree *agree, struct hr_buffer *out);

/* Applies a BATCH, RESULT, FAIL, REQUEST or JOINED record from the parent. Collect what is complete before. */
int hr_agree_apply(struct hr_agree *agree, const struct hr_wire_message *record);

/*
 * join.c. A rank of this subtree has joined, at a time of this host's. And: something has moved here, so those
 * who wait for others to join have no reason to doubt that they will.
 */
void hr_agree_note_absence(struct hr_agree *agree, int rank, uint64_t at);
void hr_agree_excuse_absent(struct hr_agree *agree, int64_t now_ns);
/* Whether a member has: of a host below, whether all of its ranks and of those below it have. */
int hr_agree_is_absent(const struct hr_agree *agree, int member);

/* A tensor that some members have announced and others not; valid until the agreement changes. */
struct hr_agree_waiting {
    const char *name;
    int64_t since_ns;          /* its first announcement */
    int holds_up;              /* a member, which has not refused it; JOIN holds up nobody */
    const uint64_t *announced; /* bit per member, see hr_agree_has */
};

static inline int hr_agree_has(const uint64_t *members, int member) {
    return (members[member / 64] >> (member % 64) & 1) != 0;
}
/* Lists what has waited for at least age_ns; the first `capacity` of them are written. Returns how many there are. */
int hr_agree_list_waiting(const struct hr_agree *agree, int64_t now_ns, int64_t age_ns, struct hr_agree_waiting *out,
                          int capacity);
/* The state of a name, with who has announced it; IDLE: nobody has, or it is over. As long as list_waiting's. */
enum hr_agree_state hr_agree_look_up(const struct hr_agree *agree, struct hr_wire_text name,
                                     const uint64_t **announced);
/* Since when a tensor has been in this state, WAITING (for members) or, at the root, READY; about; 0: there is none. */
int64_t hr_agree_since(const struct hr_agree *agree, enum hr_agree_state state);

#endif
