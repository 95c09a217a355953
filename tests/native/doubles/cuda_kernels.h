/*
 * Kernels on the double of the CUDA driver: those of the core, whose source is compiled for the host here. A stream
 * runs one thread of one block after the other, on memory that is checked. For cuda.c.
 */
#ifndef CUDA_KERNELS_H
#define CUDA_KERNELS_H

static __thread struct {
    unsigned x;
} blockIdx, threadIdx;

/* A kernel that leaves its memory ends the process. */
static uint64_t at(uint64_t address, uint64_t bytes) {
    char *found = opened(address, bytes);
    found = found == NULL ? reached(address, bytes) : found;
    if (found == NULL) {
        abort();
    }
    return (uint64_t)(uintptr_t)found;
}

#define HR_GPU_ON_HOST
#define HR_GPU_KERNEL static void
#define HR_GPU_INLINE static inline
#define HR_GPU_REACH(address, bytes) at(address, bytes)
#include "device/adasum.cu"
#include "device/pack.cu"

static void pack(uint64_t pieces, unsigned count) {
    hr_pack((const struct hr_pack_piece *)pieces, count);
}

static void unpack(uint64_t pieces, unsigned count) {
    hr_unpack((const struct hr_pack_piece *)pieces, count);
}

static void adasum_multiply(uint64_t batch, unsigned distance) {
    hr_adasum_multiply(batch, distance);
}

static void adasum_fold(uint64_t batch, unsigned distance) {
    hr_adasum_fold(batch, distance);
}

static void adasum_total(uint64_t batch, unsigned distance) {
    hr_adasum_total(batch, distance);
}

static void adasum_combine(uint64_t batch, unsigned distance) {
    hr_adasum_combine(batch, distance);
}

static const struct kernel {
    const char *name;
    void (*run)(uint64_t table, unsigned number);
} kernels[] = {
    {"hr_pack", pack},
    {"hr_unpack", unpack},
    {"hr_adasum_multiply", adasum_multiply},
    {"hr_adasum_fold", adasum_fold},
    {"hr_adasum_total", adasum_total},
    {"hr_adasum_combine", adasum_combine},
};

static int modules, kernel_count, refused_devices, launches, launch_fails_at;

int cuModuleLoadData(void **module, const char *text) {
    pthread_mutex_lock(&lock);
    const int device = double_current();
    const int is_refused = device < 0 || (refused_devices >> device & 1) != 0;
    modules += !is_refused;
    pthread_mutex_unlock(&lock);
    *module = &modules;
    return device < 0 ? INVALID_CONTEXT
           : is_refused ? UNSUPPORTED_PTX
           : strstr(text, "\n.version 6.0\n.target sm_52\n") == NULL ? INVALID_PTX
                                                                     : 0;
}

int cuModuleUnload(void *module) {
    (void)module;
    await_device();
    pthread_mutex_lock(&lock);
    modules--;
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module;
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++) {
        if (strcmp(kernels[i].name, name) == 0) {
            *function = (void *)&kernels[i];
            return 0;
        }
    }
    return NOT_FOUND;
}

/* In `number` the blocks, in `bytes` the second argument. */
static void run_kernel(struct work *work) {
    const struct stream *stream = work->data;
    const unsigned blocks = (unsigned)work->number;
    const struct kernel *kernel = work->target;
    for (blockIdx.x = 0; blockIdx.x < blocks && stream->code == 0; blockIdx.x++) {
        for (threadIdx.x = 0; threadIdx.x < HR_PACK_THREADS; threadIdx.x++) {
            kernel->run((uint64_t)(uintptr_t)work->source, (unsigned)work->bytes);
        }
    }
}

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **arguments,
                   void **extra) {
    pthread_mutex_lock(&lock);
    const int fails = ++launches == launch_fails_at;
    kernel_count += !fails;
    pthread_mutex_unlock(&lock);
    if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x != HR_PACK_THREADS || block_y != 1 || block_z != 1 ||
        shared_bytes != 0 || extra != NULL || entered == 0) {
        return INVALID_VALUE;
    }
    return fails ? LAUNCH_FAILED
                 : put(stream, (struct work){.run = run_kernel, .target = function, .number = grid_x,
                                             .source = *(void **)arguments[0], .bytes = *(unsigned *)arguments[1]});
}

/* Devices, as bits, whose driver does not take the kernels; launch number `launch` from now on fails (0: none). */
void double_refuse_kernels(int devices, int launch) {
    pthread_mutex_lock(&lock);
    refused_devices = devices;
    launch_fails_at = launch == 0 ? 0 : launches + launch;
    pthread_mutex_unlock(&lock);
}

#endif
