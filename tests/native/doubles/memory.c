/* Refuses the core one allocation, the `hr_refused`-th from now on. To be loaded before the C library (LD_PRELOAD). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);

int hr_refused; /* counts down; 0: none is */

static int is_refused(const void *caller) {
    Dl_info where;
    if (hr_refused == 0 || dladdr(caller, &where) == 0 || strstr(where.dli_fname, "_native") == NULL) {
        return 0;
    }
    return --hr_refused == 0;
}

void *malloc(size_t bytes) {
    return is_refused(__builtin_return_address(0)) ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes) {
    return is_refused(__builtin_return_address(0)) ? NULL : __libc_calloc(count, bytes);
}
