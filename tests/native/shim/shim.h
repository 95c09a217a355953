/* Single parts of the core as plain functions, for tests. */
#ifndef SHIM_H
#define SHIM_H

#include <stddef.h>
#include <stdint.h>

#include "horo.h"
#include "horo_log.h"

/* ---- The arena ---- */

/*
 * What a waker does first: clears the mark by which a rank says that it sleeps. Returns what it was; -1: no such arena.
 */
int shim_arena_clear_sleeping(void *memory, int local_size, uint64_t segment_bytes, int local_rank);

/* What a rank has written into its request ring for the first team so far, in bytes, and the bytes of that ring. */
uint64_t shim_arena_requests_written(void *memory, int local_size, uint64_t segment_bytes, int local_rank);
uint64_t shim_arena_request_ring_bytes(void);

/* The rank that an end word names after rank 1 and then rank 2 were written there. */
int shim_arena_cause_of_two(void);

/* ---- Contention ---- */

/*
 * Notes yields that took yield_ns[i] until now_ns[i]; until when waits then sleep. The words of the host begin as
 * given; 0: nothing is known yet.
 */
void shim_contention_note(int64_t begin_until_ns, int64_t begin_while_ns, const int64_t *yield_ns,
                          const int64_t *now_ns, int count, int64_t *until_ns);

/* Notes a yield that ends now on the host of a context. */
void shim_contention_yielded(void *context, int64_t yield_ns);

int shim_contention_is_on(int64_t until_ns, int64_t now_ns);

/* ---- The choice of a core ---- */

/* hr_core_choose with the allowed cores as a list. */
int shim_core_choose(const int *core_of, int count, int me, const int *allowed, int allowed_count);

/* Of rank 0 of a host whose ranks run on these cores, counted from 1, or do not tell: 0. -1: no memory. */
int shim_core_is_shared(const int32_t *core_of, const uint32_t *sleeping, int count);

/* ---- The algorithms between hosts as plain functions, all members in one thread ---- */

typedef struct {
    int algorithm;
    int host_count;
    size_t count;
    int dtype;
    int reduce_op;
    int root_host;
    size_t piece_bytes;
    /* allgather and reduce-scatter only: [host_count], at most 32; they lie one behind the other in the data */
    const size_t *part_bytes;
} shim_cross_call;

/* The share of owner `index` in a segment of `bytes`, and the most that any share of no more may have. */
void shim_share(size_t bytes, int index, int owners, size_t *offset, size_t *length);
size_t shim_share_most(size_t bytes, int owners);

/* What an allreduce between hosts reserves for segments of up to `segment_bytes`, and what this share of one needs. */
size_t shim_two_level_reserved(int hosts, int owners, size_t value_bytes, size_t segment_bytes);
size_t shim_two_level_needed(int hosts, int owners, size_t value_bytes, size_t segment_bytes, int index);

/*
 * All members in this thread, driven in an order drawn from `seed`, over the links of the rule, which move so many
 * bytes at once (0: any). When hosts cut_a and cut_b (or -1) have made cut_turn turns in all, their link is cut; a
 * member with an error closes its end. Fills statuses (HORO_IN_PROGRESS: not over after very many turns) and the bytes
 * that each member sent. HORO_OK, HORO_ERR_RESOURCE, or HORO_ERR_USAGE if memory in use was received into.
 */
int shim_cross_simulate(const shim_cross_call *call, void *const *data, size_t link_piece_bytes, uint64_t seed,
                        int cut_a, int cut_b, int cut_turn, int *statuses, size_t *sent_bytes);

/* Whether two hosts have a link on a channel, as the core sees it. */
int shim_hosts_are_linked(int channel, int host_count, int host, int other);

/* ---- Rank 0's judgement of ranks that are blocked; messages are bytes ---- */

typedef struct shim_deadlock shim_deadlock;

shim_deadlock *shim_deadlock_create(int size);
void shim_deadlock_destroy(shim_deadlock *self);
/* A BLOCKED message. */
int shim_deadlock_note(shim_deadlock *self, const void *message, size_t bytes, int64_t now_ns);
int64_t shim_deadlock_due_ns(const shim_deadlock *self, int64_t open_ns);
uint32_t shim_deadlock_question(const shim_deadlock *self);
/* 0: something may finish, 1: only if a thread submits something, 2: if all say so again, 3: a deadlock. */
int shim_deadlock_judge(shim_deadlock *self, char *text, size_t text_bytes);

/* ---- An MPI, one per process, that any thread may call: it does what a test has set, errors too ---- */

typedef struct {
    int post_error;     /* what posting returns */
    int test_error;     /* what testing returns */
    int completes;      /* requests are done when tested */
    int obeys_cancel;   /* cancelled ones are */
    int is_finalized;
    int posted, cancelled, freed, calls; /* counted; calls but for MPI_Finalized */
} shim_fake_state;

/* Everything back to zero; the same state every time. */
shim_fake_state *shim_fake_reset(void);
/* Fills in what describes it, with handles that are pointers, for `size` ranks. */
void shim_fake_describe(horo_mpi *calls, int size);

/* ---- Faults that a sanitizer must report; what each returns means nothing ---- */

/* Reads one byte past a heap block (address). */
int shim_fault_overflow(void);
/* Adds 1 to INT_MAX (undefined). */
int shim_fault_integer(void);
/* Two threads write one variable without order (thread). */
int shim_fault_race(void);

/* ---- Kernels by level: one that this machine has (it has a name), or "best" ---- */

const char *shim_kernel_name(const char *level);
void shim_kernel_reduce(const char *level, int dtype, int reduce_op, void *dst, void *copy, const void *const *src,
                       int src_count, size_t count, double factor, int divisor, int copy_store);
void shim_kernel_scale(const char *level, int dtype, void *dst, const void *src, size_t count, double factor,
                      int divisor, int store);
void shim_kernel_convert(const char *level, int dst_dtype, void *dst, int src_dtype, const void *src, size_t count,
                        double scale, int store);
void shim_kernel_dots(const char *level, int dtype, const void *a, const void *b, size_t count, double *sums);
void shim_kernel_combine(const char *level, int dtype, void *a, const void *b, size_t count, double a_factor,
                        double b_factor);
void shim_kernel_copy(const char *level, void *dst, const void *src, size_t bytes, int store);
void shim_kernel_exchange(const char *level, void *out, void *slot, const void *in, size_t bytes, int store);
const char *shim_dtype_name(int dtype);
int shim_dtype_reducible(int dtype, int reduce_op);

/* ---- The log with a queue of the caller's ---- */

/* Rank 3 writes this message of this level; `shown_from` is its own least severe level for stderr. */
void shim_log(horo_log_queue *queue, int shown_from, int level, const char *text);
/* What the engine does when it looks round `later_ns` from now. In how many ns it is to come again; 0: never. */
int64_t shim_log_check(horo_log_queue *queue, int64_t later_ns);
int shim_log_capacity(void);

/* ---- The owner of something ---- */

typedef struct shim_owner shim_owner;

/* With `by_pid`, as where the kernel has no page that a fork wipes. */
shim_owner *shim_owner_create(int by_pid);
void shim_owner_destroy(shim_owner *owner);
int shim_owner_is_here(const shim_owner *owner);

/* 1 if a request is still there while what it carries is let go of. */
int shim_request_outlives_cargo(void);
/* Ordered calls fail, the newest first. 1 if the call that is submitted behind them is the next one. */
int shim_request_call_behind_failed_ones(void);

/* ---- The flight recorder ---- */

typedef struct shim_recorder shim_recorder;

shim_recorder *shim_recorder_create(void);
void shim_recorder_destroy(shim_recorder *recorder);
void shim_recorder_add(shim_recorder *recorder, int32_t event, int32_t op, int32_t status, int32_t team, int32_t number,
                       int64_t bytes, const char *name);
/*
 * `count` events of which every part says the same: team `writer`, and k = 1, 2, ... as number, bytes and "writer.k".
 */
void shim_recorder_add_many(shim_recorder *recorder, int32_t writer, int32_t count);
/* Reads until one of the writers has come to `last`; returns how many events did not say everywhere the same. */
int32_t shim_recorder_read_until(shim_recorder *recorder, int32_t last);
int32_t shim_recorder_read(shim_recorder *recorder, horo_event *events, int32_t capacity);
int shim_recorder_describe(shim_recorder *recorder, int lines, char *text, size_t text_bytes);
/*
 * A writer that is held: the next place is taken and its record marked as being written. Publish writes an event there,
 * of a request "held".
 */
uint64_t shim_recorder_claim(shim_recorder *recorder);
void shim_recorder_publish(shim_recorder *recorder, uint64_t place);
/* The next look of a reader of all events; *lost: how many it has missed. */
int32_t shim_recorder_look(shim_recorder *recorder, horo_event *events, int32_t capacity, uint64_t *lost);
/* `count` requests are submitted and end, as fast as one thread can note that. */
void shim_recorder_add_requests(shim_recorder *recorder, int32_t count);
/* Of the recorder's timeline; start returns the status, and a stop that has begun is_stopping. */
int shim_recorder_start_timeline(shim_recorder *recorder, int descriptor);
int shim_recorder_is_stopping(shim_recorder *recorder);
void shim_recorder_stop_timeline(shim_recorder *recorder);

/* ---- The choice between ordinary stores into slots and those past the cache ---- */

/* What a rank has learnt of reduce-scatters: what an ordinary store costs in 1/1000 ns a byte; 0: not known. */
int64_t shim_stores_scatter_cost(const void *context);

typedef struct shim_stores shim_stores;

/* Of operations whose costs a test makes up. */
shim_stores *shim_stores_create(void);
void shim_stores_destroy(shim_stores *self);
/* Whether the next operation stores past the cache. */
int shim_stores_try(shim_stores *self, size_t bytes);
/* It has taken so long. */
void shim_stores_learn(shim_stores *self, int64_t elapsed_ns);

/* ---- Transports as plain functions. A transport is a void *, and so is an io ---- */

/* NULL with the sentence in error (HORO_MESSAGE_MAX bytes) and the code in *status. */
void *shim_tcp_create(const int *control_fds, const int *data_fds, int host_count, int data_sockets,
                      int peer_timeout_ms, int *status, char *error);
/*
 * Data by MPI, control by sockets. What describes the MPI is never freed: what it has been asked for may outlive the
 * transport.
 */
void *shim_mpi_create(const int *control_fds, const horo_mpi *calls, int host_count, int peer_timeout_ms, int *status,
                      char *error);
void shim_transport_destroy(void *transport);

void *shim_io_create(void);
void shim_io_destroy(void *io);
int shim_io_state(const void *io);
size_t shim_io_done_bytes(const void *io);

int shim_post_send(void *transport, int peer, int channel, const void *data, size_t bytes, void *io);
int shim_post_recv(void *transport, int peer, int channel, void *data, size_t bytes, void *io);
int shim_post_recv_some(void *transport, int peer, void *data, size_t capacity, void *io);
int shim_progress(void *transport);
void shim_abandon(void *transport, int channel);
void shim_watch(void *transport, int enabled);
/* enum hr_loss of a peer. */
int shim_loss(void *transport, int peer);
/* Whether nothing would ever wake a sleeper: no descriptor, no need to look. */
int shim_is_idle(void *transport);
/* Sleeps on its descriptors: 1 if one woke or it was time to look without one, 0 if neither happened in time. */
int shim_sleep(void *transport, int timeout_ms);
/* Progress and sleep until none of the ios is posted any more. HORO_OK; HORO_ERR_PEER_LOST: one failed; _TIMEOUT. */
int shim_wait(void *transport, void *const *ios, int io_count, int timeout_ms);

/* ---- The last look of a wait before it sleeps ---- */

/*
 * Whether a wait, or what prepares a sleep, sees an event that has come when the rank has said that it sleeps, and not
 * before. For a context that nobody drives meanwhile; one that misses it sleeps until limit_ns are over.
 */
int shim_wait_looks_last(void *context, int64_t limit_ns);
int shim_wait_prepares_with_a_look(void *context);

/*
 * Whether the thread of a rank on one host, which nobody calls, drives for what comes between its last look and its
 * sleep: a kick of this rank, or a call of another. -1: it has not even looked, or there is no memory.
 */
int shim_drive_hears_late(void *context, int by_kick, int64_t limit_ns);

/*
 * The ticks for which data moved during a wait from tick 100 to 200, beside a batch that begins and ends (0: not) at
 * these. One that begins after 200 begins when the waiting thread has read the clock for the last time.
 */
uint64_t shim_meter(uint64_t begin, uint64_t end);

/* ---- Wire messages as bytes ---- */

/* The bytes written to out (out_bytes of room), or a negative status. */
int64_t shim_wire_encode_request(const horo_request *request, void *out, size_t out_bytes);
void shim_wire_describe(int dtype, int wire_dtype, int ndim, const int64_t *shape, char *out, size_t out_bytes);

/*
 * Decodes a copy of the bytes that ends where its heap block ends, touches everything that decoding gave, so that a
 * sanitizer sees any step outside, and encodes it again, to the same bytes. Returns the status.
 */
int shim_wire_probe(const void *data, size_t bytes);
/* HORO_OK: no prefix is a message, and with each byte set to each value shim_wire_probe accepts or refuses it. */
int shim_wire_probe_mutants(const void *data, size_t bytes);

#endif
