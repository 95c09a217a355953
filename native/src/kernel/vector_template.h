/*
 * One SIMD level, compiled from portable vector types. No include guard: avx2.c, avx512.c and neon.c include it once
 * each, after defining
 *   VECTOR_BYTES                             bytes of one register
 *   widen_float16_lanes(vector_half)         16-bit floats to float32 lanes, returned as vector_float
 *   narrow_float16_lanes(vector_float)       and back, to nearest even
 *   widen_lanes(vector_half)                 16-bit lanes as 32-bit ones
 *   pick_nan(value, nan, other)              `nan` in the lanes where value, a vector_float, is NaN, else `other`; all
 *                                            vector_uint32
 *   upper_halves(vector_uint32, again)       the upper 16 bits of the lanes of both, in order, as vector_uint8
 *   stream_vector / stream_half(at, value)   a store past the cache; `at` is aligned to the size of the value
 *   stream_fence()                           after the last of them
 * An accumulator is one register; for 16-bit floats it holds the widened values of half as many bytes of memory.
 */
enum {
    PREFETCH_AHEAD = 1024, /* bytes; the cores' own prefetchers stop at the end of a page */
    PREFETCH_LINE = 64,
    UNROLL = 4, /* enough independent additions to hide their latency, few enough registers for every level */
};

/* Members, not an array: what is indexed by a loop counter ends up on the stack. */
struct block {
    vector_uint8 a;
    vector_uint8 b;
    vector_uint8 c;
    vector_uint8 d;
};

struct half_block {
    vector_half a;
    vector_half b;
    vector_half c;
    vector_half d;
};

HR_INLINE int is_half(int dtype) {
    return dtype == HORO_FLOAT16 || dtype == HORO_BFLOAT16;
}

HR_INLINE vector_uint8 load(int dtype, const uint8_t *at) {
    if (is_half(dtype)) {
        vector_half half;
        memcpy(&half, at, sizeof half);
        return dtype == HORO_FLOAT16 ? (vector_uint8)widen_float16_lanes(half)
                                     : (vector_uint8)(widen_lanes(half) << 16);
    }
    vector_uint8 value;
    memcpy(&value, at, sizeof value);
    return dtype == HORO_BOOL ? (vector_uint8)(value != (vector_uint8){0}) & 1 : value;
}

/* (a where mask else b), lane by lane; the lanes of a mask are all ones or zero. */
HR_INLINE vector_uint8 pick(vector_uint8 mask, vector_uint8 a, vector_uint8 b) {
    return (a & mask) | (b & ~mask);
}

/* The bfloat16 is in the upper half of each lane. */
HR_INLINE vector_uint32 round_bfloat16_lanes(vector_uint8 value) {
    const vector_uint32 bits = (vector_uint32)value;
    return pick_nan((vector_float)value, bits | 0x400000, bits + 0x7fff + ((bits >> 16) & 1));
}

/* Two registers at a time, since nothing else is cheap enough. */
HR_INLINE void narrow_bfloat16_lanes(vector_uint8 a, vector_uint8 b, vector_half *low, vector_half *high) {
    const vector_uint8 both = upper_halves(round_bfloat16_lanes(a), round_bfloat16_lanes(b));
    memcpy(low, &both, sizeof *low);
    memcpy(high, (const uint8_t *)&both + sizeof *low, sizeof *high);
}

HR_INLINE void store(uint8_t *at, vector_uint8 value, enum hr_store how) {
    if (how == HR_STORE_STREAM) {
        stream_vector(at, value);
    } else {
        memcpy(at, &value, sizeof value);
    }
}

HR_INLINE void store_half(uint8_t *at, vector_half value, enum hr_store how) {
    if (how == HR_STORE_STREAM) {
        stream_half(at, value);
    } else {
        memcpy(at, &value, sizeof value);
    }
}

/* wrapping: the type of sums and products; ordered: that of comparisons; nan: lanes of b that win any comparison. */
#define COMBINE(wrapping, ordered, nan)                                                                                \
    (op == HORO_SUM       ? (vector_uint8)((wrapping)a + (wrapping)b)                                                  \
     : op == HORO_PRODUCT ? (vector_uint8)((wrapping)a * (wrapping)b)                                                  \
     : op == HORO_MIN     ? pick((vector_uint8)((ordered)b < (ordered)a) | (nan), b, a)                                \
                               : pick((vector_uint8)((ordered)b > (ordered)a) | (nan), b, a))

HR_INLINE vector_uint8 combine(int dtype, int op, vector_uint8 a, vector_uint8 b) {
    const vector_uint8 none = {0};
    if (op >= HORO_BAND) {
        return op == HORO_BAND ? a & b : op == HORO_BOR ? a | b : a ^ b;
    }
    switch (dtype) {
    case HORO_UINT8: return COMBINE(vector_uint8, vector_uint8, none);
    case HORO_INT8: return COMBINE(vector_uint8, vector_int8, none);
    case HORO_INT16: return COMBINE(vector_uint16, vector_int16, none);
    case HORO_INT32: return COMBINE(vector_uint32, vector_int32, none);
    case HORO_INT64: return COMBINE(vector_uint64, vector_int64, none);
    case HORO_UINT16: return COMBINE(vector_uint16, vector_uint16, none);
    case HORO_UINT32: return COMBINE(vector_uint32, vector_uint32, none);
    case HORO_UINT64: return COMBINE(vector_uint64, vector_uint64, none);
    case HORO_BOOL: return op == HORO_SUM || op == HORO_MAX ? a | b : a & b;
    case HORO_FLOAT64:
        return COMBINE(vector_double, vector_double, (vector_uint8)((vector_double)b != (vector_double)b));
    default: return COMBINE(vector_float, vector_float, (vector_uint8)((vector_float)b != (vector_float)b));
    }
}

/* Floats only: kernel.c scales integers. */
HR_INLINE vector_uint8 multiply(int dtype, vector_uint8 value, double scale) {
    return dtype == HORO_FLOAT64 ? (vector_uint8)((vector_double)value * scale)
                                 : (vector_uint8)((vector_float)value * (float)scale);
}

/* Bytes of memory that one accumulator stands for. */
HR_INLINE size_t step_bytes(int dtype) {
    return is_half(dtype) ? VECTOR_BYTES / 2 : VECTOR_BYTES;
}

HR_INLINE struct block load_block(int dtype, const uint8_t *at) {
    const size_t step = step_bytes(dtype);
    return (struct block){
        load(dtype, at),
        load(dtype, at + step),
        load(dtype, at + 2 * step),
        load(dtype, at + 3 * step),
    };
}

HR_INLINE struct block combine_block(int dtype, int op, struct block x, struct block y) {
    return (struct block){
        combine(dtype, op, x.a, y.a),
        combine(dtype, op, x.b, y.b),
        combine(dtype, op, x.c, y.c),
        combine(dtype, op, x.d, y.d),
    };
}

HR_INLINE struct block multiply_block(int dtype, struct block x, double scale) {
    return (struct block){
        multiply(dtype, x.a, scale),
        multiply(dtype, x.b, scale),
        multiply(dtype, x.c, scale),
        multiply(dtype, x.d, scale),
    };
}

HR_INLINE void store_block(uint8_t *at, struct block x, enum hr_store how) {
    store(at, x.a, how);
    store(at + VECTOR_BYTES, x.b, how);
    store(at + 2 * VECTOR_BYTES, x.c, how);
    store(at + 3 * VECTOR_BYTES, x.d, how);
}

HR_INLINE struct half_block narrow_block(int dtype, struct block x) {
    if (dtype == HORO_FLOAT16) {
        return (struct half_block){
            narrow_float16_lanes((vector_float)x.a),
            narrow_float16_lanes((vector_float)x.b),
            narrow_float16_lanes((vector_float)x.c),
            narrow_float16_lanes((vector_float)x.d),
        };
    }
    struct half_block result;
    narrow_bfloat16_lanes(x.a, x.b, &result.a, &result.b);
    narrow_bfloat16_lanes(x.c, x.d, &result.c, &result.d);
    return result;
}

HR_INLINE void store_half_block(uint8_t *at, struct half_block x, enum hr_store how) {
    const size_t step = VECTOR_BYTES / 2;
    store_half(at, x.a, how);
    store_half(at + step, x.b, how);
    store_half(at + 2 * step, x.c, how);
    store_half(at + 3 * step, x.d, how);
}

/* To dst and copy, where they are not NULL; 16-bit floats are narrowed once for both. */
HR_INLINE void store_result(int dtype, uint8_t *dst, uint8_t *copy, size_t at, struct block value,
                            enum hr_store copy_store) {
    if (is_half(dtype)) {
        const struct half_block half = narrow_block(dtype, value);
        if (dst != NULL) {
            store_half_block(dst + at, half, HR_STORE_ORDINARY);
        }
        if (copy != NULL) {
            store_half_block(copy + at, half, copy_store);
        }
        return;
    }
    if (dst != NULL) {
        store_block(dst + at, value, HR_STORE_ORDINARY);
    }
    if (copy != NULL) {
        store_block(copy + at, value, copy_store);
    }
}

/* Touches the cache lines of [at, at + bytes) for a later load or store. */
HR_INLINE void prefetch(const void *at, size_t bytes) {
    for (size_t line = 0; line < bytes; line += PREFETCH_LINE) {
        __builtin_prefetch((const uint8_t *)at + line);
    }
}

/* Whole blocks from element `begin` on; returns the first one not done. Sources are read once, before any store. */
HR_INLINE size_t run_blocks(int to, int from, int op, const struct hr_span *span, size_t begin, int src_count,
                            enum hr_store how) {
    const size_t block = UNROLL * step_bytes(from) / element_bytes(from);
    const size_t block_bytes = UNROLL * step_bytes(from);
    const void *const *src = span->src;
    uint8_t *dst = span->dst;
    uint8_t *copy = span->copy;
    const double scale = span->scale;
    const int is_scaled = scale != 1.0 && (is_half(from) || from == HORO_FLOAT32 || from == HORO_FLOAT64);
    size_t i = begin;
    for (; span->end - i >= block; i += block) {
        const size_t at = i * element_bytes(from);
        /* never beyond the end: what lies there is another core's. A conversion is slower with it. */
        if (to == from && span->end - i >= PREFETCH_AHEAD / element_bytes(from) + block) {
            for (int s = 0; s < src_count; s++) {
                prefetch((const uint8_t *)src[s] + at + PREFETCH_AHEAD, block_bytes);
            }
        }
        struct block value = load_block(from, (const uint8_t *)src[0] + at);
        for (int s = 1; s < src_count; s++) {
            value = combine_block(from, op, value, load_block(from, (const uint8_t *)src[s] + at));
        }
        if (is_scaled) {
            value = multiply_block(from, value, scale);
        }
        store_result(to, dst, copy, i * element_bytes(to), value, how);
    }
    return i;
}

HR_INLINE size_t run_counted(int to, int from, int op, const struct hr_span *span, size_t begin, enum hr_store how) {
    const int src_count = to == from ? span->src_count : 1;
    return src_count == 2 ? run_blocks(to, from, op, span, begin, 2, how)
                          : run_blocks(to, from, op, span, begin, src_count, how);
}

/* `scalar` does the same, for what is before and behind whole blocks. */
HR_INLINE void run_all(int to, int from, int op, const struct hr_span *span, void (*scalar)(const struct hr_span *)) {
    struct hr_span rest = *span;
    if (span->copy != NULL && span->copy_store == HR_STORE_STREAM) {
        /* the elements before copy + begin is aligned to a register, all of them if it never is */
        const size_t bytes = -(uintptr_t)(span->copy + span->begin * element_bytes(to)) % VECTOR_BYTES;
        const size_t head = bytes % element_bytes(to) == 0 ? bytes / element_bytes(to) : SIZE_MAX;
        if (head < span->end - span->begin) {
            rest.end = span->begin + head;
            scalar(&rest);
            rest.begin = run_counted(to, from, op, span, rest.end, HR_STORE_STREAM);
            rest.end = span->end;
            stream_fence();
        }
    } else {
        rest.begin = run_counted(to, from, op, span, span->begin, HR_STORE_ORDINARY);
    }
    scalar(&rest);
}

HR_INLINE void run(int dtype, int op, const struct hr_span *span) {
    run_all(dtype, dtype, op, span, hr_kernel_scalar.reduce[dtype][op]);
}

HR_INLINE void convert(int to, int from, const struct hr_span *span) {
    run_all(to, from, HORO_SUM, span, hr_kernel_scalar.convert[to][from]);
}

HR_DEFINE_ALL_OPS
HR_DEFINE_CONVERSIONS

HR_INLINE size_t copy_blocks(uint8_t *to, const uint8_t *from, size_t at, size_t bytes, enum hr_store how) {
    const size_t block_bytes = UNROLL * VECTOR_BYTES;
    for (; bytes - at >= block_bytes; at += block_bytes) {
        if (bytes - at >= PREFETCH_AHEAD + block_bytes) {
            prefetch(from + at + PREFETCH_AHEAD, block_bytes);
            if (how == HR_STORE_ORDINARY) {
                prefetch(to + at + PREFETCH_AHEAD, block_bytes);
            }
        }
        store_block(to + at, load_block(HORO_UINT8, from + at), how);
    }
    return at;
}

static void level_copy(void *dst, const void *src, size_t bytes, enum hr_store how) {
    uint8_t *to = dst;
    const uint8_t *from = src;
    size_t at = -(uintptr_t)to % VECTOR_BYTES;
    if (bytes < (how == HR_STORE_ORDINARY ? 4 * PREFETCH_AHEAD : at + 1)) {
        memcpy(to, from, bytes);
        return;
    }
    memcpy(to, from, at);
    if (how == HR_STORE_ORDINARY) {
        at = copy_blocks(to, from, at, bytes, HR_STORE_ORDINARY);
    } else {
        at = copy_blocks(to, from, at, bytes, HR_STORE_STREAM);
        stream_fence();
    }
    memcpy(to + at, from + at, bytes - at);
}

HR_INLINE size_t exchange_blocks(uint8_t *out, uint8_t *slot, const uint8_t *in, size_t at, size_t bytes,
                                 enum hr_store how) {
    const size_t block_bytes = UNROLL * VECTOR_BYTES;
    for (; bytes - at >= block_bytes; at += block_bytes) {
        if (bytes - at >= PREFETCH_AHEAD + block_bytes) {
            prefetch(slot + at + PREFETCH_AHEAD, block_bytes);
            prefetch(in + at + PREFETCH_AHEAD, block_bytes);
            prefetch(out + at + PREFETCH_AHEAD, block_bytes);
        }
        const struct block received = load_block(HORO_UINT8, slot + at);
        store_block(slot + at, load_block(HORO_UINT8, in + at), how);
        store_block(out + at, received, HR_STORE_ORDINARY);
    }
    return at;
}

static void level_exchange(void *out, void *slot, const void *in, size_t bytes, enum hr_store slot_store) {
    uint8_t *to = out;
    uint8_t *between = slot;
    const uint8_t *from = in;
    const size_t misaligned = -(uintptr_t)between % VECTOR_BYTES;
    size_t at = misaligned < bytes ? misaligned : bytes;
    memcpy(to, between, at);
    memcpy(between, from, at);
    if (slot_store == HR_STORE_ORDINARY) {
        at = exchange_blocks(to, between, from, at, bytes, HR_STORE_ORDINARY);
    } else {
        at = exchange_blocks(to, between, from, at, bytes, HR_STORE_STREAM);
        stream_fence();
    }
    memcpy(to + at, between + at, bytes - at);
    memcpy(between + at, from + at, bytes - at);
}

#include "kernel/pair_template.h"
