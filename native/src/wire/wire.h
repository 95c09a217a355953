/*
 * Messages as bytes: little-endian, no padding, length-prefixed where they travel. Decoders trust nothing: they are
 * bounds-checked, allocate nothing, and reject what does not end exactly where it should. Decoded strings and arrays
 * point into the input.
 *
 * A message is one type byte and a body:
 *
 *   up the tree (rank -> leader -> parent host)            down the tree (a record of the response log)
 *   IDS      u32 n, n x u32 id                             BATCH    u32 n, n x ref, rows
 *   ROWS     u32 id, rows                                  FAIL     i32 status, str16 name, str16 text
 *   DATA     u32 id, u32 n, n bytes                        RESULT   u32 id, u32 n, n bytes
 *   REQUEST  i32 origin, i32 status, str16 text, rows, request
 *   LOST     i32 rank, i32 status, u8 reason, i32 by, str16 text    (both directions; enum hr_abort_reason; by: the
 *            rank that has found it; -1: nobody knows which; text: the words of a rank that has ended the group)
 *   BLOCKED  i32 rank, u32 question, str16 text, str16 others, moves, u32 n, n x lane    (up only; n is 0: the rank is
 *            not blocked any more; question: the number of the QUERY that this answers, 0: of none)
 *   QUERY    u32 question                         (down only; whether the ranks below are still blocked; never 0)
 *   ASK      i32 rank                             (down only; the ranks below are asked where they stand)
 *   LATE     i32 rank, str16 name, str16 text     (both directions; whoever knows which ranks have not announced the
 *            name ends the group, with the text behind them; empty text: a leader has passed it on, to the rank)
 *                                                          TUNE     u8 is final, u32 n, n x u64 value of a knob
 *   LEAVE    i32 rank, i32 status, str16 text     (both directions; what others are told; empty: it has shut down)
 *   DONE     i32 rank                             (both directions)
 *   MAIL     i32 from, i32 to, u8 kind, u8 dtype, i32 tag, i32 status, u64 send, u64 count, u32 n, n bytes
 *            (both directions; from one rank to another, engine/pairs/mail.h)
 *   JOINED   i32 rank, u64 at                     (up: this rank joins, all of its subtree need not; a record: the root
 *            knows of it. at: the time of that on the sender's host, in nanoseconds, 0: others have joined later; 0 in
 *            the record)
 *
 * REQUEST is a record too, with its origin and no rows: what a BATCH behind it has by name, where a rank has joined,
 * which has not submitted it.
 *
 *   ref      u32 id, str16 name; an empty name: the cached tensor `id`; else the name, which now gets `id` (0: not
 *            cached)
 *   request  u8 op, u8 reduce_op, u8 flags (1: transient, 2: on the GPU), i32 root, f64 prescale, f64 postscale,
 *            str16 name, u32 n, n x tensor; of teams: one tensor, int32 [m], and m x i32, its values: the ranks of a
 *            team to add, the number of one to remove
 *   tensor   u8 dtype, u8 wire dtype, u8 ndim, ndim x i64 extent; allgather, alltoall: the first extent is written as
 *            0, it may differ by rank
 *   lane     u32 team, u32 members of it, u64 bytes of its log executed, u32 n, n x u64: the hash of each name that is
 *            submitted to it and not done; 0: the rank has joined, which stands for all names
 *   moves    u64 sends that have ended, u64 receives that have ended, u32 bytes, and so many of those that have not, of
 *            each i32 the other rank, -1 in a receive from any, i32 tag, u8 is a send
 *   rows     var n, n x var: the first extents of an allgather, of each rank tensor by tensor; of an alltoall in the
 *            place of each those for rank 0, 1 ..., which add up to it; of all ranks whom the sender speaks for, host
 *            by host. n is 0 for all other operations, and not in ROWS, which is the announcement of a cached one.
 *            In the BATCH of a join: the rank that joined last, by its number in the job
 *   var      0 to 2^63 - 1, seven bits per byte, the lowest first; all bytes but the last one have the highest bit set
 *   str16    u16 bytes, UTF-8 without a terminator
 *
 * A request's bytes are canonical: two requests agree exactly when their bytes are equal. Fields that mean nothing for
 * the operation have one fixed value: reduce_op 0 and factors 1.0 unless it reduces, root 0 unless it is a broadcast,
 * wire dtype 0 unless the tensor is converted to travel. An id is never 0, a request's name never empty, and
 * no name holds a NUL.
 */
#ifndef HR_WIRE_WIRE_H
#define HR_WIRE_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "base/buffer.h"
#include "base/little_endian.h"
#include "base/status.h"

enum hr_wire_type {
    HR_WIRE_IDS = 1,
    HR_WIRE_REQUEST = 2,
    HR_WIRE_LOST = 3,
    HR_WIRE_LEAVE = 4,
    HR_WIRE_BATCH = 5,
    HR_WIRE_FAIL = 6,
    HR_WIRE_DONE = 7,
    HR_WIRE_DATA = 8,
    HR_WIRE_RESULT = 9,
    HR_WIRE_ROWS = 10,
    HR_WIRE_TUNE = 11,
    HR_WIRE_BLOCKED = 12,
    HR_WIRE_ASK = 13,
    HR_WIRE_QUERY = 14,
    HR_WIRE_JOINED = 15,
    HR_WIRE_MAIL = 16,
    HR_WIRE_LATE = 17,
};

enum {
    HR_WIRE_TYPES = HR_WIRE_LATE + 1,
    HR_WIRE_MESSAGE_MAX = 64 << 20, /* a longer length prefix is an error, never an allocation */
    HR_WIRE_TENSORS_MAX = 1 << 20,
    HR_WIRE_TEXT_MAX = UINT16_MAX,
    HR_WIRE_DATA_MAX = 1 << 16,
    HR_WIRE_MAIL_MAX = 1 << 13,
    HR_WIRE_MOVE_BYTES = 9,
    HR_WIRE_KNOBS_MAX = 64,
    HR_WIRE_VAR_MAX = 9, /* bytes */
    HR_WIRE_ON_GPU = 2,   /* among the flags of a request */
    HR_WIRE_ALL_NAMES = 0, /* the hash of no name, see lane */
    /* Of a request's canonical form, and of that with its rows: a REQUEST message holds it and the longest text. */
    HR_WIRE_REQUEST_MAX = HR_WIRE_MESSAGE_MAX - (1 + 4 + 4 + 2 + HR_WIRE_TEXT_MAX + HR_WIRE_VAR_MAX),
};

struct hr_wire_text {
    const char *data; /* not terminated; NULL only if bytes is 0 */
    size_t bytes;
};

/* First extents as they travel, without their number. */
struct hr_wire_rows {
    const uint8_t *data; /* walk with hr_wire_next_row */
    size_t bytes;
    uint32_t count;
};

struct hr_wire_tensor {
    int dtype;
    int wire_dtype;
    int ndim;
    int64_t shape[HORO_DIMS_MAX];
};

/* A decoded request; `bytes` .. `bytes + byte_count` is its canonical form. */
struct hr_wire_request {
    int op;
    int reduce_op;
    int transient;
    int on_gpu; /* an operation that moves data */
    int root_rank;
    double prescale;
    double postscale;
    struct hr_wire_text name;
    uint32_t tensor_count;
    const uint8_t *tensors; /* walk with hr_wire_next_tensor */
    uint32_t value_count;   /* of teams */
    const uint8_t *values;  /* int32, read with hr_wire_u32 */
    const uint8_t *bytes;
    size_t byte_count;
};

struct hr_wire_mail {
    int to, kind, dtype, tag;
    uint64_t send, count;
};

struct hr_wire_message {
    enum hr_wire_type type;
    const uint8_t *bytes; /* the whole message */
    size_t byte_count;
    int rank;   /* LOST (-1: unknown), BLOCKED, ASK (who asks), LATE, LEAVE, DONE, JOINED; REQUEST, MAIL: the origin */
    int status; /* LOST, LEAVE, FAIL, REQUEST, MAIL */
    enum hr_abort_reason reason; /* LOST */
    int by;     /* LOST (-1: unknown) */
    struct hr_wire_text name; /* FAIL, LATE */
    struct hr_wire_text text; /* FAIL, REQUEST, LOST, LATE, LEAVE, BLOCKED: what it waits for */
    struct hr_wire_text others; /* BLOCKED: a thread that may still submit something; empty: none may */
    int is_final;             /* TUNE: no other follows */
    uint32_t count;           /* IDS, BATCH, BLOCKED, TUNE */
    uint32_t id;              /* DATA, RESULT, ROWS */
    uint32_t question;        /* QUERY, BLOCKED */
    uint64_t at;              /* JOINED: a time */
    uint64_t sent, received;  /* BLOCKED: moves that have ended */
    const uint8_t *data;      /* DATA, RESULT: packed values; MAIL; BLOCKED: moves that have not, hr_wire_next_move */
    size_t data_bytes;        /* DATA, RESULT: at least 1 */
    const uint8_t *items;     /* IDS: read with hr_wire_u32; TUNE: hr_wire_u64; BATCH: hr_wire_next_ref;
                               * BLOCKED: hr_wire_next_lane */
    struct hr_wire_rows rows; /* ROWS, REQUEST, BATCH */
    struct hr_wire_request request;
    struct hr_wire_mail mail;
};

struct hr_wire_lane {
    uint32_t team, members;
    uint64_t executed;
    uint32_t count;
    const uint8_t *hashes; /* read with hr_wire_u64 */
};

/* A send or receive that is not done. */
struct hr_wire_move {
    int peer, tag, sends;
};

/* The name of an ordered call on the wire: one NUL, which is in no other name. */
static inline int hr_wire_is_call(struct hr_wire_text name) {
    return name.bytes == 1 && name.data[0] == '\0';
}

struct hr_wire_ref {
    uint32_t id;
    struct hr_wire_text name; /* bytes == 0: known by id */
};

/*
 * As hr_shape_bytes, for a tensor of an operation. One row of an allgather or alltoall (all extents but the first) must
 * fit by itself, also where this rank has none: another may have some. What decode refuses, and so what the engine must
 * not let in.
 */
int hr_wire_tensor_bytes(int op, const int64_t *shape, int ndim, int dtype, int64_t *bytes);

/* The length of the canonical form. */
size_t hr_wire_request_bytes(const horo_request *request);
/*
 * Appends the canonical form. Checks nothing: the engine has validated the request. HORO_OK or HORO_ERR_RESOURCE (no
 * memory, or longer than HR_WIRE_REQUEST_MAX). Of the tensors' memory it reads that of operations of teams alone.
 */
hr_status hr_wire_encode_request(struct hr_buffer *out, const horo_request *request);

/* One row as it travels; `room` has HR_WIRE_VAR_MAX bytes. */
struct hr_wire_rows hr_wire_encode_row(int64_t row, uint8_t *room);
/* The rows that this rank tells, none for operations that tell none; room: of as many bytes, NULL: they are counted. */
struct hr_wire_rows hr_wire_encode_rows(const horo_request *request, uint8_t *room);

/*
 * Each appends one whole message (no length prefix). HORO_OK or HORO_ERR_RESOURCE (no memory, or past a limit above);
 * on failure nothing is appended. A text longer than HR_WIRE_TEXT_MAX is cut.
 */
hr_status hr_wire_put_ids(struct hr_buffer *out, const uint32_t *ids, uint32_t count);
/*
 * All others, from the fields that decode sets; of a request `bytes` and `byte_count`. Where `data` of a DATA is NULL,
 * the caller writes the values to the end of `out`, until something else is appended. Of a BATCH and a BLOCKED, which
 * are built piece by piece into the same buffer, their beginning: behind it `count` refs and end_batch, or `count`
 * times a lane with so many hashes.
 */
int hr_wire_put(struct hr_buffer *out, const struct hr_wire_message *message);
int hr_wire_put_ref(struct hr_buffer *out, uint32_t id, struct hr_wire_text name);
int hr_wire_end_batch(struct hr_buffer *out, struct hr_wire_rows rows);
hr_status hr_wire_put_lane(struct hr_buffer *out, const struct hr_wire_lane *lane);
hr_status hr_wire_put_move(struct hr_buffer *out, struct hr_wire_move move);
int hr_wire_put_hash(struct hr_buffer *out, uint64_t hash);

/*
 * HORO_OK, or HORO_ERR_INTERNAL for bytes that are no message: an unknown type, op, reduce op or dtype, a shape that
 * hr_wire_tensor_bytes refuses, a wire dtype that does not go with dtype and operation, a name that is too long, a
 * count past the limit, a negative rank but for the -1 of a LOST without words, a reason that is none or unknown, a
 * status that is unknown, HORO_OK in LOST, LEAVE and FAIL, or HORO_IN_PROGRESS, a request that is not canonical, rows
 * that are written longer than they need to be or are of an operation that tells none, lanes that are not in the order
 * of their teams, a question without a number, a short or long body. Every item is checked here, so the walks below
 * cannot fail.
 */
int hr_wire_decode(const void *data, size_t bytes, struct hr_wire_message *message);
int hr_wire_decode_request(const void *data, size_t bytes, struct hr_wire_request *request);

/* Number `index` of an array: of the ids, knobs, values and hashes above. */
static inline uint32_t hr_wire_u32(const uint8_t *items, uint32_t index) {
    return hr_load_u32(items + 4 * (size_t)index);
}
static inline uint64_t hr_wire_u64(const uint8_t *items, uint32_t index) {
    return hr_load_u64(items + 8 * (size_t)index);
}
/* Each reads the item at *cursor (start with message->items, request->tensors or rows->data) and moves it on. */
void hr_wire_next_ref(const uint8_t **cursor, struct hr_wire_ref *ref);
void hr_wire_next_tensor(const uint8_t **cursor, struct hr_wire_tensor *tensor);
int64_t hr_wire_next_row(const uint8_t **cursor);
void hr_wire_next_move(const uint8_t **cursor, struct hr_wire_move *move);
void hr_wire_next_lane(const uint8_t **cursor, struct hr_wire_lane *lane);

/* "float32 [64, 128]" or "float32 [64, 128] as bfloat16", cut to fit; for messages. Returns out. */
char *hr_wire_describe_tensor(const struct hr_wire_tensor *tensor, char *out, size_t out_bytes);

#endif
