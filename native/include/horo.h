/*
 * horo.h: the whole public surface of the native core.
 *
 * This one file is read by the C compiler and by cffi (native/build.py drops the lines between the
 * `cffi: skip` marks and the include guard), so there is no second set of declarations to drift.
 *
 * A horo_context is one rank. Nothing here is global: many contexts may live in one process, and every
 * function may be called from any thread unless it says otherwise.
 */
#ifndef HORO_H
#define HORO_H

/* cffi: skip */
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define HORO_API __attribute__((visibility("default")))
#else
#define HORO_API
#endif
/* cffi: end */

/* Grouped by what is damaged; horo/errors.py maps each code to one exception class. */
enum horo_status {
    HORO_OK = 0,
    HORO_IN_PROGRESS = 3, /* no outcome that the core uses elsewhere has this number */
    /* the caller: nothing has changed */
    HORO_ERR_USAGE = -1,
    HORO_ERR_NOT_INITIALIZED = -2,
    HORO_ERR_MISMATCH = -3,
    HORO_ERR_UNSUPPORTED = -4,
    HORO_ERR_DUPLICATE_NAME = -5,
    HORO_ERR_HANDLE = -6, /* there is no such handle, or it has been released */
    /* this process */
    HORO_ERR_RESOURCE = -20,
    HORO_ERR_FORKED = -21,
    /* the group of ranks: rebuild it */
    HORO_ERR_PEER_LOST = -40,
    HORO_ERR_STALLED = -41,
    HORO_ERR_TIMEOUT = -42,
    HORO_ERR_ABORTED = -43,
    HORO_ERR_DEADLOCK = -44,
    /* horo itself */
    HORO_ERR_INTERNAL = -60,
};

enum horo_dtype {
    HORO_UINT8 = 0, HORO_INT8 = 1, HORO_INT16 = 2, HORO_INT32 = 3, HORO_INT64 = 4, HORO_FLOAT16 = 5, HORO_BFLOAT16 = 6,
    HORO_FLOAT32 = 7, HORO_FLOAT64 = 8, HORO_BOOL = 9,
    HORO_DTYPE_COUNT = 10, /* of those above, whose values are calculated with, as those of unsigned integers are */
    /* The other dtypes below are moved; of complex numbers there are SUM, AVERAGE and PRODUCT. */
    HORO_UINT16 = 10, HORO_UINT32 = 11, HORO_UINT64 = 12, HORO_COMPLEX32 = 13, HORO_COMPLEX64 = 14,
    HORO_COMPLEX128 = 15, HORO_FLOAT8_E4M3FN = 16, HORO_FLOAT8_E5M2 = 17, HORO_FLOAT8_E4M3FNUZ = 18,
    HORO_FLOAT8_E5M2FNUZ = 19, HORO_FLOAT8_E8M0FNU = 20, HORO_FLOAT4_E2M1FN_X2 = 21, HORO_BITS8 = 22, HORO_BITS16 = 23,
    HORO_BITS1X8 = 24, HORO_BITS2X4 = 25, HORO_BITS4X2 = 26,
    HORO_ANY_DTYPE_COUNT = 27,
};

enum horo_op {
    HORO_ALLREDUCE = 0,
    HORO_ALLGATHER = 1,
    HORO_BROADCAST = 2,
    HORO_BARRIER = 3,
    HORO_ADD_TEAM = 4, HORO_REMOVE_TEAM = 5, /* horo_add_team and horo_remove_team only */
    HORO_REDUCESCATTER = 6, HORO_ALLTOALL = 7,
    HORO_JOIN = 8, /* horo_join only */
    HORO_REDUCE = 9, HORO_GATHER = 10, HORO_SCATTER = 11,
    HORO_OP_COUNT = 12, /* of those above, which members agree on */
    HORO_SEND = 12, HORO_RECEIVE = 13, /* horo_pairs.h */
    HORO_ANY_OP_COUNT = 14,
};

/* The numbers are Horovod's. */
enum horo_reduce_op {
    HORO_AVERAGE = 0,
    HORO_SUM = 1,
    HORO_ADASUM = 2, /* allreduce of floats: tensor by tensor, pairs of ranks as a tree, see collective/adasum.c */
    HORO_MIN = 3,
    HORO_MAX = 4,
    HORO_PRODUCT = 5,
    HORO_BAND = 6, HORO_BOR = 7, HORO_BXOR = 8, /* of integers bit by bit, and of bool; never scaled */
};

enum horo_log_level {
    HORO_LOG_TRACE = 0, HORO_LOG_DEBUG = 1, HORO_LOG_INFO = 2, HORO_LOG_WARNING = 3, HORO_LOG_ERROR = 4,
    HORO_LOG_OFF = 5,
};

enum horo_submit_flags {
    /* The caller waits at once: do not wake the engine thread, horo_wait drives the engine itself. */
    HORO_SUBMIT_SYNC = 1,
    /* The name is used once (an automatic name): keep no entry for it in the response cache. */
    HORO_SUBMIT_TRANSIENT = 2,
    /* An allgather or alltoall: its results go into the outputs of its tensors, see horo_tensor. Of this rank alone. */
    HORO_SUBMIT_INTO = 4,
    /* The same, but a result of other than output_bytes goes into memory of horo: then horo_run leaves the handle. */
    HORO_SUBMIT_OFFER = 8,
    /*
     * Without a name: it is matched by its number among the ordered calls of its team, on every rank, and they run in
     * that order. What is pending together may run as one batch, so no two of these share memory. Different calls of
     * one number fail on all ranks, with HORO_ERR_MISMATCH and both calls in the sentence; the next number is whole.
     * Of host memory, and not where a rank has joined.
     */
    HORO_SUBMIT_ORDERED = 16,
};

typedef struct horo_context horo_context;
typedef struct horo_watch horo_watch;

/* One thread of this rank that waits for a request; see horo_report_blocked. */
typedef struct {
    int64_t handle;
    const char *place; /* in the program: "train.py:12" */
} horo_waiting;

/* One dense, contiguous tensor. Memory stays the caller's and must live until the request is done. */
typedef struct {
    const void *input;   /* of each rank; broadcast: the root's data (may equal output) */
    /*
     * Result; may equal input. Reducescatter: the rows that fall to this rank, apart from the input unless it is alone
     * in the team; the rows are cut among the members in their order, the first ones have one more where they cannot
     * have equally many. Allgather, alltoall: horo allocates the result, unless HORO_SUBMIT_INTO says that it goes
     * here, all of output_bytes; the input of an allgather may be this rank's place in it, else they do not overlap. If
     * the result has other than output_bytes, the request fails on this rank alone, with HORO_ERR_USAGE, when all have
     * done their part; nothing is written to that output. Reduce and gather: the root's alone, and so is the input of a
     * scatter; others have NULL. The shape of a gather or scatter is that of one member's block; the root has those of
     * all, in their order, one behind the other, and its own block may be its place among them.
     */
    void *output;
    const int64_t *shape; /* ndim extents, copied by horo_submit */
    int32_t ndim;         /* 0 for a scalar */
    int32_t dtype;        /* enum horo_dtype */
    int32_t wire_dtype;   /* 0: travels as it is; a reduction of float32 and float64: HORO_FLOAT16 or HORO_BFLOAT16 */
    int32_t split_count;  /* alltoall: members of the team; else not looked at */
    int64_t output_bytes; /* with HORO_SUBMIT_INTO or _OFFER; else not looked at */
    /*
     * alltoall: rows of the input for each member, one behind the other, all shape[0] together; copied by horo_submit
     */
    const int64_t *splits;
} horo_tensor;

/*
 * One request: a single tensor or a group that starts all or nothing and shares one name, one handle
 * and one place in the agreement. Everything is copied; pointers need live only during the call.
 */
typedef struct {
    const char *name; /* UTF-8, at most HORO_NAME_MAX bytes; equal on all ranks; with HORO_SUBMIT_ORDERED not read */
    int32_t op;        /* enum horo_op */
    int32_t reduce_op; /* of a reduction: allreduce, reducescatter, reduce; else 0 */
    int32_t root_rank; /* broadcast, reduce, gather, scatter; else 0: of the job, in every team */
    int32_t flags;     /* enum horo_submit_flags */
    double prescale;   /* of a reduction: multiplied in before it, 1.0 for none */
    double postscale;  /* of a reduction: multiplied in after it (AVERAGE divides by size as well) */
    const horo_tensor *tensors;
    int32_t tensor_count; /* 0 for barrier */
    int32_t team;         /* whose members do it, by its id; 0: all ranks */
    int32_t device;       /* 0: the tensors are in host memory; n + 1: in that of GPU n, see horo_use_cuda */
    int32_t timeout_ms;   /* when it is not done by then, the group ends, with HORO_ERR_TIMEOUT; 0: none */
    uint64_t stream;      /* of that GPU: the caller's current CUDA stream; values are taken behind what is on it now */
} horo_request;

/* A set of ranks to do collectives among themselves, beside all others. */
typedef struct {
    const int32_t *ranks; /* [size] ascending */
    int32_t size;
    /*
     * As in horo_setup, where the members are on several hosts, between the members: hosts are numbered by their lowest
     * member, the lowest member of a host leads there, and local indices count members. NULL: no links, as for a rank
     * that is no member and for members on one host.
     */
    const int32_t *control_fds;
    const int32_t *data_fds;
} horo_team_setup;

/* The functions of MPI that horo calls, in the order of horo_mpi.functions: HORO_MPI_ISSEND stands for MPI_Issend. */
enum horo_mpi_function {
    HORO_MPI_ISSEND = 0, HORO_MPI_IRECV = 1, HORO_MPI_TEST = 2, HORO_MPI_CANCEL = 3, HORO_MPI_REQUEST_FREE = 4,
    HORO_MPI_FINALIZED = 5, HORO_MPI_FUNCTION_COUNT = 6,
};

/*
 * The MPI of this process, by which data between hosts travels, found where it is loaded: there is none when horo is
 * built. Nothing here is owned; communicator and library outlive the context. The communicator is horo's alone and
 * returns errors.
 */
typedef struct {
    /* of every handle: 4, an int (MPICH and its kin), or 8, a pointer (Open MPI, the ABI of MPI 5) */
    int32_t handle_bytes;
    int32_t status_bytes;   /* of an MPI_Status, at most HORO_MPI_STATUS_MAX */
    int32_t message_bytes;  /* most bytes in one call of MPI, 1 to HORO_MPI_MESSAGE_MAX; equal on all ranks */
    int32_t size;           /* of the communicator */
    uint64_t communicator;  /* handles by value, the lower bytes count */
    uint64_t byte;          /* MPI_BYTE */
    uint64_t functions[6];  /* HORO_MPI_FUNCTION_COUNT addresses */
    const int32_t *rank_of_host;  /* [hosts] whom data goes to there, by number in the communicator; -1: nobody */
    const int32_t *send_tags;     /* [hosts], or NULL for all 0: tags by peer let several ranks share one number */
    const int32_t *recv_tags;     /* [hosts], or NULL for all 0 */
} horo_mpi;

/*
 * Values that may change in a job. SEGMENT: bytes, at most a slot, multiples of 4096; PIECE: bytes sent, received and
 * reduced at once between hosts; SOCKETS: in use, of those for data to each peer; FUSION: as fusion_bytes; DOUBLING:
 * most bytes of a share that hosts reduce by recursive doubling; CARRIED: of a lone tensor that is announced with its
 * data; CYCLE: as cycle_time_us; OVERLAP, for Python: gradients travel 1: behind backward, 2: meanwhile, 0: as set
 */
enum horo_knob {
    HORO_KNOB_SEGMENT = 0, HORO_KNOB_PIECE = 1, HORO_KNOB_SOCKETS = 2, HORO_KNOB_FUSION = 3, HORO_KNOB_DOUBLING = 4,
    HORO_KNOB_CARRIED = 5, HORO_KNOB_CYCLE = 6, HORO_KNOB_OVERLAP = 7, HORO_KNOB_COUNT = 8,
    HORO_KNOB_LIMIT = 1 << 30, /* of every value */
};

/*
 * The facts that the bootstrap hands over: who is where, the mapped-to-be arena and connected descriptors. "Host" here
 * means a set of ranks that share one arena; hosts are numbered by their lowest rank, and the lowest rank of a host is
 * its leader. `local index` is the position among the ranks of a host, in rank order. On success the context owns all
 * descriptors; on failure the caller still does. -1 means "none".
 */
typedef struct {
    int32_t rank;
    int32_t size;
    const int32_t *host_of_rank;          /* [size] host index of each rank */
    const char *const *host_name_of_rank; /* [size] for messages */
    /* memfd of at least horo_arena_bytes(...) bytes, zeroed, shared by the host */
    int32_t arena_fd;
    void *arena_memory; /* not NULL: the arena, mapped already and outliving the context; for ranks that
                           are threads of one process; arena_fd is not looked at then */
    uint64_t arena_memory_bytes;          /* how long it is: room for teams to come, see horo_arena_bytes */
    uint64_t segment_bytes; /* of one arena slot, and of segments where `tuned` is NULL; equal on all ranks */
    const int32_t *wake_fds; /* [ranks on this host] eventfds, by local index; ignored in a job of one host */
    const int32_t *life_fds;    /* [ranks on this host] stream sockets whose EOF means death; the leader has one per
                                   other local index, the others have one, to the leader (index 0); else -1 */
    const int32_t *control_fds; /* [hosts] leaders only: stream sockets to the leaders of the hosts beside this one in
                                   the tree of hosts, where a host's parent is its number without the lowest bit; else
                                   -1. NULL: no links, as in a job of one host, where this is not looked at */
    const int32_t *data_fds; /* [hosts * sockets_per_peer] ranks with local index < smallest host: stream sockets to the
                                rank of the same local index on each host whose number is a power of two apart, round
                                the ring of hosts, in one direction or the other; number i of them at
                                host * sockets_per_peer + i at both ends; else -1. NULL: no links, and what moves data
                                fails */
    int32_t sockets_per_peer;             /* for data, 1 to HORO_SOCKETS_PER_PEER_MAX; 0: one; equal on all ranks */
    uint64_t direct_bytes; /* cost of a read of a peer's memory, in bytes copied; 0: none is; equal on all ranks */
    uint64_t fusion_bytes;                /* most bytes fused into one batch; 0: no fusion */
    int32_t cache_capacity;               /* entries of the response cache; 0: off */
    int32_t spin_us;                      /* longest spin before sleeping; spinning gives way to others */
    int32_t cycle_time_us;                /* extra wait for more tensors before a batch is formed, default 0 */
    int32_t stall_warning_ms;             /* 0: never warn */
    int32_t stall_shutdown_ms;            /* 0: never give up */
    int32_t peer_timeout_ms;              /* silence on a link with work pending after which the peer is lost */
    int32_t log_level;                    /* enum horo_log_level */
    int32_t leaves_crowded_cores; /* 1: a thread that waits on a core which other ranks use moves to one that fewer use,
                                     by sched_setaffinity, and has its affinity back at once; 0: it stays */
    int32_t sleeps_under_contention; /* 1: where other programs want the cores, waits soon sleep; 0: they spin */
    const horo_mpi *mpi;                  /* NULL: none */
    const uint64_t *tuned; /* [HORO_KNOB_COUNT] values that the job begins with and that may change, one past the limit
                              for what it begins with elsewhere; equal on all ranks; NULL: none changes */
    struct horo_watch *watch; /* of the life lines, outlives this context; NULL: there are none */
    struct horo_log_queue *log_queue;     /* for messages of this context, which it outlives; NULL: all go to stderr */
} horo_setup;

/* Counters since creation; for tests, benchmarks and reports. */
typedef struct {
    uint64_t requests;         /* submitted */
    uint64_t cache_hits;       /* announced by id */
    uint64_t batches;          /* executed */
    uint64_t counted;          /* of these, agreed on by counting, without a leader: operations that were alone */
    uint64_t tensors, bytes;   /* executed; and of these */
    uint64_t messages_sent;    /* control messages to other hosts */
    uint64_t link_bytes;       /* of data, handed to links to other hosts */
    uint64_t sleeps;           /* times a driver slept */
    uint64_t wakes;            /* of others that slept, and of this rank's background thread where it is parked */
    uint64_t moves;            /* of a thread that waited to a core with fewer ranks; see leaves_crowded_cores */
    uint64_t mpi_stranded;     /* transfers given up that MPI has not given back: it may still touch their memory */
    uint64_t blocked_ns, moved_ns; /* of any thread in a wait that is over; and the data of a batch moved meanwhile */
} horo_counters;

/* The events that a rank notes as its work goes along. */
enum horo_event_kind {
    HORO_EVENT_SUBMITTED = 0, /* a request, by a caller here */
    /* a request that all ranks have submitted: it is a part of the batch whose record comes next in the log */
    HORO_EVENT_AGREED = 1,
    /* that batch, behind its AGREED: from now on data moves. It bears its first request's name */
    HORO_EVENT_BEGUN = 2,
    HORO_EVENT_ENDED = 3,     /* a request, well */
    /* a request that ranks have submitted differently; those that end with their group are not noted */
    HORO_EVENT_FAILED = 4,
    HORO_EVENT_LEFT = 5,      /* the group has ended because a rank shut horo down */
    /* the group has ended because of a rank that is lost, stalled or in error: this rank has heard of it */
    HORO_EVENT_LOST = 6,
};

/* One of them. */
typedef struct {
    /* CLOCK_MONOTONIC; read from the processor's counter, so true to some microseconds for recent events */
    int64_t time_ns;
    int64_t bytes;   /* of the request's tensors here; BEGUN: of the whole batch; LEFT, LOST: 0 */
    int32_t event;   /* enum horo_event_kind */
    int32_t op;      /* enum horo_op; LEFT, LOST: -1 */
    int32_t status;  /* FAILED, LOST: enum horo_status; else HORO_OK */
    int32_t team;    /* number of the request's; 0: all ranks */
    /* BEGUN: requests in the batch; LEFT, LOST: the rank at fault, -1: not known; else 0, or, of a request while a
       timeline is written, a hash of its name */
    int32_t number;
    char name[36];   /* of the request; of one longer than 32 bytes "..." and its end; LEFT, LOST: empty */
} horo_event;
enum { HORO_NAME_MAX = 1023, HORO_MESSAGE_MAX = 1024, HORO_DIMS_MAX = 64, HORO_EVENTS_MAX = 1024 };
enum { HORO_SOCKETS_PER_PEER_MAX = 8, HORO_TEAMS_MAX = 64, HORO_TEAM_ID_STEP = 256 };
enum { HORO_WAITING_MAX = 16, HORO_CALLERS_MAX = 256, HORO_MPI_STATUS_MAX = 128, HORO_MPI_MESSAGE_MAX = 1 << 30 };
/* "0.1.0+abi37": ranks compare it at init and refuse to mix. */
HORO_API const char *horo_version(void);
HORO_API const char *horo_status_name(int status);
HORO_API size_t horo_dtype_bytes(int dtype);
/* The SIMD level in use: "avx512", "avx2", "neon" or "scalar". */
HORO_API const char *horo_simd_name(void);

/*
 * Bytes of arena memory for one host of local_size ranks and so many teams, that of all ranks included. Pages are
 * touched only when used. A memfd grows as teams are added: for one team is enough.
 */
HORO_API uint64_t horo_arena_bytes(int32_t local_size, uint64_t segment_bytes, int32_t teams);

/*
 * Makes, on one rank for horo_setup, what a host's ranks share: a memfd of so many zero bytes, which can grow but not
 * shrink, and a nonblocking eventfd at zero; close-on-exec, the caller's. HORO_OK or HORO_ERR_RESOURCE, a sentence.
 */
HORO_API int horo_create_memory(uint64_t bytes, int32_t *descriptor, char *error, size_t error_bytes);
HORO_API int horo_create_wake(int32_t *descriptor, char *error, size_t error_bytes);

/*
 * A thread that sleeps until a life line of any context of this process ends. HORO_OK or HORO_ERR_RESOURCE, a sentence.
 * No context may use it when it is destroyed; in a forked child only its two descriptors are closed.
 */
HORO_API int horo_create_watch(horo_watch **watch, char *error, size_t error_bytes);
HORO_API void horo_destroy_watch(horo_watch *watch);

/*
 * Creates the context of one rank and starts its background thread. Does not wait for the other ranks.
 * On failure returns a status and writes a sentence to error (error_bytes long).
 */
HORO_API int horo_create(const horo_setup *setup, horo_context **context, char *error, size_t error_bytes);

/*
 * Leaves the group, which ends it for all ranks at one place of their common log: what was agreed on before is finished
 * first, everywhere; what is pending behind it fails with HORO_ERR_ABORTED, everywhere. Then joins the thread and frees
 * all. If nothing moves for two seconds (ten, where this rank is done and others are not), it leaves all the same,
 * which ends the group at once. Calls of horo_wait, horo_wait_any, horo_finish and horo_run that wait already return
 * first, with what has become of their requests. No other call may be running, and none may follow. NULL is allowed.
 */
HORO_API void horo_destroy(horo_context *context);
/*
 * Leaves the group as horo_destroy, which follows. What is not finished then gets `status`, here and elsewhere, with
 * 895 bytes of `words`: HORO_ERR_PEER_LOST, the program's error; HORO_ERR_ABORTED, what it has done, or "".
 */
HORO_API void horo_leave(horo_context *context, int32_t status, const char *words);
/*
 * Ends the group at once: here and on all ranks, what is pending and what follows fails with HORO_ERR_ABORTED and
 * `words`, as above. Other threads may wait: they return first. Waits for no rank, but half a second for a link that is
 * full. Gives all but memory back; horo_destroy follows, when nobody uses the context any more.
 */
HORO_API void horo_abort(horo_context *context, const char *words);
/* The step that the program is in, from 1, or 0, is there until horo_destroy. Of an op it has submitted so many. */
HORO_API void horo_show_step(horo_context *context, const int64_t *step);
HORO_API uint64_t horo_count_of(horo_context *context, int32_t op);
/* In a forked child: closes its copies of all descriptors; every later call says HORO_ERR_FORKED. */
HORO_API void horo_after_fork(horo_context *context);
/* Never blocks. On HORO_OK *handle is positive, for horo_release; 0 without a context, where it is only checked. */
HORO_API int horo_submit(horo_context *context, const horo_request *request, int64_t *handle, char *error,
                         size_t error_bytes);

/*
 * A call of this rank was refused: those of others by its name fail with `status` (USAGE, UNSUPPORTED, RESOURCE), this
 * rank and the reason. Never blocks. Pending until all have made the call. Does nothing where the name is pending here.
 * NULL: it was an ordered call, whose number it takes.
 */
HORO_API int horo_refuse(horo_context *context, int32_t team, const char *name, int32_t status, const char *reason);

/*
 * horo_submit (give it HORO_SUBMIT_SYNC), horo_wait and, after HORO_OK, horo_release at once, since the ways in and out
 * are most of what a small operation costs. *handle is 0 unless one is left: after HORO_OK, for results that did not
 * fit what was offered (HORO_SUBMIT_OFFER), else to be waited for and asked for its error; and to be released.
 */
HORO_API int horo_run(horo_context *context, const horo_request *request, int32_t timeout_ms, int64_t *handle,
                      char *error, size_t error_bytes);

/*
 * Adds a team, or removes one. Both are operations of all ranks, members and others, which agree on them as on every
 * operation: on the same ranks, or the same team. Neither blocks; wait for the handle as for that of horo_submit. Teams
 * run side by side, none waits for another.
 *
 * One change at a time: a second one is refused while the first is pending. Both have one name, horo_change_name(), so
 * ranks that differ in the order of their changes get HORO_ERR_MISMATCH.
 *
 * A team has a number, from 0 to HORO_TEAMS_MAX - 1, which the next team gets once it has been removed, and an id,
 * which no other team of the job ever has: the number, and HORO_TEAM_ID_STEP for each team that had the number before.
 *
 * add: horo_answer says the id when the handle is done. HORO_ERR_RESOURCE where there are HORO_TEAMS_MAX teams. On
 * HORO_OK the context owns the descriptors, else the caller still does. remove: HORO_ERR_USAGE for a team that does not
 * exist (any more), 0, or one in which something is pending here. Nothing can be submitted to it from then on, unless
 * the ranks do not agree.
 */
HORO_API const char *horo_change_name(void);
HORO_API int horo_add_team(horo_context *context, const horo_team_setup *setup, int64_t *handle, char *error,
                           size_t error_bytes);
HORO_API int horo_remove_team(horo_context *context, int32_t team, int64_t *handle, char *error, size_t error_bytes);
/* Done when all members have joined. Until then this rank submits nothing to the team, and stands in. */
HORO_API int horo_join(horo_context *context, int32_t team, int64_t *handle, char *error, size_t error_bytes);
/* Once it has ended well: the id of an added team, the rank that joined last, or the sender; else HORO_ERR_USAGE. */
HORO_API int horo_answer(horo_context *context, int64_t handle);
/* HORO_IN_PROGRESS, HORO_OK, the error of the request, or HORO_ERR_HANDLE. Never blocks. */
HORO_API int horo_poll(horo_context *context, int64_t handle);
/*
 * As horo_poll, but waits up to timeout_ms first; returns HORO_IN_PROGRESS early when a signal interrupted the wait,
 * so that Python can run its handlers. The request goes on meanwhile, driven by the background thread. Where several
 * threads wait for one handle, each gets what has become of the request when it is done, whoever releases the handle;
 * who comes later gets HORO_ERR_HANDLE. `error` gets the sentence of an error (NULL: see horo_error).
 */
HORO_API int horo_wait(horo_context *context, int64_t handle, int32_t timeout_ms, char *error, size_t error_bytes);
/* Waits likewise until any of several requests is done or has failed: HORO_OK; an unknown handle counts as done. */
HORO_API int horo_wait_any(horo_context *context, const int64_t *handles, int32_t count, int32_t timeout_ms);
/*
 * horo_wait and, after HORO_OK, horo_release at once, unless another thread has meanwhile. Of an allgather or alltoall
 * the first extents are lost, and what horo has allocated: only with HORO_SUBMIT_INTO.
 */
HORO_API int horo_finish(horo_context *context, int64_t handle, int32_t timeout_ms, char *error, size_t error_bytes);
/*
 * The threads of this rank that have waited for some time: nothing more comes from it until one of these requests is
 * done, unless a thread may still submit something, which `others` names (empty: none may). Where all ranks wait and
 * nothing can finish, rank 0 asks all once more, and when they answer the same, the group ends with HORO_ERR_DEADLOCK;
 * with a thread that may still submit, a warning is logged. `question` is what horo_blocked_question returned before
 * the threads were looked at. A report holds until a request of this rank is submitted or done, and until the next one;
 * count 0 takes it back. Repeating one costs nothing. Ignored: one with a request that is done, or with more than
 * HORO_WAITING_MAX threads, and all where stall_warning_ms is 0. Never blocks. HORO_OK, or as horo_poll.
 */
HORO_API int horo_report_blocked(horo_context *context, const horo_waiting *waits, int32_t count, uint32_t question,
                                 const char *others);
/*
 * The number of a question of rank 0 whether this rank is still blocked, which no report of this rank has answered yet;
 * 0: there is none. A thread that waits looks for one about as often as signals are to be noticed. Never blocks.
 */
HORO_API uint32_t horo_blocked_question(horo_context *context);

/*
 * The threads that have submitted requests or waited for them, as pthread_self() of each; at most `capacity` are
 * written. Returns how many there are, of which those beyond HORO_CALLERS_MAX are not told apart, or as horo_poll.
 */
HORO_API int32_t horo_callers(horo_context *context, uint64_t *threads, int32_t capacity);

/*
 * The sentence that goes with a failed handle; truncated to fit. HORO_ERR_HANDLE where there is none, which is the
 * sentence then, else HORO_OK, HORO_ERR_NOT_INITIALIZED or HORO_ERR_FORKED.
 */
HORO_API int horo_error(horo_context *context, int64_t handle, char *error, size_t error_bytes);

/*
 * After an allgather or alltoall: the result of tensor `index` of the request. *rows is the first extent of the result
 * and first_dims (room for as many values as the team has members) how many of them come from each rank. The memory
 * passes to the caller: horo_free. With HORO_SUBMIT_INTO it is the caller's: *data is NULL, *bytes what was written.
 */
HORO_API int horo_take_result(horo_context *context, int64_t handle, int32_t index, void **data, int64_t *bytes,
                              int64_t *first_dims);
HORO_API void horo_free(void *data);
/* Forgets a finished handle. HORO_ERR_USAGE: it is pending, and stays. HORO_ERR_HANDLE: it has been released. */
HORO_API int horo_release(horo_context *context, int64_t handle);

/* HORO_OK while the group is whole; after a loss the status and sentence that every request now gets. */
HORO_API int horo_health(horo_context *context, char *error, size_t error_bytes);

/* Reads what the next operation of all ranks runs with, by enum horo_knob; all 0: as ever. *is_final: it stays so. */
HORO_API int horo_read_tuning(horo_context *context, uint64_t *values, int32_t *is_final);
/*
 * Rank 0: all ranks change over to these values in front of the next batch, unless others are proposed before it. With
 * is_final, process sets do, too; until then they keep the first values. Any thread; never blocks. HORO_ERR_USAGE with
 * the sentence: another rank, a job without horo_setup.tuned, values that it cannot have.
 */
HORO_API int horo_propose_tuning(horo_context *context, const uint64_t *values, int32_t is_final, char *error,
                                 size_t error_bytes);
HORO_API void horo_read_counters(horo_context *context, horo_counters *counters);

/*
 * The last events of this rank, at most `capacity` (the room in events) and HORO_EVENTS_MAX, in the order in which they
 * were noted. Never blocks and holds nobody up: one that is being noted meanwhile may be missing. Returns how many were
 * written, or HORO_ERR_USAGE (a negative capacity), HORO_ERR_NOT_INITIALIZED, HORO_ERR_FORKED.
 */
HORO_API int32_t horo_read_events(horo_context *context, horo_event *events, int32_t capacity);

/*
 * Starts to write what this rank does from now on to a descriptor, each event as a horo_event; a thread of horo's own
 * does that every 50 ms. marks_batches: BEGUN is among them. The descriptor stays the caller's, open until stop or
 * horo_destroy, which write what is left; so does start where one is written already. A negative descriptor: that goes
 * on, and only marks_batches changes. None of them waits for other ranks. Kinds of events that are for timelines alone
 * stand in native/src/base/recorder.h.
 */
HORO_API int horo_start_timeline(horo_context *context, int descriptor, int32_t marks_batches, char *error,
                                 size_t error_bytes);
HORO_API int horo_stop_timeline(horo_context *context);

#endif
