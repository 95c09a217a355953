/*
 * Where the ranks of the double of NCCL meet, what they do on a stream, and what an abort waits for. For nccl.c, whose
 * lock its callers hold but on the threads of streams.
 */
#ifndef NCCL_RUN_H
#define NCCL_RUN_H

#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "kernel/level.h"

enum { SUCCESS = 0, CUDA_ERROR = 1, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };
enum { RANKS_MAX = 16, CHUNK = 1 << 14, SCALES_MAX = 16, ABORT_MS = 2000 };
enum kind { ALL_REDUCE, BROADCAST, REDUCE, REDUCE_SCATTER };
enum { SUM, PRODUCT, MAX, MIN, AVERAGE, FIRST_SCALE };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, HALF, FLOAT, DOUBLE, BFLOAT };

typedef struct {
    char bytes[128];
} unique_id;

/* As in nccl.h of 2.18.1; later versions have more behind it, and read as much as `size` says. */
struct config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
};

struct slot {
    int device, process;
    int kind, dtype, operation, root;
    size_t count;
    double scale;
    char data[CHUNK];
};

/* What the ranks share. */
struct clique {
    _Atomic int joined, finalized, arrived, mismatches;
    _Atomic uint32_t generation;
    struct slot slots[RANKS_MAX];
};

struct comm {
    struct clique *clique;
    unique_id id;
    int rank, size;
    int state;  /* what polling says, under the lock */
    int looks;  /* left until it says more */
    int is_connecting, is_finalizing, is_gone;
    _Atomic int is_aborted;
    int running; /* launched and not over */
    struct comm *next_aborted; /* in the same group of calls */
    int groups;
    unsigned seed;
    struct work *waiting, **waiting_tail; /* a group that is polled for */
    double scales[SCALES_MAX];
    int has_scale[SCALES_MAX];
};

struct work {
    struct work *next;
    struct work *launched_next; /* of those that are launched and not over */
    int has_begun;
    struct comm *comm;
    enum kind kind;
    const char *input;
    char *output;
    size_t count;
    int dtype, operation, root, hangs, code;
    double scale;
    void *stream;
};

/* With the lock held: what has failed before, of which a rank learns at its next call, whichever that is. */
static int failure_of(const struct comm *comm) {
    return comm->state == SUCCESS || comm->state == IN_PROGRESS ? 0 : comm->state;
}

/* ---- Values ---- */

static const int TYPES[] = {HORO_INT8, HORO_UINT8, HORO_INT32, HORO_UINT32, HORO_INT64, HORO_UINT64,
                            HORO_FLOAT16, HORO_FLOAT32, HORO_FLOAT64, HORO_BFLOAT16};

static size_t width_of(int dtype) {
    static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return widths[dtype];
}

/* Not by memcpy: the sanitizer knows nothing of how ranks take turns here. */
static void move(volatile char *to, const volatile char *from, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        to[i] = from[i];
    }
}

static int is_float(int dtype) {
    return dtype >= HALF;
}

static double float_at(const void *at, int dtype) {
    return dtype == DOUBLE ? load_double(at) : (double)load_float(TYPES[dtype], at);
}

static void put_float(void *at, int dtype, double value) {
    if (dtype == DOUBLE) {
        memcpy(at, &value, sizeof value);
    } else {
        store_float(TYPES[dtype], at, (float)value);
    }
}

static int64_t integer_at(const void *at, int dtype) {
    return load_integer(TYPES[dtype], at);
}

static double combine(int operation, double a, double b) {
    switch (operation) {
    case PRODUCT: return a * b;
    case MAX: return a > b ? a : b;
    case MIN: return a < b ? a : b;
    default: return a + b;
    }
}

static int64_t combine_integers(int operation, int64_t a, int64_t b, int is_unsigned) {
    const int is_more = is_unsigned ? (uint64_t)a > (uint64_t)b : a > b;
    switch (operation) {
    case PRODUCT: return (int64_t)((uint64_t)a * (uint64_t)b);
    case MAX: return is_more ? a : b;
    case MIN: return is_more ? b : a;
    default: return (int64_t)((uint64_t)a + (uint64_t)b);
    }
}

static double scaled(const struct work *work, double value) {
    char rounded[8];
    if (work->operation < FIRST_SCALE && work->operation != AVERAGE) {
        return value;
    }
    put_float(rounded, work->dtype, value * (work->operation == AVERAGE ? 1.0 / work->comm->size : work->scale));
    return float_at(rounded, work->dtype);
}

/* Value `i` of what all ranks have in their slots. */
static void reduce(const struct work *work, size_t i, char *out) {
    const struct slot *slots = work->comm->clique->slots;
    const size_t at = i * width_of(work->dtype);
    if (is_float(work->dtype)) {
        double value = scaled(work, float_at(slots[0].data + at, work->dtype));
        for (int r = 1; r < work->comm->size; r++) {
            value = combine(work->operation, value, scaled(work, float_at(slots[r].data + at, work->dtype)));
        }
        put_float(out, work->dtype, value);
        return;
    }
    int64_t value = integer_at(slots[0].data + at, work->dtype);
    for (int r = 1; r < work->comm->size; r++) {
        value = combine_integers(work->operation, value, integer_at(slots[r].data + at, work->dtype),
                                 work->dtype == UINT64);
    }
    move(out, (char *)&value, width_of(work->dtype));
}

/* ---- A kernel, on the thread of its stream ---- */

/* 0 when all ranks have come here; -1 if this one was aborted. */
static int meet(struct comm *comm) {
    struct clique *clique = comm->clique;
    const uint32_t generation = atomic_load(&clique->generation);
    const struct timespec look = {.tv_nsec = 2000000};
    if (atomic_fetch_add(&clique->arrived, 1) + 1 == comm->size) {
        atomic_store(&clique->arrived, 0);
        atomic_fetch_add(&clique->generation, 1);
        syscall(SYS_futex, &clique->generation, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
        return 0;
    }
    while (atomic_load(&clique->generation) == generation) {
        if (atomic_load(&comm->is_aborted)) {
            return -1;
        }
        syscall(SYS_futex, &clique->generation, FUTEX_WAIT, generation, &look, NULL, 0);
    }
    return 0;
}

static void hang(struct comm *comm) {
    const struct timespec look = {.tv_nsec = 2000000};
    while (!atomic_load(&comm->is_aborted)) {
        nanosleep(&look, NULL);
    }
}

static void check_alike(const struct work *work) {
    struct clique *clique = work->comm->clique;
    const struct slot *first = &clique->slots[0];
    const struct slot *mine = &clique->slots[work->comm->rank];
    if (mine->kind != first->kind || mine->dtype != first->dtype || mine->operation != first->operation ||
        mine->root != first->root || mine->count != first->count || mine->scale != first->scale) {
        atomic_fetch_add(&clique->mismatches, 1);
    }
}

static void run(const struct work *work) {
    struct comm *comm = work->comm;
    struct slot *mine = &comm->clique->slots[comm->rank];
    const size_t width = width_of(work->dtype);
    const size_t total = work->kind == REDUCE_SCATTER ? work->count * (size_t)comm->size : work->count;
    for (size_t at = 0; at < total; at += CHUNK / width) {
        const size_t count = total - at < CHUNK / width ? total - at : CHUNK / width;
        mine->kind = (int)work->kind;
        mine->dtype = work->dtype;
        mine->operation = work->operation < FIRST_SCALE ? work->operation : FIRST_SCALE;
        mine->root = work->root;
        mine->count = work->count;
        mine->scale = work->scale;
        if (work->kind != BROADCAST || comm->rank == work->root) {
            move(mine->data, work->input + at * width, count * width);
        }
        if (meet(comm) != 0) {
            return;
        }
        check_alike(work);
        const size_t first = work->kind == REDUCE_SCATTER ? (size_t)comm->rank * work->count : 0;
        for (size_t i = 0; i < count; i++) {
            char *out = work->output == NULL ? NULL : work->output + (at + i - first) * width;
            if (work->kind == BROADCAST) {
                move(out, comm->clique->slots[work->root].data + i * width, width);
            } else if (at + i >= first && at + i - first < work->count &&
                       (work->kind != REDUCE || comm->rank == work->root)) {
                reduce(work, i, out);
            }
        }
        if (meet(comm) != 0) {
            return;
        }
    }
}

/* ---- The file beside the double in which ranks meet, threads and processes alike ---- */

int ncclGetVersion(int *version);

/* One mapping serves all ranks of a process. */
struct mapping {
    struct mapping *next;
    unique_id id;
    struct clique *clique;
    int users;
};

static struct mapping *mappings;

static struct clique *map_file(const char *name) {
    Dl_info info;
    char path[4096];
    if (dladdr((void *)&ncclGetVersion, &info) == 0) {
        return NULL;
    }
    snprintf(path, sizeof path, "%s.%s", info.dli_fname, name);
    const int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(struct clique)) != 0) {
        return NULL;
    }
    void *data = mmap(NULL, sizeof(struct clique), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return data == MAP_FAILED ? NULL : data;
}

/* With the lock held. One mapping serves all ranks of a process. */
static struct clique *find_clique(const unique_id *id) {
    struct mapping *mapping = mappings;
    while (mapping != NULL && memcmp(&mapping->id, id, sizeof *id) != 0) {
        mapping = mapping->next;
    }
    if (mapping == NULL) {
        struct clique *clique = map_file(id->bytes);
        mapping = clique == NULL ? NULL : calloc(1, sizeof *mapping);
        if (mapping == NULL) {
            return NULL;
        }
        *mapping = (struct mapping){.next = mappings, .id = *id, .clique = clique};
        mappings = mapping;
    }
    mapping->users++;
    return mapping->clique;
}

/* ---- What the ranks of this process launch ---- */

/* A line for each launch, the calls of a group: GPU, stream, and a word that its collective has on all ranks. */
static FILE *launches;
static char *launches_text;
static size_t launches_bytes;

static void note_group(struct comm *comm) {
    launches = launches != NULL ? launches : open_memstream(&launches_text, &launches_bytes);
    if (comm->waiting != NULL) {
        fprintf(launches, "%d %p %s:%d\n", comm->clique->slots[comm->rank].device, comm->waiting->stream,
                comm->id.bytes, ++comm->groups);
    }
}

/* A job after that has other streams. */
static void note_end(void) {
    if (launches != NULL) {
        fprintf(launches, "over\n");
    }
}

/* ---- What an abort waits for ---- */

static struct work *launched_first;

static void note_work(struct work *work) {
    struct work **link = &launched_first;
    while (*link != NULL) {
        link = &(*link)->launched_next;
    }
    *link = work;
}

static void forget_work(const struct work *work) {
    struct work **link = &launched_first;
    while (*link != work) {
        link = &(*link)->launched_next;
    }
    *link = work->launched_next;
}

/* Whether a kernel of it stands behind one that runs, and goes on to, of a communicator that is not aborted. */
static int stands_behind_others(const struct comm *comm) {
    for (const struct work *work = launched_first; work != NULL; work = work->launched_next) {
        for (const struct work *before = launched_first; work->comm == comm && before != work;
             before = before->launched_next) {
            if (before->stream == work->stream && before->comm != comm && before->has_begun &&
                !atomic_load(&before->comm->is_aborted)) {
                return 1;
            }
        }
    }
    return 0;
}

#endif
