#include "shim_fake_mpi.h"

#include <pthread.h>
#include <string.h>

enum { REQUESTS_MAX = 256, MESSAGE_BYTES = 1024 };

struct request {
    int is_cancelled;
    int is_done; /* carried */
    int is_send; /* else a receive */
    int from, to, tag;
    void *data;
    size_t bytes;
};

static shim_fake_state state;
static struct request requests[REQUESTS_MAX];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of both: every rank of a job in this process may call */

shim_fake_state *shim_fake_reset(void) {
    memset(&state, 0, sizeof state);
    memset(requests, 0, sizeof requests);
    return &state;
}

static int post(struct request posted, void **request) {
    (void)pthread_mutex_lock(&lock);
    state.calls++;
    const int code = state.post_error;
    if (code == 0) {
        struct request *place = &requests[state.posted++ % REQUESTS_MAX];
        *place = posted;
        *request = place;
    }
    (void)pthread_mutex_unlock(&lock);
    return code;
}

static int number_of(void *comm) {
    return (int)(uintptr_t)comm;
}

static int fake_issend(const void *data, int count, void *type, int rank, int tag, void *comm, void **request) {
    (void)type;
    void *read = (void *)(uintptr_t)data;
    return post((struct request){.is_send = 1, .from = number_of(comm), .to = rank, .tag = tag, .data = read,
                                 .bytes = (size_t)count}, request);
}

static int fake_irecv(void *data, int count, void *type, int rank, int tag, void *comm, void **request) {
    (void)type;
    return post((struct request){.from = rank, .to = number_of(comm), .tag = tag, .data = data,
                                 .bytes = (size_t)count}, request);
}

/* Of what waits between the same two, the oldest send goes into the oldest receive: slots are used in turn. */
static struct request *oldest(const struct request *like, int is_send) {
    for (int i = 0; i < REQUESTS_MAX; i++) {
        struct request *each = &requests[(state.posted + i) % REQUESTS_MAX];
        if (each->data != NULL && !each->is_done && !each->is_cancelled && each->is_send == is_send &&
            each->from == like->from && each->to == like->to && each->tag == like->tag) {
            return each;
        }
    }
    return NULL;
}

static void carry(const struct request *request) {
    struct request *send = oldest(request, 1);
    struct request *receive = oldest(request, 0);
    if (send != NULL && receive != NULL) {
        memcpy(receive->data, send->data, send->bytes);
        send->is_done = receive->is_done = 1;
    }
}

static int fake_test(void **request, int *done, void *status) {
    struct request *tested = *request;
    (void)status;
    (void)pthread_mutex_lock(&lock);
    state.calls++;
    const int code = state.test_error;
    if (code == 0) {
        if (state.carries) {
            carry(tested);
        }
        *done = state.completes || tested->is_done || (state.obeys_cancel && tested->is_cancelled);
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

int shim_fake_held(int rank, char **data, int capacity) {
    int count = 0;
    (void)pthread_mutex_lock(&lock);
    for (int i = 0; i < REQUESTS_MAX && count < capacity; i++) {
        const struct request *each = &requests[i];
        if (each->data != NULL && !each->is_done && rank == (each->is_send ? each->from : each->to)) {
            data[count++] = each->data;
        }
    }
    (void)pthread_mutex_unlock(&lock);
    return count;
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
