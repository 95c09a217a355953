/*
 * Kernels by level. Every function returns 0, or -1 if this machine or build has no such level ("best" always exists).
 */
#ifndef SHIM_KERNEL_H
#define SHIM_KERNEL_H

#include <stddef.h>

const char *shim_kernel_name(const char *level);
int shim_kernel_reduce(const char *level, int dtype, int reduce_op, void *dst, void *copy, const void *const *src,
                       int src_count, size_t count, double factor, int divisor, int copy_store);
int shim_kernel_scale(const char *level, int dtype, void *dst, const void *src, size_t count, double factor,
                      int divisor, int store);
int shim_kernel_convert(const char *level, int dst_dtype, void *dst, int src_dtype, const void *src, size_t count,
                        double scale, int store);
int shim_kernel_dots(const char *level, int dtype, const void *a, const void *b, size_t count, double *sums);
int shim_kernel_combine(const char *level, int dtype, void *a, const void *b, size_t count, double a_factor,
                        double b_factor);
int shim_kernel_copy(const char *level, void *dst, const void *src, size_t bytes, int store);
int shim_kernel_exchange(const char *level, void *out, void *slot, const void *in, size_t bytes, int store);
const char *shim_dtype_name(int dtype);
int shim_dtype_reducible(int dtype, int reduce_op);

#endif
