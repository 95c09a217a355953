#include "values.h"

#include <math.h>
#include <string.h>

#include "chance.h"

enum { OFFSETS = 5, PERIOD = 7, FACTORS = 3, LOOK_AT_ALL = 256, LOOKS = 64 };

/* ---- Elements of any dtype ---- */

/* Exact for what is stored here: not tiny, few bits. */
static uint16_t to_half(double value) {
    if (value == 0) {
        return 0;
    }
    if (value < 0) {
        return (uint16_t)(0x8000 | to_half(-value));
    }
    int exponent;
    const double mantissa = frexp(value, &exponent);
    return (uint16_t)((exponent + 14) << 10 | (int)((mantissa * 2 - 1) * 1024));
}

static double from_half(uint16_t bits) {
    const double sign = bits >> 15 ? -1.0 : 1.0;
    const int exponent = bits >> 10 & 31;
    const double mantissa = (bits & 1023) / 1024.0;
    return sign * (exponent == 0 ? ldexp(mantissa, -14) : ldexp(1 + mantissa, exponent - 15));
}

static uint16_t to_brain(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static double from_brain(uint16_t brain) {
    const uint32_t bits = (uint32_t)brain << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

static void store(int dtype, void *memory, int64_t at, int value) {
    switch (dtype) {
    case HORO_UINT8: ((uint8_t *)memory)[at] = (uint8_t)value; return;
    case HORO_INT32: ((int32_t *)memory)[at] = value; return;
    case HORO_INT64: ((int64_t *)memory)[at] = value; return;
    case HORO_FLOAT16: ((uint16_t *)memory)[at] = to_half(value); return;
    case HORO_BFLOAT16: ((uint16_t *)memory)[at] = to_brain((float)value); return;
    case HORO_FLOAT32: ((float *)memory)[at] = (float)value; return;
    default: ((double *)memory)[at] = value;
    }
}

static double load(int dtype, const void *memory, int64_t at) {
    switch (dtype) {
    case HORO_UINT8: return ((const uint8_t *)memory)[at];
    case HORO_INT32: return ((const int32_t *)memory)[at];
    case HORO_INT64: return (double)((const int64_t *)memory)[at];
    case HORO_FLOAT16: return from_half(((const uint16_t *)memory)[at]);
    case HORO_BFLOAT16: return from_brain(((const uint16_t *)memory)[at]);
    case HORO_FLOAT32: return (double)((const float *)memory)[at];
    default: return ((const double *)memory)[at];
    }
}

/* ---- Complex numbers: two elements of another dtype ---- */

static int part_of_number(int dtype) {
    switch (dtype) {
    case HORO_COMPLEX32: return HORO_FLOAT16;
    case HORO_COMPLEX64: return HORO_FLOAT32;
    case HORO_COMPLEX128: return HORO_FLOAT64;
    default: return dtype;
    }
}

static int parts_of_number(int dtype) {
    return part_of_number(dtype) == dtype ? 1 : 2;
}

/* Of `size` times i to the power of `turns`: its real or imaginary part. */
static int turned(int size, int turns, int part) {
    static const int units[2][4] = {{1, 0, -1, 0}, {0, 1, 0, -1}};
    return units[part][turns % 4] * size;
}

/* ---- Inputs: what all ranks have in common at an element, and what a rank has in all elements of a tensor ---- */

static int common(const struct operation *operation, int tensor, int64_t at) {
    return (int)(((uint64_t)at + operation->salt + (unsigned)tensor) % PERIOD);
}

static int offset(const struct operation *operation, int tensor, int rank) {
    return (int)(chance_mix(operation->salt, (uint64_t)rank * TENSORS_MAX + (unsigned)tensor) % OFFSETS);
}

/* A product of more than a few numbers is too large for 16 bits: those of all other ranks are 1. */
static int is_factor(const struct operation *operation, int rank) {
    const int first = (int)(operation->salt % 4);
    return rank >= first && rank < first + FACTORS;
}

static int is_adasum(const struct operation *operation) {
    return operation->op == HORO_ALLREDUCE && operation->reduce_op == HORO_ADASUM;
}

static int is_product(const struct operation *operation) {
    return operation_reduces(operation) && operation->reduce_op == HORO_PRODUCT;
}

static int element(const struct operation *operation, int tensor, int rank, int64_t at) {
    if (is_product(operation)) {
        return is_factor(operation, rank) ? 1 + common(operation, tensor, at) % 2 : 1;
    }
    if (is_adasum(operation)) { /* equal vectors give themselves, whatever the tree */
        return common(operation, tensor, at);
    }
    return common(operation, tensor, at) + offset(operation, tensor, rank);
}

int64_t values_rows_for(const struct operation *operation, int rank, int other) {
    const uint64_t pair = operation->op == HORO_ALLTOALL ? (uint64_t)(other + 1) * RANKS_MAX : 0;
    return (int64_t)(chance_mix(operation->salt, pair + (uint64_t)rank + 1000) % (uint64_t)(operation->counts[0] + 1));
}

/* Those that a rank has for the members in front of `other`. */
static int64_t rows_before(const struct operation *operation, const struct team *team, int rank, int other) {
    int64_t rows = 0;
    for (int i = 0; i < team->size && team->ranks[i] < other; i++) {
        rows += values_rows_for(operation, rank, team->ranks[i]);
    }
    return rows;
}

int64_t values_rows(const struct operation *operation, const struct team *team, int rank) {
    return operation->op == HORO_ALLTOALL ? rows_before(operation, team, rank, RANKS_MAX)
                                          : values_rows_for(operation, rank, 0);
}

void values_fill(const struct operation *operation, int tensor, int rank, int dtype, int64_t count, void *memory) {
    const int parts = parts_of_number(dtype);
    for (int64_t at = 0; at < count && at < PERIOD; at++) {
        const int value = element(operation, tensor, rank, at);
        for (int p = 0; p < parts; p++) {
            const int own = parts == 1 ? value : turned(value, offset(operation, tensor, rank), p);
            store(part_of_number(dtype), memory, at * parts + p, own);
        }
    }
    const int64_t element_bytes = (int64_t)horo_dtype_bytes(dtype);
    for (int64_t done = PERIOD; done < count; done *= 2) { /* it repeats itself */
        const int64_t more = done < count - done ? done : count - done;
        memcpy((char *)memory + done * element_bytes, memory, (size_t)(more * element_bytes));
    }
}

/* ---- Results ---- */

struct answer {
    int sum, least, most, factors;
};

static struct answer summarize(const struct operation *operation, const struct team *team, int tensor) {
    struct answer answer = {.least = OFFSETS};
    for (int i = 0; i < team->size; i++) {
        const int own = offset(operation, tensor, team->ranks[i]);
        answer.sum += own;
        answer.least = own < answer.least ? own : answer.least;
        answer.most = own > answer.most ? own : answer.most;
        answer.factors += is_factor(operation, team->ranks[i]);
    }
    return answer;
}

static double expect(const struct operation *operation, const struct team *team, int everyone, int tensor,
                     const struct answer *answer, int64_t at) {
    if (operation->op == HORO_BROADCAST) {
        return element(operation, tensor, operation->root_rank, at);
    }
    const double base = common(operation, tensor, at);
    const double scale = operation->prescale * operation->postscale;
    switch (operation->reduce_op) {
    case HORO_ADASUM: return base * scale;
    case HORO_MIN: return (base + answer->least) * scale;
    case HORO_MAX: return (base + answer->most) * scale;
    case HORO_PRODUCT: return ldexp(1.0, (int)base % 2 * answer->factors) * scale;
    case HORO_AVERAGE: return (base * team->size + answer->sum) / everyone * scale;
    default: return (base * team->size + answer->sum) * scale;
    }
}

/* Only the division of an average rounds. */
static double tolerance(const struct operation *operation, double wanted) {
    if (!operation_reduces(operation) || operation->reduce_op != HORO_AVERAGE) {
        return 0;
    }
    switch (operation->dtype) {
    case HORO_FLOAT64: return wanted * 1e-14;
    case HORO_FLOAT32: return wanted * 1e-6;
    case HORO_FLOAT16: return wanted * 2e-3;
    case HORO_BFLOAT16: return wanted * 2e-2;
    default: return 1.0;
    }
}

static int64_t look(struct chance *chance, int64_t count, int64_t step) {
    if (count <= LOOK_AT_ALL || step < LOOKS) {
        return step;
    }
    return step < 2 * LOOKS ? count - 1 - (step - LOOKS) : (int64_t)(chance_next(chance) % (uint64_t)count);
}

static int64_t looks(int64_t count) {
    return count <= LOOK_AT_ALL ? count : 3 * LOOKS;
}

struct part {
    int64_t first, count;
};

/* Of a reducescatter, the rows that fall to a rank: the first members have one more. Of all else, all elements. */
static struct part part_of(const struct operation *operation, const struct team *team, int tensor, int rank) {
    struct part part = {0, operation->counts[tensor]};
    if (operation->op == HORO_REDUCESCATTER) {
        for (int i = 0; i < team->size; i++) {
            part.first += i == 0 ? 0 : part.count;
            part.count = (operation->counts[tensor] + team->size - 1 - i) / team->size;
            if (team->ranks[i] == rank) {
                break;
            }
        }
    }
    return part;
}

int values_check(const struct operation *operation, const struct team *team, int everyone, int tensor, int rank,
                 const void *memory, int64_t *at, double *got, double *wanted) {
    const struct answer answer = summarize(operation, team, tensor);
    struct chance chance = {operation->salt};
    const struct part part = part_of(operation, team, tensor, rank);
    const int parts = parts_of_number(operation->dtype);
    for (int64_t step = 0; step < looks(part.count) * parts; step++) {
        *at = look(&chance, part.count, step / parts);
        const int p = (int)(step % parts);
        *got = load(part_of_number(operation->dtype), memory, *at * parts + p);
        *wanted = expect(operation, team, everyone, tensor, &answer, part.first + *at);
        *wanted *= parts == 1 ? 1 : turned(1, answer.sum, p);
        if (!(fabs(*got - *wanted) <= tolerance(operation, *wanted))) {
            return 0;
        }
    }
    return 1;
}

int values_check_part(const struct operation *operation, const struct team *team, int rank, int other,
                      const void *memory, int64_t *at, double *got, double *wanted) {
    struct chance chance = {operation->salt};
    const int64_t count = values_rows_for(operation, rank, other) * operation->columns;
    const int is_for_one = operation->op == HORO_ALLTOALL;
    const int64_t first = is_for_one ? rows_before(operation, team, rank, other) * operation->columns : 0;
    for (int64_t step = 0; step < looks(count); step++) {
        *at = look(&chance, count, step);
        *got = load(operation->dtype, memory, *at);
        *wanted = element(operation, 0, rank, first + *at);
        if (*got != *wanted) {
            return 0;
        }
    }
    return 1;
}
