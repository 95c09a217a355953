#include "shim.h"

#include <string.h>

#include "kernel/kernel.h"

static const struct hr_kernel *find(const char *level) {
    return hr_kernel_find(strcmp(level, "best") == 0 ? NULL : level);
}

const char *shim_kernel_name(const char *level) {
    const struct hr_kernel *kernel = find(level);
    return kernel == NULL ? NULL : kernel->name;
}

void shim_kernel_reduce(const char *level, int dtype, int reduce_op, void *dst, void *copy, const void *const *src,
                       int src_count, size_t count, double factor, int divisor, int copy_store) {
    hr_kernel_reduce(find(level), dtype, reduce_op, dst, copy, src, src_count, count,
                     (struct hr_scale){factor, divisor}, (enum hr_store)copy_store);
}

void shim_kernel_scale(const char *level, int dtype, void *dst, const void *src, size_t count, double factor,
                      int divisor, int store) {
    hr_kernel_scale(find(level), dtype, dst, src, count, (struct hr_scale){factor, divisor}, (enum hr_store)store);
}

void shim_kernel_convert(const char *level, int dst_dtype, void *dst, int src_dtype, const void *src, size_t count,
                        double scale, int store) {
    hr_kernel_convert(find(level), dst_dtype, dst, src_dtype, src, count, scale, (enum hr_store)store);
}

void shim_kernel_dots(const char *level, int dtype, const void *a, const void *b, size_t count, double *sums) {
    hr_kernel_dots(find(level), dtype, a, b, count, sums);
}

void shim_kernel_combine(const char *level, int dtype, void *a, const void *b, size_t count, double a_factor,
                        double b_factor) {
    hr_kernel_combine(find(level), dtype, a, b, count, a_factor, b_factor);
}

void shim_kernel_copy(const char *level, void *dst, const void *src, size_t bytes, int store) {
    find(level)->copy(dst, src, bytes, (enum hr_store)store);
}

void shim_kernel_exchange(const char *level, void *out, void *slot, const void *in, size_t bytes, int store) {
    find(level)->exchange(out, slot, in, bytes, (enum hr_store)store);
}

const char *shim_dtype_name(int dtype) {
    return hr_dtype_name(dtype);
}

int shim_dtype_reducible(int dtype, int reduce_op) {
    return hr_dtype_reducible(dtype, reduce_op);
}
