#include "shim_fake_mpi.h"

#include <stdio.h>
#include <string.h>

enum { REQUESTS_MAX = 256, MESSAGE_BYTES = 1024 };

struct request {
    int is_cancelled;
};

static shim_fake_state state;
static struct request requests[REQUESTS_MAX];

shim_fake_state *shim_fake_reset(void) {
    memset(&state, 0, sizeof state);
    memset(requests, 0, sizeof requests);
    return &state;
}

static int post(void **request) {
    state.calls++;
    if (state.post_error != 0) {
        return state.post_error;
    }
    *request = &requests[state.posted++ % REQUESTS_MAX];
    return 0;
}

static int fake_issend(const void *data, int count, void *type, int rank, int tag, void *comm, void **request) {
    (void)data, (void)count, (void)type, (void)rank, (void)tag, (void)comm;
    return post(request);
}

static int fake_irecv(void *data, int count, void *type, int rank, int tag, void *comm, void **request) {
    (void)data, (void)count, (void)type, (void)rank, (void)tag, (void)comm;
    return post(request);
}

static int fake_test(void **request, int *done, void *status) {
    (void)status;
    state.calls++;
    if (state.test_error != 0) {
        return state.test_error;
    }
    *done = state.completes || (state.obeys_cancel && ((struct request *)*request)->is_cancelled);
    return 0;
}

static int fake_cancel(void **request) {
    state.calls++;
    state.cancelled++;
    ((struct request *)*request)->is_cancelled = 1;
    return 0;
}

static int fake_free(void **request) {
    (void)request;
    state.calls++;
    state.freed++;
    return 0;
}

static int fake_error_string(int code, char *text, int *length) {
    *length = snprintf(text, 256, "error %d of a test", code);
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
        .is_transport = 1,
        .size = size,
    };
    for (int i = 0; i < HORO_MPI_FUNCTION_COUNT; i++) {
        calls->functions[i] = (uint64_t)(uintptr_t)fake_free; /* those that a transport does not call */
    }
    calls->functions[HORO_MPI_ISSEND] = (uint64_t)(uintptr_t)fake_issend;
    calls->functions[HORO_MPI_IRECV] = (uint64_t)(uintptr_t)fake_irecv;
    calls->functions[HORO_MPI_TEST] = (uint64_t)(uintptr_t)fake_test;
    calls->functions[HORO_MPI_CANCEL] = (uint64_t)(uintptr_t)fake_cancel;
    calls->functions[HORO_MPI_ERROR_STRING] = (uint64_t)(uintptr_t)fake_error_string;
    calls->functions[HORO_MPI_FINALIZED] = (uint64_t)(uintptr_t)fake_finalized;
}
