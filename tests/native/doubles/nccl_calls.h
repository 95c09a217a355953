/* The collectives of the double of NCCL. For nccl.c. */
#ifndef NCCL_CALLS_H
#define NCCL_CALLS_H

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

#endif
