/*
 * The requests of one rank, from submit to release: the callers' side of the engine. All may be called from any thread
 * without the lock of the rank, unless a line says otherwise.
 */
#ifndef HR_ENGINE_REQUESTS_REQUESTS_H
#define HR_ENGINE_REQUESTS_REQUESTS_H

#include <pthread.h>

#include "base/clock.h"
#include "engine/drive/drive.h"
#include "engine/requests/port.h"

enum { HR_NAMES_IN_TEXT = 6 }; /* that reports and errors list, of tensors */

/* The threads that have submitted something or waited for it. */
struct hr_callers {
    pthread_t last;
    pthread_t threads[HORO_CALLERS_MAX];
    int count; /* one more than there is room for: there are others, too */
};

/* A number that a process set has, or that the next one gets. */
struct hr_place {
    int is_used;
    int32_t id;           /* of the process set, or of the next one; negative: the number has no more ids */
    struct hr_port *port; /* NULL: this rank is no member. Written by the driver with the lock held, as what follows */
    int has_local;        /* there are members on this host */
    uint32_t cleanings;   /* of its partition that all removals executed here come to, see hr_partition_leave */
};

/* Under the lock, but for atomics. */
struct hr_requests {
    struct hr_drive *drive;
    struct hr_node *node;
    struct hr_place places[HR_TEAMS_MAX]; /* by number; 0 is the world */
    struct hr_request *queue_head, **queue_tail;
    struct hr_request *oldest, *newest; /* of those not done, in the order in which they were submitted */
    /* [handle_capacity] of requests not released: each at the place that its handle is modulo that power of two */
    struct hr_request **handles;
    size_t handle_capacity, handle_count; /* half of the places are free at least */
    int64_t last_handle;
    struct hr_request *spare; /* of the last horo_run that has ended well, for another like it; NULL: there is none */
    int calls; /* that wait for requests, in whatever way; each holds up hr_engine_fini */
    uint64_t passed; /* records executed that ended no request of this rank */
    _Atomic uint64_t count_of[HORO_ANY_OP_COUNT]; /* submitted so far */
    _Atomic uint32_t queued; /* requests in the queue */
    struct hr_callers callers;
    struct hr_meter meter;
};

/* ---- Submitting ---- */

void hr_requests_init(struct hr_requests *requests, struct hr_drive *drive);
/* Nothing of it is used any more; frees what has not been released. */
void hr_requests_fini(struct hr_requests *requests);
/* A new request, unless the group has ended; then HORO_OK, or a status with *error set. */
hr_status hr_requests_create(struct hr_requests *requests, const horo_request *call, struct hr_request **request,
                             struct hr_error *error);
/* With the lock held: whether it might be added now; then it knows its port. */
hr_status hr_requests_check(const struct hr_requests *requests, struct hr_request *request, struct hr_error *error);
/* It is in flight: the core's with HORO_OK, else destroyed. */
hr_status hr_requests_add(struct hr_requests *requests, struct hr_request *request, int64_t *handle,
                          struct hr_error *error);
/* Both; the cargo is the request's, also where it fails. */
hr_status hr_requests_submit(struct hr_requests *requests, const horo_request *call, struct hr_cargo cargo,
                             int64_t *handle, struct hr_error *error);
/* With the lock held: its values are there, so it can be announced. */
void hr_requests_queue(struct hr_requests *requests, struct hr_request *request);
/* As horo_refuse; with the lock held. 1: the other members are told; 0: they are not; or a status. */
int hr_requests_refuse(struct hr_requests *requests, int32_t team, const char *name, int32_t status,
                       const char *reason);

/* ---- Driver ---- */

/* All that is in the queue, linked by `next`. */
struct hr_request *hr_requests_take_queue(struct hr_requests *requests);
/* A batch whose record has been taken out of the log: for the flight recorder. */
void hr_requests_note_batch(const struct hr_requests *requests, struct hr_request *const *batch, size_t count,
                            uint64_t bytes);
/* They are done, all with one status and sentence. */
void hr_requests_complete(struct hr_requests *requests, struct hr_request *const *done, size_t count, int status,
                          const char *text);
/* The same for one, with the lock held, by any thread, which wakes waiters. */
void hr_requests_complete_locked(struct hr_requests *requests, struct hr_request *request, int status,
                                 const char *text);
/* With the lock held: why what is pending fails at that end, with its names, or with that of `only` (NULL: all). */
void hr_requests_describe_end(const struct hr_requests *requests, struct hr_abort end, const struct hr_request *only,
                              char *text, size_t text_bytes);
/* Fails what is pending with the end of the group, but for sends and receives (pairs.h); 1 if there was anything. */
int hr_requests_fail_all(struct hr_requests *requests);

/* ---- Waiting ---- */

/* With the lock held; NULL if there is none. */
struct hr_request *hr_requests_find(const struct hr_requests *requests, int64_t handle);
/* A call works on a request, which stays until it is let go, whoever releases the handle; NULL: there is none. */
struct hr_request *hr_requests_hold(struct hr_requests *requests, int64_t handle);
void hr_requests_let_go(struct hr_requests *requests, struct hr_request *request);
/* As horo_wait_any, horo_error, horo_take_result, horo_answer, horo_release and horo_callers. */
int hr_requests_wait_any(struct hr_requests *requests, const int64_t *handles, int32_t count, int32_t timeout_ms);
hr_status hr_requests_error(struct hr_requests *requests, int64_t handle, char *text, size_t text_bytes);
hr_status hr_requests_take(struct hr_requests *requests, int64_t handle, int32_t index, void **data, int64_t *bytes,
                           int64_t *first_dims);
int hr_requests_answer(struct hr_requests *requests, int64_t handle);
hr_status hr_requests_release(struct hr_requests *requests, int64_t handle);
int32_t hr_requests_callers(struct hr_requests *requests, uint64_t *threads, int32_t capacity);
/*
 * As horo_wait, or horo_poll where there is no time, and what is done with the handle once the request has ended well.
 * *handle is 0 if it has been released, by this call or another one meanwhile. The request is there as long as the call
 * lasts, whoever releases the handle.
 */
enum hr_wait_end { HR_WAIT_KEEPS, HR_WAIT_RELEASES, HR_WAIT_RELEASES_WHAT_FITS /* as horo_run */ };
int hr_requests_wait(struct hr_requests *requests, int64_t *handle, int32_t timeout_ms, enum hr_wait_end end,
                     char *text, size_t text_bytes);

#endif
