/*
 * One host's shared memory, seen by all its ranks at once: what belongs to the host and its ranks, then one *partition*
 * per team:
 *
 *   header | one block per rank | a ring from each rank to each other | partition 0 (all ranks) | partition 1 | ...
 *
 *   partition: header | one block per rank | one request ring per rank | response log | two slots per rank
 *
 * All partitions are alike, with room for every rank of the host; pages of what is never used are never touched. A
 * partition is mapped when its team is made, and the rings with the first send or receive, or at once by a leader that
 * passes them on between hosts. Atomics name their partner where they are used. Every word that one rank writes and
 * another polls has a cache line of its own, together only with words of the same writer. Ranks are counted by their
 * index on the host, in every partition.
 */
#ifndef HR_ARENA_ARENA_H
#define HR_ARENA_ARENA_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "base/status.h"

enum {
    HR_LINE = 64,
    HR_TEAMS_MAX = HORO_TEAMS_MAX,   /* numbered from 0, which has all ranks; the bits of a word */
    HR_REQUEST_RING_BYTES = 1 << 16, /* a power of two */
    HR_LOG_RING_BYTES = 1 << 18,     /* a power of two */
    HR_PAIR_RING_BYTES = 1 << 15,    /* a power of two */
    HR_PHASE_COUNT = 6,
    HR_LAST_WORDS_MAX = 895, /* bytes */
    HR_PROOF_WORDS = 2,
    HR_LONE_ROWS_KEPT = 2,
    HR_LONE_MESSAGE_MAX = 124,
};

/* The reason why the group ended; kept in one word so that it can be set once by compare-and-swap. */
struct hr_abort {
    int code; /* enum horo_status; 0: the group is whole */
    int rank; /* the rank at fault, -1 if unknown */
    int by;   /* the rank that has found it, -1 if unknown */
    enum hr_abort_reason reason;
};

enum hr_member_state {
    HR_MEMBER_ABSENT = 0,
    HR_MEMBER_PRESENT = 1,
    HR_MEMBER_LEFT = 2,
};

/* A byte stream through memory: one writer, any number of readers that each keep their own position. */
struct hr_ring_head {
    _Alignas(HR_LINE) _Atomic uint64_t written; /* total bytes; writer: release, readers: acquire */
};

/* From one rank to another: the head of their ring. */
struct hr_pair_head {
    struct hr_ring_head ring;
    _Alignas(HR_LINE) _Atomic uint64_t read; /* by the receiver, as what follows, but for the 1 */
    _Atomic uint32_t wants_room; /* 1: the ring was full; the sender waits for it to be read */
};

/* Of a host, see node/wait.h: until when waits do without yields, and for how long that is; 0: never. */
struct hr_contention {
    _Atomic int64_t until_ns, while_ns;
};

struct hr_arena_header {
    _Alignas(HR_LINE) _Atomic uint64_t abort_word; /* set once, seq_cst: partner of every wait's check */
    /* of the LEAVE record of all ranks, once one here has executed it: the log is closed; written like the other */
    _Atomic uint64_t left_word;
    _Atomic uint32_t wants_leave; /* 1: some rank of this host has asked to leave: its leader must drive */
    /* the last question whether the ranks here are still blocked; written by the leader, see report/deadlock.h */
    _Atomic uint32_t blocked_question;
    _Atomic uint32_t roll_call; /* the last one, which the ranks here that drive answer; see report/late.c */
    _Atomic int32_t asked_rank; /* 1 + the leader whom one here has asked who is late; 0: none */
    /* 1 + the place (executor.h) where the LEAVE record begins; written by the leader with it; 0: none */
    _Atomic uint64_t leave_at;
    /* when ranks of the team last said here that they have no answer from its leader */
    _Alignas(HR_LINE) _Atomic uint64_t stall_report_ns[HR_TEAMS_MAX];
    /* ranks here that have joined the team and have not left its partition */
    _Alignas(HR_LINE) _Atomic uint32_t users[HR_TEAMS_MAX];
    /* how often the partition has been left by all and cleaned */
    _Atomic uint32_t cleanings[HR_TEAMS_MAX];
    _Alignas(HR_LINE) struct hr_contention contention;
};

/* Written by its rank unless a comment says otherwise. */
struct hr_arena_block {
    _Alignas(HR_LINE) _Atomic uint32_t sleeping; /* seq_cst on both sides: see hr_node_wake */
    _Alignas(HR_LINE) _Atomic uint32_t state;    /* enum hr_member_state */
    /* 1 + the core that its driver was on, 0: unknown; see node/wait.h */
    _Atomic int32_t core;
    /* waiting for others: by then it will have looked, and moved this on */
    _Atomic int64_t alive_until_ns;
    /* likewise: the oldest call that waits behind a refusal: since when, times HR_TEAMS_MAX, and its team; 0: none */
    _Atomic uint64_t behind;
    _Atomic uint32_t pending; /* requests submitted there and not done */
    _Atomic uint32_t present; /* the last roll call that it has answered */
    /* ranks here that wait have called this one, a leader of theirs, which drives so long for them; 0: none has */
    _Atomic int64_t called_until_ns;
    /* changes whenever something has moved there, seen when it begins to wait */
    _Atomic uint64_t moves;
    _Alignas(HR_LINE) _Atomic uint64_t log_executed[HR_TEAMS_MAX]; /* see place in executor.h */
    /* questions where its program stands, counted by who asks, and those answered; see hr_node_ask */
    _Alignas(HR_LINE) _Atomic uint32_t asked;
    _Atomic uint32_t calls; /* of its background thread, see hr_node_call; by anybody */
    _Atomic uint32_t answered;
    _Atomic uint32_t answers; /* there is somebody who does */
    /* for those who read its memory, see collective/direct.c; process 0: nobody can */
    _Alignas(HR_LINE) _Atomic int32_t process;
    _Atomic uint64_t proof_at;
    _Atomic uint64_t proof[HR_PROOF_WORDS];
    /* grows whenever a rank has written into its ring to this one */
    _Alignas(HR_LINE) _Atomic uint64_t bell;
    /* 1 + the rank whose last words stand in `words`, 0: none; see below */
    _Alignas(HR_LINE) _Atomic uint32_t words_of_rank;
    _Atomic uint32_t words_claimed;
    char words[HR_LAST_WORDS_MAX + 1];
};

struct hr_partition_header {
    _Alignas(HR_LINE) _Atomic uint64_t announced; /* counts announcements; ranks add, the leader compares */
    /* Phase counters: how often any rank has arrived; see hr_team_arrive. */
    struct {
        _Alignas(HR_LINE) _Atomic uint64_t arrived;
    } phase[HR_PHASE_COUNT];
    _Alignas(HR_LINE) _Atomic uint64_t lone; /* the ranks counted in for an operation, see engine/round/round.h */
    struct hr_ring_head log;
    _Atomic uint32_t log_wants_room; /* written by the leader: the log was full, readers wake it */
};

/* A ROWS message of an operation that is alone; written before its rank counts itself in, read when all have. */
struct hr_lone_rows {
    uint32_t bytes;
    int32_t is_ahead; /* the rank has begun as though all told these rows */
    uint8_t message[HR_LONE_MESSAGE_MAX];
};

/* Written by its rank unless a comment says otherwise. */
struct hr_partition_block {
    _Alignas(HR_LINE) _Atomic uint64_t log_read; /* bytes of the log taken out; the leader waits for the slowest */
    _Atomic uint32_t wants_room;                 /* its request ring was full: the leader wakes it after reading */
    _Atomic uint64_t reads_peers; /* whether it has read the members' memory, see collective/direct.c; 0: not tried */
    struct hr_ring_head requests;
    _Alignas(HR_LINE) _Atomic uint64_t requests_read; /* written by the leader */
    _Alignas(HR_LINE) struct hr_lone_rows lone_rows[HR_LONE_ROWS_KEPT]; /* of rounds in turn */
};

/* One team's part of the arena, as this process sees it. */
struct hr_partition {
    char *base;
    size_t segment_bytes;
    struct hr_partition_header *header;
    struct hr_partition_block *blocks;
    char *request_rings;
    char *log_ring;
    char *slots;
};

struct hr_arena {
    char *base;
    int fd;              /* -1: the memory is the caller's */
    size_t memory_bytes; /* the caller's */
    int local_rank;
    int local_size;
    size_t segment_bytes;
    struct hr_arena_header *header;
    struct hr_arena_block *blocks;
};

/* Bytes for one host with so many partitions; the layout that hr_arena_map expects. 0: impossible numbers. */
uint64_t hr_arena_layout_bytes(int local_size, size_t segment_bytes, int partitions);

/*
 * Maps what belongs to the host and its ranks. Uses `memory`, of memory_bytes, if it is not NULL (ranks that are
 * threads of one process share one mapping), else fd, which stays the caller's and must live as long. HORO_OK, or
 * HORO_ERR_USAGE / HORO_ERR_RESOURCE with *error set.
 */
hr_status hr_arena_map(struct hr_arena *arena, void *memory, size_t memory_bytes, int fd, int local_rank,
                       int local_size, size_t segment_bytes, struct hr_error *error);
void hr_arena_unmap(struct hr_arena *arena);

/* The heads and rings of all pairs: those to a rank stand together, by the sender. Statuses as hr_arena_map. */
struct hr_pair_rings {
    struct hr_pair_head *heads;
    char *rings;
};
hr_status hr_pair_rings_map(const struct hr_arena *arena, struct hr_pair_rings *rings, struct hr_error *error);
void hr_pair_rings_unmap(const struct hr_arena *arena, struct hr_pair_rings *rings);

/* The partition of a team. The file grows with the first rank that maps it. Status and *error as hr_arena_map. */
hr_status hr_partition_map(const struct hr_arena *arena, int team, struct hr_partition *partition,
                           struct hr_error *error);
void hr_partition_unmap(const struct hr_arena *arena, struct hr_partition *partition);

/*
 * A rank joins a team, whose partition it has mapped, and leaves it. The last one to leave cleans the partition: all
 * its words are 0 again, and its pages are given back. 1 for that one.
 */
void hr_partition_enter(const struct hr_arena *arena, int team);
int hr_partition_leave(const struct hr_arena *arena, int team, const struct hr_partition *partition);

static inline char *hr_partition_request_ring(const struct hr_partition *partition, int local_rank) {
    return partition->request_rings + (size_t)local_rank * HR_REQUEST_RING_BYTES;
}

/* Whether the LEAVE record is written, and a local rank has executed all that stands before it in the world's log. */
int hr_arena_has_closed(const struct hr_arena *arena, int local_rank);

/* Of abort_word or left_word: the first caller sets it, later ones change nothing; and what it is. */
void hr_arena_end_once(_Atomic uint64_t *end_word, struct hr_abort end);
struct hr_abort hr_arena_end_of(const _Atomic uint64_t *end_word);
struct hr_abort hr_arena_aborted(const struct hr_arena *arena);

/*
 * Rings. `write` copies up to `bytes` that fit before the slowest reader (at position `slowest_read`) and returns how
 * many; `read` copies up to `bytes` from position *read on, moves it, and returns how many. Neither blocks.
 */
size_t hr_ring_write(struct hr_ring_head *head, char *ring, size_t ring_bytes, uint64_t slowest_read, const void *data,
                     size_t bytes);
size_t hr_ring_read(const struct hr_ring_head *head, const char *ring, size_t ring_bytes, uint64_t *read, void *data,
                    size_t bytes);

/* ---- Last words ---- */

/*
 * The words of a rank that has ended the group, or cannot go on, about the reason. Each process keeps the words of one
 * rank in its own block of the arena: its own, or, as a leader, those that came from another host. They are written
 * before the abort word that names the rank, so whoever reads that rank in the abort word finds its words.
 */

/* Keeps the first words that this process has for any rank; longer ones are cut to HR_LAST_WORDS_MAX bytes. */
void hr_arena_keep_last_words(struct hr_arena *arena, int rank, const char *words, size_t bytes);

/* The words of a rank, terminated; NULL: nobody here has them. They live as long as the arena and do not change. */
const char *hr_arena_last_words(const struct hr_arena *arena, int rank);

/* ---- Sleeping on a word ---- */

/* Whoever sleeps on a word, in any process, wakes up. A change of the word comes first. */
void hr_word_wake(_Atomic uint32_t *word);
/* Sleeps while the word has this value. 1: woken, perhaps for nothing, or another value; 0: time is up; -1: signal. */
int hr_word_sleep(_Atomic uint32_t *word, uint32_t value, const struct timespec *timeout);

#endif
