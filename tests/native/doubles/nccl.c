/*
 * A double of NCCL, on the memory and the streams of the double of the CUDA driver. Ranks are threads of one process,
 * or processes: they meet in a file beside this library, which all of them map. What is launched runs on its stream, in
 * its order, and waits there for the other ranks, as a kernel does. Nothing blocks: whoever has begun something polls.
 *
 * Compiled for each test with what it is to do:
 *   VERSION       what ncclGetVersion says; 22304 where it is not given
 *   VERSION_CODE  what ncclGetVersion returns
 *   LACKS_ABORT   there is no ncclCommAbort
 *   CUDA_DOUBLE   the path of the double of the driver; without it nothing but the version can be asked
 *   DELAYS        whatever is polled needs up to so many looks more, by chance; 0 where it is not given
 * The functions that begin with "double" are for tests.
 */
#define _GNU_SOURCE
#include <pthread.h>

#ifndef VERSION
#define VERSION 22304
#endif
#ifndef VERSION_CODE
#define VERSION_CODE 0
#endif
#ifndef DELAYS
#define DELAYS 0
#endif

#include "nccl_run.h"

/* ---- Failures that tests ask for ---- */

enum place { AT_ID, AT_INIT, AT_CONNECT, AT_CALL, AT_GROUP_END, AT_RUN, AT_HANG, AT_SCALE, AT_LATE_CONNECT,
             AT_LATE_LAUNCH, AT_END, PLACES };

static struct {
    int left, code; /* at the left-th time from now on; 0: never */
} failures[PLACES][RANKS_MAX];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int comms, aborts, destroys, misuses, scales, launched;
static __thread int group_depth, group_code;
static __thread struct work *group, **group_tail;
static __thread struct comm *aborted; /* in the group of calls */

/* With the lock held. */
static int fails(enum place place, int rank) {
    return failures[place][rank].left > 0 && --failures[place][rank].left == 0 ? failures[place][rank].code : 0;
}

static int misuse(int code) {
    misuses++;
    return code;
}

/* ---- The double of the driver ---- */

static struct {
    int (*launch)(void *stream, void (*function)(void *data), void *data);
    char *(*address)(uint64_t address);
    int (*current)(void);
} cuda;

static int find_cuda(void) {
#ifdef CUDA_DOUBLE
    void *library = dlopen(CUDA_DOUBLE, RTLD_NOW | RTLD_LOCAL);
    if (library != NULL && cuda.launch == NULL) {
        cuda.address = (char *(*)(uint64_t))dlsym(library, "double_address");
        cuda.current = (int (*)(void))dlsym(library, "double_current");
        cuda.launch = (int (*)(void *, void (*)(void *), void *))dlsym(library, "cuLaunchHostFunc");
    }
#endif
    return cuda.launch != NULL;
}

/* With the lock held. */
static void free_if_over(struct comm *comm) {
    if (!comm->is_gone || comm->running > 0) {
        return;
    }
    for (struct mapping **link = &mappings; *link != NULL; link = &(*link)->next) {
        struct mapping *mapping = *link;
        if (mapping->clique == comm->clique && --mapping->users == 0) {
            *link = mapping->next;
            munmap(mapping->clique, sizeof *mapping->clique);
            free(mapping);
            break;
        }
    }
    if (--comms == 0) {
        note_end();
    }
    free(comm);
}

static void run_work(struct work *work) {
    struct comm *comm = work->comm;
    pthread_mutex_lock(&lock);
    work->has_begun = 1;
    pthread_mutex_unlock(&lock);
    if (work->hangs || work->code != 0) {
        pthread_mutex_lock(&lock);
        comm->state = work->code != 0 ? work->code : comm->state;
        pthread_mutex_unlock(&lock);
        hang(comm);
    } else if (!atomic_load(&comm->is_aborted)) {
        run(work);
    }
    pthread_mutex_lock(&lock);
    forget_work(work);
    free(work);
    comm->running--;
    free_if_over(comm);
    pthread_mutex_unlock(&lock);
}

/* The calls of a group are one launch. */
static void run_on_stream(void *data) {
    for (struct work *work = data, *next; work != NULL; work = next) {
        next = work->next;
        run_work(work);
    }
}

/* ---- Communicators ---- */

int ncclGetVersion(int *version) {
    *version = VERSION;
    return VERSION_CODE;
}

const char *ncclGetErrorString(int code) {
    return code == SYSTEM_ERROR ? "unhandled system error" : code == 6 ? "remote process exited" : "no text";
}

const char *ncclGetLastError(const struct comm *comm) {
    return comm == NULL ? "" : "the double was told to";
}

int ncclGetUniqueId(unique_id *id) {
    static unsigned count;
    pthread_mutex_lock(&lock);
    const int code = fails(AT_ID, 0);
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "clique-%d-%u", (int)getpid(), ++count);
    pthread_mutex_unlock(&lock);
    return code;
}

static int delay(struct comm *comm) {
    return DELAYS == 0 ? 0 : (int)(rand_r(&comm->seed) % (DELAYS + 1));
}

int ncclCommInitRankConfig(struct comm **out, int size, unique_id id, int rank, struct config *config) {
    *out = NULL;
    if (config == NULL || config->size != sizeof *config || config->magic != 0xcafebeefu || config->version < 21700 ||
        config->blocking != 0 || config->cga_cluster_size != INT_MIN || config->min_ctas != INT_MIN ||
        config->max_ctas != INT_MIN || config->net_name != NULL || config->split_share != INT_MIN) {
        return misuse(INVALID_ARGUMENT);
    }
    if (size < 1 || size > RANKS_MAX || rank < 0 || rank >= size) {
        return misuse(INVALID_ARGUMENT);
    }
    if (!find_cuda() || cuda.current() < 0) {
        return misuse(CUDA_ERROR);
    }
    pthread_mutex_lock(&lock);
    const int code = fails(AT_INIT, rank);
    struct clique *clique = code == 0 ? find_clique(&id) : NULL;
    struct comm *comm = clique == NULL ? NULL : calloc(1, sizeof *comm);
    if (comm != NULL) {
        *comm = (struct comm){.clique = clique, .id = id, .rank = rank, .size = size, .is_connecting = 1,
                              .state = IN_PROGRESS, .seed = (unsigned)rank + 1};
        comm->waiting_tail = &comm->waiting;
        comm->looks = delay(comm);
        clique->slots[rank].device = cuda.current();
        clique->slots[rank].process = (int)getpid();
        atomic_fetch_add(&clique->joined, 1);
        comms++;
        *out = comm;
    }
    pthread_mutex_unlock(&lock);
    return comm != NULL ? IN_PROGRESS : code != 0 ? code : SYSTEM_ERROR;
}

static int is_doubled(const struct comm *comm) {
    const struct slot *slots = comm->clique->slots;
    for (int a = 0; a < comm->size; a++) {
        for (int b = a + 1; b < comm->size; b++) {
            if (slots[a].device == slots[b].device && slots[a].process == slots[b].process) {
                return 1;
            }
        }
    }
    return 0;
}

/* With the lock held. Returns what is to be launched without it: a stream that is full makes the thread wait. */
static struct work *start(struct comm *comm) {
    struct work *first = comm->waiting;
    note_group(comm);
    for (struct work *work = comm->waiting; work != NULL; work = work->next) {
        work->hangs = fails(AT_HANG, comm->rank) != 0;
        work->code = fails(AT_RUN, comm->rank);
        comm->running++;
        launched++;
        note_work(work);
    }
    comm->waiting = NULL;
    comm->waiting_tail = &comm->waiting;
    return first;
}

/* As start; NULL: nothing is. */
static struct work *look(struct comm *comm) {
    if (comm->state != IN_PROGRESS) {
        return NULL;
    }
    if (comm->is_connecting) {
        const int code = fails(AT_CONNECT, comm->rank);
        const int late = fails(AT_LATE_CONNECT, comm->rank);
        comm->looks = late == 0 ? comm->looks : late <= SYSTEM_ERROR ? INT_MAX : late;
        if (code != 0 || atomic_load(&comm->clique->joined) == comm->size) {
            comm->is_connecting = code == 0 && comm->looks-- > 0;
            comm->state = code != 0 ? code : comm->is_connecting ? IN_PROGRESS : is_doubled(comm) ? INVALID_USAGE : 0;
        }
    } else if (comm->is_finalizing) {
        if (comm->running == 0 && atomic_load(&comm->clique->finalized) == comm->size && comm->looks-- <= 0) {
            comm->state = SUCCESS;
        }
    } else if (comm->looks-- <= 0) {
        comm->state = SUCCESS;
        return start(comm);
    }
    return NULL;
}

int ncclCommGetAsyncError(struct comm *comm, int *code) {
    pthread_mutex_lock(&lock);
    struct work *ready = look(comm);
    *code = comm->state;
    pthread_mutex_unlock(&lock);
    if (ready != NULL) {
        (void)cuda.launch(ready->stream, run_on_stream, ready);
    }
    return SUCCESS;
}

int ncclCommFinalize(struct comm *comm) {
    pthread_mutex_lock(&lock);
    const int failure = failure_of(comm);
    const int is_bad = comm->state != SUCCESS;
    const int code = failure != 0 ? failure : fails(AT_END, comm->rank);
    comm->state = is_bad ? comm->state : IN_PROGRESS;
    comm->is_finalizing = 1;
    comm->looks = delay(comm);
    atomic_fetch_add(&comm->clique->finalized, 1);
    pthread_mutex_unlock(&lock);
    return is_bad && failure == 0 ? misuse(INVALID_ARGUMENT) : code != 0 ? code : IN_PROGRESS;
}

static int end(struct comm *comm, int *counter) {
    pthread_mutex_lock(&lock);
    ++*counter;
    for (struct work *work = comm->waiting, *next; work != NULL; work = next) {
        next = work->next;
        free(work);
    }
    for (int i = 0; i < SCALES_MAX; i++) {
        scales -= comm->has_scale[i];
    }
    comm->is_gone = 1;
    free_if_over(comm);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int ncclCommDestroy(struct comm *comm) {
    if (!comm->is_finalizing || comm->state != SUCCESS) {
        (void)misuse(0);
    }
    return end(comm, &destroys);
}

/* As NCCL's, an abort waits until the kernels are over, those of a group together; here not without end. */
static void finish_aborts(void) {
    const struct timespec look = {.tv_nsec = 1000000};
    for (struct comm *comm = aborted, *next; comm != NULL; comm = next) {
        next = comm->next_aborted;
        pthread_mutex_lock(&lock);
        for (int looks = 0; stands_behind_others(comm); looks++) {
            pthread_mutex_unlock(&lock);
            nanosleep(&look, NULL);
            pthread_mutex_lock(&lock);
            if (looks == ABORT_MS) {
                (void)misuse(0);
                break;
            }
        }
        pthread_mutex_unlock(&lock);
        (void)end(comm, &aborts);
    }
    aborted = NULL;
}

#ifdef LACKS_ABORT
#define ncclCommAbort double_abort
#endif
int ncclCommAbort(struct comm *comm) {
    atomic_store(&comm->is_aborted, 1);
    comm->next_aborted = aborted;
    aborted = comm;
    if (group_depth == 0) {
        finish_aborts();
    }
    return SUCCESS;
}

/* ---- Collectives ---- */

int ncclRedOpCreatePreMulSum(int *operation, const void *scalar, int dtype, int residence, struct comm *comm) {
    pthread_mutex_lock(&lock);
    const int failure = failure_of(comm);
    int code = fails(AT_SCALE, comm->rank);
    code = failure != 0 ? failure : code;
    if (residence != 1 || (comm->state != SUCCESS && failure == 0) || !is_float(dtype)) {
        code = misuse(INVALID_ARGUMENT);
    }
    int i = 0;
    while (i < SCALES_MAX && comm->has_scale[i]) {
        i++;
    }
    code = code == 0 && i == SCALES_MAX ? misuse(INVALID_USAGE) : code;
    if (code == 0) {
        comm->scales[i] = float_at(scalar, dtype);
        comm->has_scale[i] = 1;
        scales++;
        *operation = FIRST_SCALE + i;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int ncclRedOpDestroy(int operation, struct comm *comm) {
    pthread_mutex_lock(&lock);
    const int i = operation - FIRST_SCALE;
    const int is_bad = i < 0 || i >= SCALES_MAX || !comm->has_scale[i] || comm->waiting != NULL;
    if (!is_bad) {
        comm->has_scale[i] = 0;
        scales--;
    }
    pthread_mutex_unlock(&lock);
    return is_bad ? misuse(INVALID_ARGUMENT) : SUCCESS;
}

int ncclGroupStart(void) {
    if (group_depth++ == 0) {
        group = NULL;
        group_tail = &group;
        group_code = 0;
    }
    return SUCCESS;
}

int ncclGroupEnd(void) {
    if (group_depth == 0) {
        return misuse(INVALID_USAGE);
    }
    if (--group_depth > 0) {
        return SUCCESS;
    }
    finish_aborts();
    pthread_mutex_lock(&lock);
    struct comm *comm = group == NULL ? NULL : group->comm;
    const int failure = comm == NULL ? 0 : failure_of(comm);
    int code = group_code != 0 || comm == NULL ? group_code : fails(AT_GROUP_END, comm->rank);
    code = code == 0 ? failure : code;
    if (code != 0) {
        for (struct work *next; group != NULL; group = next) {
            next = group->next;
            free(group);
        }
    } else if (comm != NULL) {
        *comm->waiting_tail = group;
        comm->waiting_tail = group_tail;
        comm->state = IN_PROGRESS;
        comm->looks = fails(AT_LATE_LAUNCH, comm->rank) ? INT_MAX : delay(comm);
        code = IN_PROGRESS;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static int add(struct work work, const void *input, void *output) {
    struct comm *comm = work.comm;
    ncclGroupStart();
    pthread_mutex_lock(&lock);
    const int failure = failure_of(comm);
    int code = fails(AT_CALL, comm->rank);
    code = failure != 0 ? failure : code;
    const int uses_input = work.kind != BROADCAST || comm->rank == work.root;
    const int uses_output = work.kind != REDUCE || comm->rank == work.root;
    work.input = uses_input ? cuda.address((uint64_t)(uintptr_t)input) : NULL;
    work.output = uses_output ? cuda.address((uint64_t)(uintptr_t)output) : NULL;
    if ((comm->state != SUCCESS && failure == 0) || cuda.current() < 0 || (uses_input && work.input == NULL) ||
        (uses_output && work.output == NULL) || work.count == 0) {
        code = misuse(INVALID_ARGUMENT);
    }
    if (code == 0 && work.operation >= FIRST_SCALE) {
        work.scale = comm->scales[work.operation - FIRST_SCALE];
    }
    pthread_mutex_unlock(&lock);
    if (code == 0) {
        struct work *copy = malloc(sizeof *copy);
        *copy = work;
        *group_tail = copy;
        group_tail = &copy->next;
    }
    group_code = group_code != 0 ? group_code : code;
    const int ended = ncclGroupEnd();
    return code != 0 ? code : ended;
}

int ncclAllReduce(const void *input, void *output, size_t count, int dtype, int operation, struct comm *comm,
                  void *stream) {
    return add((struct work){.comm = comm, .kind = ALL_REDUCE, .count = count, .dtype = dtype, .operation = operation,
                             .stream = stream}, input, output);
}

int ncclBroadcast(const void *input, void *output, size_t count, int dtype, int root, struct comm *comm,
                  void *stream) {
    return add((struct work){.comm = comm, .kind = BROADCAST, .count = count, .dtype = dtype, .root = root,
                             .stream = stream}, input, output);
}

int ncclReduce(const void *input, void *output, size_t count, int dtype, int operation, int root, struct comm *comm,
               void *stream) {
    return add((struct work){.comm = comm, .kind = REDUCE, .count = count, .dtype = dtype, .operation = operation,
                             .root = root, .stream = stream}, input, output);
}

int ncclReduceScatter(const void *input, void *output, size_t count, int dtype, int operation, struct comm *comm,
                      void *stream) {
    return add((struct work){.comm = comm, .kind = REDUCE_SCATTER, .count = count, .dtype = dtype,
                             .operation = operation, .stream = stream}, input, output);
}

/* ---- For tests ---- */

/* At its `at`-th time from now on (0: never), `place` fails on a rank with a code. */
void double_nccl_fail(int place, int rank, int at, int code) {
    pthread_mutex_lock(&lock);
    failures[place][rank].left = at;
    failures[place][rank].code = code;
    pthread_mutex_unlock(&lock);
}

/*
 * Communicators that exist, aborts, destroys, misuses, operations that exist, calls that ran, cliques that differed.
 */
void double_nccl_count(int *counts) {
    pthread_mutex_lock(&lock);
    const int all[] = {comms, aborts, destroys, misuses, scales, launched};
    memcpy(counts, all, sizeof all);
    counts[6] = 0;
    for (const struct mapping *mapping = mappings; mapping != NULL; mapping = mapping->next) {
        counts[6] += atomic_load(&mapping->clique->mismatches);
    }
    pthread_mutex_unlock(&lock);
}

/* What has been launched, a line each; it lives until the next call. */
const char *double_nccl_launches(void) {
    pthread_mutex_lock(&lock);
    if (launches != NULL) {
        fflush(launches);
    }
    pthread_mutex_unlock(&lock);
    return launches_text == NULL ? "" : launches_text;
}
