/*
 * The arithmetic of Adasum on two vectors, for every level: no include guard, as vector_template.h. Eight lanes
 * whatever the registers are, so that all levels add in one order; the compiler makes of them as many registers as it
 * takes.
 */
#define PAIR_LANES 8
typedef float pair_floats __attribute__((vector_size(PAIR_LANES * sizeof(float))));
typedef double pair_doubles __attribute__((vector_size(PAIR_LANES * sizeof(double))));

/* Beyond the end lie zeros, which change no sum: a sum that begins as +0 never becomes -0. */
#define DEFINE_PAIR(name, type, lanes_type)                                                                            \
    static void dots_##name(const uint8_t *a, const uint8_t *b, size_t count, double *sums) {                          \
        pair_doubles ab = {0};                                                                                         \
        pair_doubles aa = {0};                                                                                         \
        pair_doubles bb = {0};                                                                                         \
        for (size_t i = 0; i < count; i += PAIR_LANES) {                                                               \
            lanes_type x = {0};                                                                                        \
            lanes_type y = {0};                                                                                        \
            if (count - i >= PAIR_LANES) {                                                                             \
                memcpy(&x, a + i * sizeof(type), sizeof x);                                                            \
                memcpy(&y, b + i * sizeof(type), sizeof y);                                                            \
            } else {                                                                                                   \
                memcpy(&x, a + i * sizeof(type), (count - i) * sizeof(type));                                          \
                memcpy(&y, b + i * sizeof(type), (count - i) * sizeof(type));                                          \
            }                                                                                                          \
            const pair_doubles wide_x = __builtin_convertvector(x, pair_doubles);                                      \
            const pair_doubles wide_y = __builtin_convertvector(y, pair_doubles);                                      \
            ab += wide_x * wide_y;                                                                                     \
            aa += wide_x * wide_x;                                                                                     \
            bb += wide_y * wide_y;                                                                                     \
        }                                                                                                              \
        for (int lane = 0; lane < PAIR_LANES; lane++) {                                                                \
            sums[0] += ab[lane];                                                                                       \
            sums[1] += aa[lane];                                                                                       \
            sums[2] += bb[lane];                                                                                       \
        }                                                                                                              \
    }                                                                                                                  \
    static void combine_##name(uint8_t *a, const uint8_t *b, size_t count, double a_factor, double b_factor) {         \
        size_t i = 0;                                                                                                  \
        for (; count - i >= PAIR_LANES; i += PAIR_LANES) {                                                             \
            lanes_type x;                                                                                              \
            lanes_type y;                                                                                              \
            memcpy(&x, a + i * sizeof(type), sizeof x);                                                                \
            memcpy(&y, b + i * sizeof(type), sizeof y);                                                                \
            x = __builtin_convertvector(__builtin_convertvector(x, pair_doubles) * a_factor +                          \
                                            __builtin_convertvector(y, pair_doubles) * b_factor,                       \
                                        lanes_type);                                                                   \
            memcpy(a + i * sizeof(type), &x, sizeof x);                                                                \
        }                                                                                                              \
        for (; i < count; i++) {                                                                                       \
            type x;                                                                                                    \
            type y;                                                                                                    \
            memcpy(&x, a + i * sizeof x, sizeof x);                                                                    \
            memcpy(&y, b + i * sizeof y, sizeof y);                                                                    \
            x = (type)((double)x * a_factor + (double)y * b_factor);                                                   \
            memcpy(a + i * sizeof x, &x, sizeof x);                                                                    \
        }                                                                                                              \
    }

DEFINE_PAIR(float32, float, pair_floats)
DEFINE_PAIR(float64, double, pair_doubles)

#define HR_DOTS_TABLE                                                                                                  \
    { [HORO_FLOAT32] = dots_float32, [HORO_FLOAT64] = dots_float64 }
#define HR_COMBINE_TABLE                                                                                               \
    { [HORO_FLOAT32] = combine_float32, [HORO_FLOAT64] = combine_float64 }
