/* Vectors of 16 floats on any processor: arithmetic, sums across a vector, exp, tanh, sigmoid. */

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif

#if defined(__AVX512F__)
#define WIDE 16 /* floats of the processor's vector */
#elif defined(__AVX2__)
#define WIDE 8
#else
#define WIDE 4
#endif
#define PARTS (LANES / WIDE)
#define EACH UNROLL for (int i = 0; i < PARTS; i++)

typedef float part __attribute__((vector_size(4 * WIDE)));
typedef float part_anywhere __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
typedef int32_t bits __attribute__((vector_size(4 * WIDE)));
typedef float v8 __attribute__((vector_size(32), may_alias));
typedef float v4 __attribute__((vector_size(16), may_alias));
typedef struct {
    part p[PARTS];
} v16;

#define NUMBERS (WIDE / 2) /* doubles of the processor's vector */

typedef double doubles __attribute__((vector_size(4 * WIDE)));
typedef int64_t longs __attribute__((vector_size(4 * WIDE)));
typedef int64_t longs_anywhere __attribute__((vector_size(4 * WIDE), aligned(8), may_alias));
typedef double four_doubles __attribute__((vector_size(32), may_alias));
typedef double doubles_anywhere __attribute__((vector_size(4 * WIDE), aligned(8), may_alias));
typedef float floats_anywhere __attribute__((vector_size(2 * WIDE), aligned(4), may_alias));

/* a b + c, rounded once. Nothing else is: the code is compiled without contraction, as compilers
contract what has two products now this way and now that. */
INLINE part fused(part a, part b, part c) {
#if WIDE == 16
    return (part)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif WIDE == 8 && defined(__FMA__)
    return (part)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (part)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    for (int i = 0; i < WIDE; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

/* The same of doubles, whose product a b is exact. */
INLINE doubles fused_doubles(doubles a, doubles b, doubles c) {
#if WIDE == 16
    return (doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif WIDE == 8 && defined(__FMA__)
    return (doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
    return a * b + c;
#endif
}

INLINE doubles widened(const float *at) {
#if WIDE == 16
    return (doubles)_mm512_cvtps_pd(_mm256_loadu_ps(at));
#elif WIDE == 8
    return (doubles)_mm256_cvtps_pd(_mm_loadu_ps(at));
#else
    return __builtin_convertvector(*(const floats_anywhere *)at, doubles);
#endif
}

/* a where the mask is -1, b where it is 0. */
INLINE part pick(bits mask, part a, part b) {
#if WIDE == 16
    return (part)_mm512_ternarylogic_epi32((__m512i)mask, (__m512i)a, (__m512i)b, 0xCA);
#else
    return (part)((mask & (bits)a) | (~mask & (bits)b));
#endif
}

INLINE v16 all(float value) {
    v16 result;
    EACH result.p[i] = value - (part){}; /* value + 0 is an addition: -0 becomes 0 */
    return result;
}

INLINE v16 load(const float *at) {
    v16 result;
    EACH result.p[i] = *(const part_anywhere *)(at + i * WIDE);
    return result;
}

INLINE void store(float *at, v16 v) { EACH *(part_anywhere *)(at + i * WIDE) = v.p[i]; }

INLINE v16 fma16(v16 a, v16 b, v16 c) {
    EACH c.p[i] = fused(a.p[i], b.p[i], c.p[i]);
    return c;
}

INLINE v16 times(v16 a, float b) {
    EACH a.p[i] *= b;
    return a;
}

INLINE v16 plus(v16 a, v16 b) {
    EACH a.p[i] += b.p[i];
    return a;
}

INLINE v16 larger16(v16 a, v16 b) {
    EACH a.p[i] = pick(a.p[i] > b.p[i], a.p[i], b.p[i]);
    return a;
}

/* v, with 0 where `gate` is at most 0; NaN stays. */
INLINE v16 passed(v16 gate, v16 v) {
    EACH v.p[i] = pick(gate.p[i] <= 0.0f, (part){}, v.p[i]);
    return v;
}

/* The numbers of these lanes, less `from`. */
INLINE bits places(int part_number, int64_t from) {
    bits result;
    for (int i = 0; i < WIDE; i++) result[i] = i;
    return result + (int32_t)(part_number * WIDE - from);
}

/* The first `count` lanes of v, and `other` in those after. */
INLINE v16 first(v16 v, int64_t count, float other) {
    EACH v.p[i] = pick(places(i, count) < 0, v.p[i], (part){} + other);
    return v;
}

/* `value` in one lane, 0 in the others, and all of them if there is no such lane. */
INLINE v16 only(int64_t lane, float value) {
    v16 result;
    EACH result.p[i] = pick(places(i, lane) == 0, (part){} + value, (part){});
    return result;
}

#if WIDE == 16
#define HALVES(join) (join(((const v8 *)&v.p[0])[0], ((const v8 *)&v.p[0])[1]))
#elif WIDE == 8
#define HALVES(join) (join(v.p[0], v.p[1]))
#endif
#define ADD(a, b) ((a) + (b))

/* Numbers at a distance of half a vector are taken together, then a quarter, and so on. */
INLINE float sum_of(v16 v) {
#if WIDE == 4
    v4 four = (v.p[0] + v.p[2]) + (v.p[1] + v.p[3]);
#else
    v8 half = HALVES(ADD);
    v4 four = ((const v4 *)&half)[0] + ((const v4 *)&half)[1];
#endif
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* The sums of `count` vectors, each as `sum_of` adds it up; four at a time where shuffles can. */
INLINE void sums_of(const v16 v[], int count, float *to) {
    int done = 0;
#if WIDE == 16
#define SHUFFLED(a, b, how) ((part)_mm512_shuffle_f32x4((__m512)(a), (__m512)(b), how))
#define PERMUTED(a, how) ((part)_mm512_permute_ps((__m512)(a), how))
    UNROLL for (; done + 4 <= count; done += 4) {
        part a = v[done].p[0], b = v[done + 1].p[0], c = v[done + 2].p[0], d = v[done + 3].p[0];
        part ab = SHUFFLED(a, b, 0x44) + SHUFFLED(a, b, 0xEE);
        part cd = SHUFFLED(c, d, 0x44) + SHUFFLED(c, d, 0xEE);
        part fours = SHUFFLED(ab, cd, 0x88) + SHUFFLED(ab, cd, 0xDD);
        part twos = fours + PERMUTED(fours, 0x4E);
        part ones = twos + PERMUTED(twos, 0xB1);
        const __m512i fourths = _mm512_set4_epi32(12, 8, 4, 0);
        __m512 result = _mm512_permutexvar_ps(fourths, (__m512)ones);
        _mm_storeu_ps(to + done, _mm512_castps512_ps128(result));
    }
#endif
    UNROLL for (; done < count; done++) to[done] = sum_of(v[done]);
}

INLINE float larger(float a, float b) { return a > b ? a : b; }

/* `larger` of vectors' numbers. */
#define LARGER(a, b)                                                                            \
    ({                                                                                          \
        __typeof__(a) x = (a), y = (b);                                                         \
        __typeof__(x > y) more = x > y;                                                         \
        (__typeof__(a))((more & (__typeof__(more))x) | (~more & (__typeof__(more))y));          \
    })

/* As `sum_of` adds numbers up. */
INLINE float largest_of(v16 v) {
#if WIDE == 4
    v4 low = LARGER(v.p[0], v.p[2]), high = LARGER(v.p[1], v.p[3]);
    v4 four = LARGER(low, high);
#else
    v8 half = HALVES(LARGER);
    v4 four = LARGER(((const v4 *)&half)[0], ((const v4 *)&half)[1]);
#endif
    return larger(larger(four[0], four[2]), larger(four[1], four[3]));
}

/* e^x for -64 <= x <= 0, to 1e-7 of it (Cephes), as (1 + what is returned) `scale`, a power of two;
NaN stays. */
INLINE part grown_by(part x, part *scale) {
    const part zero = {};
    const part magic = zero + 12582912.0f; /* 1.5 2^23: its last bit counts ones */
    part t = fused(x, zero + 1.44269504088896341f, magic);
    part k = t - magic;
    part r = fused(k, zero + 2.12194440e-4f, fused(k, zero - 0.693359375f, x));
    part y = zero + 1.9875691500e-4f;
    y = fused(y, r, zero + 1.3981999507e-3f);
    y = fused(y, r, zero + 8.3334519073e-3f);
    y = fused(y, r, zero + 4.1665795894e-2f);
    y = fused(y, r, zero + 1.6666665459e-1f);
    y = fused(y, r, zero + 5.0000001201e-1f);
    *scale = (part)(((bits)t + 127) << 23);
    return fused(y, r * r, r);
}

INLINE part at_least(part x, float least) { return pick(x < least, (part){} + least, x); }

/* e^x for x <= 0. 0 below e^-64, of which a gradient would come to numbers that are subnormal, and
take a hundred times as long. */
INLINE part exp_of(part x) {
    part scale;
    part grown = grown_by(at_least(x, -64), &scale);
    return pick(x < -64.0f, (part){}, (grown + 1.0f) * scale);
}

/* -|x|. */
INLINE part negative(part x) { return (part)((bits)x | INT32_MIN); }

/* -m / (2 + m) with the sign of x, where m = e^(-2|x|) - 1 has no cancellation near 0. */
INLINE part tanh_of(part x) {
    part scale;
    part grown = grown_by(at_least(2.0f * negative(x), -64), &scale);
    part m = fused(scale, grown, scale - 1.0f);
    return (part)(((bits)(m / (m + 2.0f)) & INT32_MAX) | ((bits)x & INT32_MIN));
}

INLINE part sigmoid_of(part x) {
    part e = exp_of(negative(x));
    part inverse = 1.0f / (e + 1.0f);
    return pick(x < 0.0f, e * inverse, inverse);
}

/* e^(a - most), of the first `count` lanes, and 0. */
INLINE v16 exponentials(v16 a, float most, int64_t count) {
    EACH a.p[i] = exp_of(a.p[i] - most);
    return first(a, count, 0);
}

INLINE int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

/* From one row of n doubles to the next, where vectors may pass a row's end. */
INLINE int64_t across(int64_t n) { return padded(n) + NUMBERS; }
