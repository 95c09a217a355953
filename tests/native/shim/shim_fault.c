#include "shim.h"

#include <limits.h>
#include <pthread.h>
#include <stdlib.h>

int shim_fault_overflow(void) {
    volatile size_t end = 16;
    char *block = calloc(1, end);
    if (block == NULL) {
        return -1;
    }
    const int value = ((volatile char *)block)[end];
    free(block);
    return value;
}

int shim_fault_integer(void) {
    volatile int value = INT_MAX;
    return value + 1;
}

static void *increment(void *argument) {
    int *counter = argument;
    for (int i = 0; i < 1000; i++) {
        *(volatile int *)counter += 1;
    }
    return NULL;
}

int shim_fault_race(void) {
    int counter = 0;
    pthread_t other;
    if (pthread_create(&other, NULL, increment, &counter) != 0) {
        return -1;
    }
    (void)increment(&counter);
    (void)pthread_join(other, NULL);
    return counter;
}
