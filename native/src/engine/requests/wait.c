/* Callers that wait for requests, ask for them, and let go of them. */
#include <stdio.h>
#include <string.h>

#include "engine/requests/requests.h"

/* ---- The threads that call ---- */

void hr_requests_note_caller(struct hr_requests *requests) {
    struct hr_callers *callers = &requests->callers;
    const pthread_t self = pthread_self();
    if (callers->count > 0 && pthread_equal(callers->last, self)) {
        return;
    }
    callers->last = self;
    const int known = callers->count < HORO_CALLERS_MAX ? callers->count : HORO_CALLERS_MAX;
    for (int i = 0; i < known; i++) {
        if (pthread_equal(callers->threads[i], self)) {
            return;
        }
    }
    if (known < HORO_CALLERS_MAX) {
        callers->threads[known] = self;
    }
    callers->count = known + 1;
}

int32_t hr_requests_callers(struct hr_requests *requests, uint64_t *threads, int32_t capacity) {
    hr_drive_lock(requests->drive);
    const struct hr_callers *callers = &requests->callers;
    for (int i = 0; i < callers->count && i < HORO_CALLERS_MAX && i < capacity; i++) {
        threads[i] = (uint64_t)callers->threads[i];
    }
    const int32_t count = callers->count;
    hr_drive_unlock(requests->drive);
    return count;
}

/* ---- Handles ---- */

struct hr_request *hr_requests_find(const struct hr_requests *requests, int64_t handle) {
    const size_t place = (size_t)handle & (requests->handle_capacity - 1);
    struct hr_request *request = requests->handle_capacity == 0 ? NULL : requests->handles[place];
    return request != NULL && request->handle == handle ? request : NULL;
}

/* With the lock held, for a request that is not done: it may have been submitted for a wait that has not come. */
static void kick_if_idle(struct hr_requests *requests) {
    if (hr_drive_is_free(requests->drive)) {
        hr_drive_kick(requests->drive);
    }
}

/* With the lock held, which it lets go meanwhile: the caller is one of the request's owners. */
static int wait_for_request(struct hr_requests *requests, const struct hr_request *request, int32_t timeout_ms) {
    int status;
    int64_t deadline_ns = 0; /* a request that is done already needs no clock */
    while ((status = atomic_load(&request->status)) == HORO_IN_PROGRESS) {
        const int64_t now_ns = hr_now_ns();
        deadline_ns = deadline_ns == 0 ? now_ns + (int64_t)timeout_ms * 1000000 : deadline_ns;
        if (now_ns >= deadline_ns) {
            kick_if_idle(requests);
            break;
        }
        if (hr_drive_is_free(requests->drive)) {
            hr_drive_until(requests->drive, &request->status, HORO_IN_PROGRESS, now_ns, deadline_ns);
            status = atomic_load(&request->status);
            break; /* done, out of time, or a signal to be handled first */
        }
        const int is_alone = atomic_load(&requests->drive->pending) == 1;
        if (is_alone && (request->call.flags & HORO_SUBMIT_SYNC) != 0 && atomic_load(&requests->drive->serves_hosts)) {
            atomic_store(&requests->drive->wanted, 1); /* it saves switches of threads, in the calls that follow too */
        }
        hr_drive_wait(requests->drive, deadline_ns);
    }
    return status;
}

/* With the lock held: of the request of a handle. HORO_OK, or HORO_ERR_HANDLE where there is none (NULL). */
static hr_status write_error(const struct hr_request *request, int64_t handle, char *text, size_t text_bytes) {
    if (request == NULL) {
        (void)snprintf(text, text_bytes, "Handle %lld was not created or has been cleared.", (long long)handle);
        return HORO_ERR_HANDLE;
    }
    const int has_text = atomic_load(&request->status) != HORO_IN_PROGRESS && request->error_text != NULL;
    (void)snprintf(text, text_bytes, "%s", has_text ? request->error_text : "the operation is still running");
    return HORO_OK;
}

/* With the lock held: the table of handles owns it no longer. */
static void forget_handle(struct hr_requests *requests, struct hr_request *request) {
    requests->handles[(size_t)request->handle & (requests->handle_capacity - 1)] = NULL;
    requests->handle_count--;
    request->handle = 0;
    request->owners--;
}

/* With the lock held, which it lets go: a call ends, for which `unowned` is left (NULL: nothing is). */
static void end_call(struct hr_requests *requests, struct hr_request *unowned) {
    if (unowned != NULL) {
        hr_drive_unlock(requests->drive);
        hr_request_destroy(unowned);
        hr_drive_lock(requests->drive);
    }
    if (--requests->calls == 0 && atomic_load(&requests->drive->stop)) {
        hr_drive_wake_waiters(requests->drive); /* hr_engine_fini is one */
    }
    hr_drive_unlock(requests->drive);
}

struct hr_request *hr_requests_hold(struct hr_requests *requests, int64_t handle) {
    hr_drive_lock(requests->drive);
    struct hr_request *request = hr_requests_find(requests, handle);
    if (request != NULL) {
        requests->calls++;
        request->owners++;
    }
    hr_drive_unlock(requests->drive);
    return request;
}

void hr_requests_let_go(struct hr_requests *requests, struct hr_request *request) {
    hr_drive_lock(requests->drive);
    end_call(requests, --request->owners == 0 ? request : NULL);
}

int hr_requests_wait(struct hr_requests *requests, int64_t *handle, int32_t timeout_ms, enum hr_wait_end end,
                     char *text, size_t text_bytes) {
    hr_drive_lock(requests->drive);
    struct hr_request *request = hr_requests_find(requests, *handle);
    if (request == NULL) {
        hr_drive_unlock(requests->drive);
        return write_error(NULL, *handle, text, text_bytes);
    }
    hr_requests_note_caller(requests);
    requests->calls++;
    request->owners++;
    int status = atomic_load(&request->status);
    if (status == HORO_IN_PROGRESS) {
        hr_meter_block(&requests->meter, 1, hr_ticks());
        status = wait_for_request(requests, request, timeout_ms);
        hr_meter_block(&requests->meter, 0, hr_ticks());
    }
    int fits = 1; /* else it lies in memory that the core has allocated, which a call that offers its own takes */
    for (int i = 0; status == HORO_OK && request->gathered != NULL && i < request->call.tensor_count; i++) {
        fits &= request->gathered[i].is_given || (request->call.flags & HORO_SUBMIT_OFFER) == 0;
    }
    if (status < 0) {
        (void)write_error(request, *handle, text, text_bytes);
    } else if (status == HORO_OK && (end == HR_WAIT_RELEASES || (end == HR_WAIT_RELEASES_WHAT_FITS && fits))) {
        *handle = 0;
        if (request->handle != 0) { /* else another call has released it meanwhile */
            forget_handle(requests, request);
        }
    }
    struct hr_request *unowned = --request->owners == 0 ? request : NULL;
    if (unowned != NULL && status == HORO_OK && end == HR_WAIT_RELEASES_WHAT_FITS && /* it can do for another call: */
        request->call.tensor_count <= 1 && request->call.device == 0 && request->cargo.hooks == NULL &&
        request->error_text == NULL) {
        hr_request_drop_results(request);
        unowned = requests->spare;
        requests->spare = request;
    }
    end_call(requests, unowned);
    return status;
}

/* The background thread drives meanwhile: a caller would drive for one request, and sleep while another is done. */
int hr_requests_wait_any(struct hr_requests *requests, const int64_t *handles, int32_t count, int32_t timeout_ms) {
    const int64_t deadline_ns = hr_now_ns() + (int64_t)timeout_ms * 1000000;
    hr_drive_lock(requests->drive);
    hr_requests_note_caller(requests);
    requests->calls++;
    hr_meter_block(&requests->meter, 1, hr_ticks());
    int done = 0;
    for (;;) {
        for (int32_t i = 0; i < count && !done; i++) {
            const struct hr_request *request = hr_requests_find(requests, handles[i]);
            done = request == NULL || atomic_load(&request->status) != HORO_IN_PROGRESS;
        }
        if (done || hr_now_ns() >= deadline_ns) {
            break;
        }
        kick_if_idle(requests);
        hr_drive_wait(requests->drive, deadline_ns);
    }
    hr_meter_block(&requests->meter, 0, hr_ticks());
    end_call(requests, NULL);
    return done ? HORO_OK : HORO_IN_PROGRESS;
}

hr_status hr_requests_error(struct hr_requests *requests, int64_t handle, char *text, size_t text_bytes) {
    hr_drive_lock(requests->drive);
    const hr_status status = write_error(hr_requests_find(requests, handle), handle, text, text_bytes);
    hr_drive_unlock(requests->drive);
    return status;
}

hr_status hr_requests_take(struct hr_requests *requests, int64_t handle, int32_t index, void **data, int64_t *bytes,
                           int64_t *first_dims) {
    hr_drive_lock(requests->drive);
    struct hr_request *request = hr_requests_find(requests, handle);
    int status = HORO_ERR_USAGE;
    if (request != NULL && atomic_load(&request->status) == HORO_OK && request->gathered != NULL && index >= 0 &&
        index < request->call.tensor_count &&
        (request->gathered[index].is_given || request->gathered[index].data != NULL)) {
        struct hr_gathered *result = &request->gathered[index];
        *data = result->is_given ? NULL : result->data;
        *bytes = result->bytes;
        memcpy(first_dims, result->first_dims, (size_t)request->team_size * sizeof *first_dims);
        result->data = result->is_given ? result->data : NULL;
        status = HORO_OK;
    }
    hr_drive_unlock(requests->drive);
    return status;
}

int hr_requests_answer(struct hr_requests *requests, int64_t handle) {
    hr_drive_lock(requests->drive);
    const struct hr_request *request = hr_requests_find(requests, handle);
    const int has_ended_well = request != NULL && atomic_load(&request->status) == HORO_OK;
    const int answer = has_ended_well && request->answer >= 0 ? request->answer : HORO_ERR_USAGE;
    hr_drive_unlock(requests->drive);
    return answer;
}

hr_status hr_requests_release(struct hr_requests *requests, int64_t handle) {
    hr_drive_lock(requests->drive);
    struct hr_request *request = hr_requests_find(requests, handle);
    struct hr_request *unowned = NULL;
    const int pends = request != NULL && atomic_load(&request->status) == HORO_IN_PROGRESS;
    const int status = request == NULL ? HORO_ERR_HANDLE : pends ? HORO_ERR_USAGE : HORO_OK;
    if (status == HORO_OK) {
        forget_handle(requests, request);
        unowned = request->owners == 0 ? request : NULL;
    }
    hr_drive_unlock(requests->drive);
    hr_request_destroy(unowned);
    return status;
}
