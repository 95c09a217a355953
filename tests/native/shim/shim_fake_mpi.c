#include "shim.h"

#include <pthread.h>
#include <string.h>

enum { REQUESTS_MAX = 256, MESSAGE_BYTES = 1024 };

struct request {
    int is_cancelled;
};

static shim_fake_state state;
static struct request requests[REQUESTS_MAX];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of both: every rank of a job in this process may call */

shim_fake_state *shim_fake_reset(void) {
    memset(&state, 0, sizeof state);
    memset(requests, 0, sizeof requests);
    return &state;
}

static int post(void **request) {
    (void)pthread_mutex_lock(&lock);
    state.calls++;
    const int code = state.post_error;
    if (code == 0) {
        struct request *place = &requests[state.posted++ % REQUESTS_MAX];
        *place = (struct request){0};
        *request = place;
    }
    (void)pthread_mutex_unlock(&lock);
    return code;
}

static int fake_issend(const void *data, int count, void *type, int rank, int tag, void *comm, void **request) {
    (void)data, (void)count, (void)type, (void)rank, (void)tag, (void)comm;
    return post(request);
}

static int fake_irecv(void *data, int count, void *type, int rank, int tag, void *comm, void **request) {
    return fake_issend(data, count, type, rank, tag, comm, request);
}

static int fake_test(void **request, int *done, void *status) {
    const struct request *tested = *request;
    (void)status;
    (void)pthread_mutex_lock(&lock);
    state.calls++;
    const int code = state.test_error;
    if (code == 0) {
        *done = state.completes || (state.obeys_cancel && tested->is_cancelled);
    }
    (void)pthread_mutex_unlock(&lock);
    return code;
}

static int fake_cancel(void **request) {
    (void)pthread_mutex_lock(&lock);
    state.calls++;
    state.cancelled++;
    ((struct request *)*request)->is_cancelled = 1;
    (void)pthread_mutex_unlock(&lock);
    return 0;
}

static int fake_free(void **request) {
    (void)request;
    (void)pthread_mutex_lock(&lock);
    state.calls++;
    state.freed++;
    (void)pthread_mutex_unlock(&lock);
    return 0;
}

static int fake_finalized(int *finalized) {
    *finalized = state.is_finalized;
    return 0;
}

void shim_fake_describe(horo_mpi *calls, int size) {
    *calls = (horo_mpi){
        .handle_bytes = (int)sizeof(void *),
        .status_bytes = 24,
        .message_bytes = MESSAGE_BYTES,
        .size = size,
    };
    calls->functions[HORO_MPI_ISSEND] = (uint64_t)(uintptr_t)fake_issend;
    calls->functions[HORO_MPI_IRECV] = (uint64_t)(uintptr_t)fake_irecv;
    calls->functions[HORO_MPI_TEST] = (uint64_t)(uintptr_t)fake_test;
    calls->functions[HORO_MPI_CANCEL] = (uint64_t)(uintptr_t)fake_cancel;
    calls->functions[HORO_MPI_REQUEST_FREE] = (uint64_t)(uintptr_t)fake_free;
    calls->functions[HORO_MPI_FINALIZED] = (uint64_t)(uintptr_t)fake_finalized;
}
