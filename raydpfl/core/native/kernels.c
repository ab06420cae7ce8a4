/* Training of stacks of linear layers, the first in the span of each client's rows or by its weights,
sums of updates, and reading the rows of many clients.

raydpfl/core/native/__init__.py says what is computed; here is how. A client is trained alone, and every
sum is taken in an order that depends on its own shapes only: the same bits in any lane, on any
number of threads, with vectors of any length. Products are accumulated by fused multiply-adds, 16
columns at once (v16), so rows are padded to a multiple of 16 floats. Nothing here keeps state but
the threads, which take up clients, or parts of sums, one after another. What a caller has it keep
of rows that come again lies with the caller, and changes no bits.
*/

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX _mm_pause()
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#define RELAX __asm__ volatile("yield")
#else
#define RELAX (void)0
#endif

/* --- threads ---

One piece of work at a time is done by several threads, the caller's among them, piece by piece. All
others wait for the next. */

/* Does a piece in thread `thread`, below `crew.wanted`. */
typedef void (*Work)(void *what, int64_t piece, int64_t thread);

enum { CREW = 256, SPINS = 1000 };

static struct {
    pthread_mutex_t lock;
    pthread_cond_t called, done;
    Work work;
    void *what;
    int64_t started, inside, asleep;  /* threads: in all, at work, and waiting for a call */
    atomic_int_fast64_t members;      /* how many of them this work is for */
    pid_t process;                    /* whose they are: a fork has none of them */
    atomic_int_fast64_t wanted;       /* how many there are to be, the caller's among them */
    atomic_int_fast64_t next, limit;  /* the next piece, and the first that may not be done yet */
    atomic_int busy, waiting;         /* with some work, and its caller for a piece */
} crew = {.lock = PTHREAD_MUTEX_INITIALIZER,
          .called = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER,
          .wanted = 1};

/* Does the next piece, if there is one. */
static int do_one(int64_t thread) {
    int64_t piece = atomic_load(&crew.next);
    do
        if (piece >= atomic_load(&crew.limit)) return 0;
    while (!atomic_compare_exchange_weak(&crew.next, &piece, piece + 1));
    crew.work(crew.what, piece, thread);
    return 1;
}

static int called(int64_t thread) {
    return atomic_load(&crew.next) < atomic_load(&crew.limit) && thread < crew.members;
}

static void *serve(void *number) {
    int64_t thread = (intptr_t)number;
    for (;;) {
        for (int i = 0; i < SPINS && !called(thread); i++) RELAX;
        pthread_mutex_lock(&crew.lock);
        crew.asleep++;
        while (!called(thread)) pthread_cond_wait(&crew.called, &crew.lock);
        crew.asleep--;
        crew.inside++;
        pthread_mutex_unlock(&crew.lock);
        while (do_one(thread))
            if (atomic_load(&crew.waiting)) {
                pthread_mutex_lock(&crew.lock);
                pthread_cond_signal(&crew.done);
                pthread_mutex_unlock(&crew.lock);
            }
        pthread_mutex_lock(&crew.lock);
        crew.inside--;
        pthread_cond_signal(&crew.done);
        pthread_mutex_unlock(&crew.lock);
    }
    return NULL;
}

/* Starts the threads that are missing; the caller has the lock. Signals are not for them. */
static void hire(void) {
    pthread_attr_t detached;
    pthread_t thread;
    sigset_t every, before;
    sigfillset(&every);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    for (; crew.started < crew.members; crew.started++)
        if (pthread_create(&thread, &detached, serve, (void *)(intptr_t)crew.started)) break;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
}

/* Whether the crew is the caller's now, for this work: not where it is another thread's. */
static int engage(Work work, void *what) {
    int idle = 0;
    if (crew.wanted < 2 || !atomic_compare_exchange_strong(&crew.busy, &idle, 1)) return 0;
    if (crew.process != getpid()) {
        pthread_mutex_init(&crew.lock, NULL);
        pthread_cond_init(&crew.called, NULL);
        pthread_cond_init(&crew.done, NULL);
        crew.process = getpid();
        crew.started = 1;
        crew.inside = crew.asleep = 0;
    }
    atomic_store(&crew.members, crew.wanted);
    crew.work = work;
    crew.what = what;
    return 1;
}

/* Has pieces below `limit` done, from now on. */
static void allow(int64_t limit) {
    pthread_mutex_lock(&crew.lock);
    hire();
    atomic_store(&crew.limit, limit);
    if (crew.asleep) pthread_cond_broadcast(&crew.called);
    pthread_mutex_unlock(&crew.lock);
}

/* Waits until `*done`, which a piece that is being done sets. */
static void await(const atomic_uchar *done) {
    for (int i = 0; i < SPINS && !atomic_load(done); i++) RELAX;
    if (atomic_load(done)) return;
    pthread_mutex_lock(&crew.lock);
    atomic_store(&crew.waiting, 1);
    while (!atomic_load(done)) pthread_cond_wait(&crew.done, &crew.lock);
    atomic_store(&crew.waiting, 0);
    pthread_mutex_unlock(&crew.lock);
}

/* Ends the work: pieces that nobody has begun are not done. */
static void dismiss(void) {
    pthread_mutex_lock(&crew.lock);
    atomic_store(&crew.limit, 0);
    while (crew.inside) pthread_cond_wait(&crew.done, &crew.lock);
    atomic_store(&crew.next, 0);
    pthread_mutex_unlock(&crew.lock);
    atomic_store(&crew.busy, 0);
}

/* Does all `count` pieces. */
static void share(int64_t count, Work work, void *what) {
    if (count < 2 || !engage(work, what)) {
        for (int64_t piece = 0; piece < count; piece++) work(what, piece, 0);
        return;
    }
    allow(count);
    while (do_one(0)) continue;
    dismiss();
}

/* How many threads there are to be from now on, the caller's among them. */
void raydpfl_threads(int64_t count) { crew.wanted = count < 1 ? 1 : count < CREW ? count : CREW; }

int raydpfl_wanted(void) { return crew.wanted; }

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
    v16 found;
    EACH found.p[i] = value - (part){}; /* value + 0 is an addition: -0 becomes 0 */
    return found;
}

INLINE v16 load(const float *at) {
    v16 found;
    EACH found.p[i] = *(const part_anywhere *)(at + i * WIDE);
    return found;
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
    bits found;
    for (int i = 0; i < WIDE; i++) found[i] = i;
    return found + (int32_t)(part_number * WIDE - from);
}

/* The first `count` lanes of v, and `other` in those after. */
INLINE v16 first(v16 v, int64_t count, float other) {
    EACH v.p[i] = pick(places(i, count) < 0, v.p[i], (part){} + other);
    return v;
}

/* `value` in one lane, 0 in the others, and all of them if there is no such lane. */
INLINE v16 only(int64_t lane, float value) {
    v16 found;
    EACH found.p[i] = pick(places(i, lane) == 0, (part){} + value, (part){});
    return found;
}

#if WIDE == 16
#define HALVES(join) (join(((const v8 *)&v.p[0])[0], ((const v8 *)&v.p[0])[1]))
#elif WIDE == 8
#define HALVES(join) (join(v.p[0], v.p[1]))
#endif
#define ADD(a, b) ((a) + (b))

/* Numbers half a vector apart are taken together, then a quarter, and so on. */
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
        __m512 found = _mm512_permutexvar_ps(fourths, (__m512)ones);
        _mm_storeu_ps(to + done, _mm512_castps512_ps128(found));
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

/* --- products; the last arguments of a tile are constants --- */

/* out[R][V vectors] = start + a[R rows, of `stride`][k] b[k][`width`], for one tile. */
INLINE void tile(const float *a, int64_t down, int64_t across, const float *b, int64_t width,
                 int64_t k, v16 acc[], int R, int V) {
    for (int64_t j = 0; j < k; j++) {
        v16 columns[4];
        UNROLL for (int v = 0; v < V; v++) columns[v] = load(b + j * width + v * LANES);
        UNROLL for (int r = 0; r < R; r++) {
            float x = a[r * down + j * across];
            UNROLL for (int v = 0; v < V; v++)
                acc[r * V + v] = fma16(columns[v], all(x), acc[r * V + v]);
        }
    }
}

#define TILE(R, V)                                                                              \
    {                                                                                           \
        v16 acc[(R) * (V)];                                                                     \
        UNROLL for (int i = 0; i < (R) * (V); i++) acc[i] = all(0);                            \
        tile(a + r * down, down, across, b + c, width, k, acc, R, V);                           \
        UNROLL for (int i = 0; i < (R); i++)                                                    \
            UNROLL for (int v = 0; v < (V); v++) {                                              \
                float *at = out + (r + i) * out_width + c + v * LANES;                          \
                v16 done = times(acc[i * (V) + v], scale);                                      \
                store(at, keep == 0 ? done : fma16(load(at), all(keep), done));                 \
            }                                                                                   \
    }

/* out[m][columns] = keep out + scale (a b), where a[r][j] lies at a[r down + j across], b is
[k][width] and `columns` is a multiple of 16. */
static void multiply(const float *a, int64_t down, int64_t across, const float *b, int64_t width,
                     int64_t m, int64_t k, int64_t columns, float keep, float scale, float *out,
                     int64_t out_width) {
    for (int64_t c = 0; c < columns;) {
        int64_t left = (columns - c) / LANES;
        int64_t r = 0;
        if (left >= 4) {
            for (; r + 5 <= m; r += 5) TILE(5, 4);
            for (; r < m; r++) TILE(1, 4);
            c += 4 * LANES;
        } else if (left >= 2) {
            for (; r + 8 <= m; r += 8) TILE(8, 2);
            for (; r + 2 <= m; r += 2) TILE(2, 2);
            for (; r < m; r++) TILE(1, 2);
            c += 2 * LANES;
        } else {
            for (; r + 10 <= m; r += 10) TILE(10, 1);
            for (; r + 4 <= m; r += 4) TILE(4, 1);
            for (; r < m; r++) TILE(1, 1);
            c += LANES;
        }
    }
}

INLINE void dots(const float *a, const float *b, int64_t a_width, int64_t b_width, int64_t k,
                 float out[], int R, int S) {
    v16 acc[25];
    UNROLL for (int i = 0; i < R * S; i++) acc[i] = all(0);
    for (int64_t j = 0; j < k; j += LANES) {
        v16 right[5];
        UNROLL for (int s = 0; s < S; s++) right[s] = load(b + s * b_width + j);
        UNROLL for (int r = 0; r < R; r++) {
            v16 x = load(a + r * a_width + j);
            UNROLL for (int s = 0; s < S; s++) acc[r * S + s] = fma16(x, right[s], acc[r * S + s]);
        }
    }
    sums_of(acc, R * S, out);
}

#define DOTS(R, S)                                                                              \
    {                                                                                           \
        float found[(R) * (S)];                                                                 \
        dots(a + r * a_width, b + s * b_width, a_width, b_width, k, found, R, S);               \
        UNROLL for (int i = 0; i < (R); i++)                                                    \
            memcpy(out + (r + i) * out_width + s, found + i * (S), (S) * sizeof(float));        \
    }

enum { FIVES = WIDE == 16, HELD = 1 << 17 }; /* HELD: floats that stay while others pass */

/* R rows of a with those of b from row `from` on, before `end`. Where the registers hold them, fives
come first if fours leave some. */
#define ROW_DOTS(R, from, end)                                                                  \
    {                                                                                           \
        int64_t s = from;                                                                       \
        for (; FIVES && s + 5 <= end && (end - s) % 4; s += 5) DOTS(R, 5);                      \
        for (; s + 4 <= end; s += 4) DOTS(R, 4);                                                \
        for (; s + 2 <= end; s += 2) DOTS(R, 2);                                                \
        for (; s < end; s++) DOTS(R, 1);                                                        \
    }

/* out[m][n] = a[m][k] b[n][k]^T, k a multiple of 16; with `half`, where a is b, the part on and
above the diagonal alone (in tiles). */
static void multiply_rows(const float *a, int64_t a_width, const float *b, int64_t b_width,
                          int64_t m, int64_t n, int64_t k, float *out, int64_t out_width,
                          int half) {
    int64_t held = HELD / b_width / 4 * 4 + 4;
    for (int64_t from = 0; from < n; from += held) {
        int64_t end = from + held < n ? from + held : n;
        int64_t r = 0;
        for (; FIVES && r + 5 <= m && (m - r) % 4; r += 5)
            ROW_DOTS(5, half && r > from ? r : from, end);
        for (; r + 4 <= m; r += 4) ROW_DOTS(4, half && r > from ? r : from, end);
        for (; r < m; r++) ROW_DOTS(1, half && r > from ? r : from, end);
    }
}

/* --- a client --- */

enum { RELU = 1, TANH, SIGMOID }; /* 0: none */

/* What the clients of a call share; raydpfl/training/backends/compiled.py fills it. */
typedef struct {
    int64_t n, p, steps, batch, d;  /* rows of x, numbers of a row, Q, columns of index, d */
    int64_t layers;
    const int64_t *inputs, *outputs; /* [layers] */
    const int64_t *weights, *biases; /* [layers]: where they begin in the parameters; -1: none */
    const int64_t *activations;      /* [layers]: of the kinds below */
    const float *model;              /* [d] */
    /* the first layer's weight, transposed, and its bias: [p + 1][padded outputs] */
    const float *columns;
    const float *responses;          /* [steps]: c_t of a client that makes all steps */
    const double *lengths;           /* [steps + 1]: the L2 norm of c_t and those after it */
    int64_t squares; /* 1: half the mean squared error; 0: cross-entropy */
    int64_t noised;  /* 1: steps are noised, by normals of this key and round */
    uint64_t seed, purpose, round;
    float keep, step, decay, proximal, momentum, lr; /* raydpfl.training.backends.fused */
    float clip; /* the bound on a sample's gradient; 0: none */
} Job;

/* What a client has of its own. */
typedef struct {
    const float *x;       /* [n][p] */
    const void *y;        /* [n], or [n][outputs] for squares */
    const int64_t *index; /* [steps][batch] */
    int64_t n, b, steps;
    float gamma, std; /* of the noise on a step; 0: none */
    uint64_t id, draw;
} Client;

typedef struct {
    float *weight, *bias;     /* [outputs][padded inputs], [padded outputs] */
    float *w_speed, *b_speed; /* the velocity, likewise */
    float *a, *g;             /* [batch][padded outputs]: outputs and their gradient */
    const float *w_noise, *b_noise; /* of a step, within what is drawn; NULL: none */
} Layer;

enum { PARTIAL = 8, SIDE = FIVES ? 5 : 2 }; /* sums of an exact dot; rows of a tile of them */

typedef struct {
    float *rows;                         /* [n][padded p], where p is no multiple of 16 */
    float *taken;                        /* [batch][padded p]: the rows of a batch */
    float *z, *z_first, *z_speed, *coef; /* [n][padded outputs of the first layer] */
    float *kernel, *some;                /* [n][padded n], and these rows of a batch */
    float *turned;                       /* [LANES][padded n]: a step on the outputs, transposed */
    float *scratch;                      /* a row of weights, padded */
    float *drawn;                        /* normals, of steps that are drawn together */
    float *field; /* [outputs][padded p]: noise on the first weights, where p is not padded */
    float *seen; /* [n][padded steps outputs]: L a_t of steps drawn together */
    float *rest; /* [n][padded outputs]: what the noise of the steps to come does to the outputs */
    float *upper;                        /* [n][padded n]: the transpose of L */
    double *exact;                       /* [n][across(n)] */
    double *left; /* [SIDE][padded p]: some rows */
    Layer *layer;                        /* [layers] */
    const float *step_seen; /* a step's L a_t: [n][step_width] */
    int64_t step_width;
    float share, scale;     /* of what is left, and of L a_t, in what the step's noise does */
    int64_t most;                        /* rows of a client that trains in their span: n here */
    int noised, spanned;                 /* of the client in training */
    int across; /* its first layer's weight and velocity are [inputs][padded outputs] */
} Room;

enum { MOST = 64, TOGETHER = 1 << 13 }; /* layers; normals of steps that are drawn together */

INLINE int64_t first_numbers(const Job *job) {
    return job->outputs[0] * (job->p + (job->biases[0] < 0 ? 0 : 1));
}

/* Floats of a layer's weight, whichever way it lies. */
INLINE int64_t weight_room(const Job *job, int64_t l) {
    int64_t down = job->outputs[l] * padded(job->inputs[l]);
    int64_t across = job->inputs[l] * padded(job->outputs[l]);
    return l || down > across ? down : across;
}

INLINE int64_t widest(const Job *job) {
    int64_t most = padded(job->p);
    for (int64_t l = 0; l < job->layers; l++)
        if (padded(job->outputs[l]) > most) most = padded(job->outputs[l]);
    return most;
}

/* Cuts memory, if it is given, into a room; returns how many floats that takes. */
static int64_t furnish(const Job *job, Room *room, float *memory) {
    int64_t used = 0;
    int64_t n = room->most;
    int64_t o = padded(job->outputs[0]);
    int64_t later = job->d - first_numbers(job);
#define PART(place, count)                                                                      \
    {                                                                                           \
        int64_t size = padded(count);                                                           \
        if (memory) (place) = (void *)(memory + used);                                          \
        used += size;                                                                           \
    }
    PART(room->rows, job->p % LANES ? n * padded(job->p) : 0);
    PART(room->taken, job->batch * padded(job->p));
    PART(room->z, n * o);
    PART(room->z_first, job->proximal != 0 ? n * o : 0);
    PART(room->z_speed, job->momentum != 0 ? n * o : 0);
    PART(room->coef, n * o);
    PART(room->kernel, n * padded(n));
    PART(room->some, job->batch * padded(n));
    PART(room->turned, LANES * padded(n));
    PART(room->scratch, widest(job));
    if (job->noised) {
        int64_t most = n * job->outputs[0] + later;
        if (most < TOGETHER) most = TOGETHER;
        PART(room->drawn, (most > job->d ? most : job->d) + 1 + LANES);
        PART(room->field, job->p % LANES ? job->outputs[0] * padded(job->p) : 0);
        PART(room->seen, most + n * o + LANES);
        PART(room->rest, n * o);
        PART(room->upper, n * padded(n));
        PART(room->exact, 2 * n * across(n));
        PART(room->left, n ? 2 * SIDE * padded(job->p) : 0);
    }
    for (int64_t l = 0; l < job->layers; l++) {
        Layer *layer = &room->layer[l];
        int64_t out = padded(job->outputs[l]);
        int64_t weights = weight_room(job, l);
        PART(layer->weight, weights);
        PART(layer->bias, out);
        PART(layer->w_speed, job->momentum != 0 ? weights : 0);
        PART(layer->b_speed, job->momentum != 0 ? out : 0);
        PART(layer->a, job->batch * out);
        PART(layer->g, job->batch * out);
    }
    return used;
}

INLINE void copy(const float *from, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i += LANES) store(to + i, load(from + i));
}

INLINE void copy_rows(const float *from, int64_t rows, int64_t columns, float *to) {
    int64_t width = padded(columns);
    for (int64_t r = 0; r < rows; r++) {
        memcpy(to + r * width, from + r * columns, columns * sizeof(float));
        memset(to + r * width + columns, 0, (width - columns) * sizeof(float));
    }
}

/* The gradient of a row's cross-entropy by its outputs `a`, times `share`, to `g`. Its loss is
log(`*sum`) minus what is returned. */
INLINE double cross_entropy(const float *a, int64_t classes, int64_t width, int64_t y, float share,
                            float *g, double *sum) {
    v16 top = all(-INFINITY);
    for (int64_t c = 0; c < width; c += LANES)
        top = larger16(first(load(a + c), classes - c, -INFINITY), top);
    float most = largest_of(top);
    v16 total = all(0);
    for (int64_t c = 0; c < width; c += LANES) {
        v16 e = exponentials(load(a + c), most, classes - c);
        store(g + c, e);
        total = plus(total, e);
    }
    float found = sum_of(total);
    float scale = share / found;
    for (int64_t c = 0; c < width; c += LANES)
        store(g + c, fma16(load(g + c), all(scale), only(y - c, -share)));
    *sum = found;
    return (double)a[y] - most;
}

enum { AT_ONCE = 16 };

/* The mean cross-entropy of a batch [b][width], and its gradient. */
INLINE double cross_entropies(const float *a, int64_t b, int64_t classes, int64_t width,
                              const int64_t *y, const int64_t *rows, float share, float *g) {
    double loss = 0;
    for (int64_t from = 0; from < b; from += AT_ONCE) {
        double product = 1;
        for (int64_t j = from; j < b && j < from + AT_ONCE; j++) {
            double sum;
            loss -= cross_entropy(a + j * width, classes, width, y[rows[j]], share, g + j * width,
                                  &sum);
            product *= sum;
        }
        loss += log(product);
    }
    return loss * share;
}

/* Half the mean squared error of a row's outputs `a`, and its gradient, both times `share`. */
INLINE double squared_error(const float *a, int64_t outputs, const float *y, float share,
                            float *g) {
    double loss = 0;
    for (int64_t c = 0; c < padded(outputs); c += LANES) store(g + c, all(0));
    for (int64_t c = 0; c < outputs; c++) {
        float off = a[c] - y[c];
        g[c] = off / outputs * share;
        loss += 0.5 * off * off;
    }
    return loss / outputs * share;
}

static void scale_add(float *to, int64_t count, float keep, const float *what, float scale) {
    for (int64_t i = 0; i < count; i += LANES)
        store(to + i, fma16(load(what + i), all(scale), times(load(to + i), keep)));
}

/* The step of some parameters from keep moved + step g, which `moved` holds already. */
static void finish_step(const Job *job, float *now, float *speed, const float *first,
                        int64_t count) {
    float *moved = job->momentum != 0 ? speed : now;
    if (job->proximal != 0) scale_add(moved, count, 1.0f, first, -job->step * job->proximal);
    if (job->momentum == 0) return;
    scale_add(speed, count, 1.0f, now, job->decay + job->proximal);
    scale_add(now, count, 1.0f, speed, -job->lr);
}

/* Copies what is above the diagonal of a [n][width] to below it; what pads a row is 0. */
static void mirror(float *a, int64_t width, int64_t n) {
    for (int64_t r = 0; r < n; r++) {
        for (int64_t s = 0; s < r; s++) a[r * width + s] = a[s * width + r];
        memset(a + r * width + n, 0, (padded(n) - n) * sizeof(float));
    }
}

/* The products of the rows with one another, with those of their ones. */
static void find_kernel(const Job *job, Room *room, const float *x, int64_t rows) {
    int64_t width = padded(job->p);
    int64_t wide = padded(room->most);
    float one = job->biases[0] < 0 ? 0 : 1;
    multiply_rows(x, width, x, width, rows, rows, width, room->kernel, wide, 1);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t s = r; s < rows; s++) room->kernel[r * wide + s] += one;
    mirror(room->kernel, wide, rows);
}

static void begin_span(const Job *job, Room *room, const float *x, int64_t rows) {
    int64_t width = padded(job->p);
    int64_t o = padded(job->outputs[0]);
    multiply(x, width, 1, job->columns, o, rows, job->p, o, 0, 1, room->z, o);
    for (int64_t r = 0; r < rows; r++)
        scale_add(room->z + r * o, o, 1, job->columns + job->p * o, 1);
    memset(room->coef, 0, rows * o * sizeof(float));
    if (job->proximal != 0) memcpy(room->z_first, room->z, rows * o * sizeof(float));
    if (job->momentum != 0) memset(room->z_speed, 0, rows * o * sizeof(float));
}

/* The weights of the layers that are trained by them. */
static void begin_layers(const Job *job, Room *room) {
    for (int64_t l = room->spanned; l < job->layers; l++) {
        Layer *layer = &room->layer[l];
        int64_t out = job->outputs[l];
        int64_t weights = weight_room(job, l);
        if (l == 0 && room->across)
            memcpy(layer->weight, job->columns, job->p * padded(out) * sizeof(float));
        else
            copy_rows(job->model + job->weights[l], out, job->inputs[l], layer->weight);
        memset(layer->bias, 0, padded(out) * sizeof(float));
        if (job->biases[l] >= 0)
            memcpy(layer->bias, job->model + job->biases[l], out * sizeof(float));
        if (job->momentum == 0) continue;
        memset(layer->w_speed, 0, weights * sizeof(float));
        memset(layer->b_speed, 0, padded(out) * sizeof(float));
    }
}

/* Whether a batch is a client's first rows in their order. */
INLINE int in_order(const int64_t *rows, int64_t b) {
    int64_t j = 0;
    while (j < b && rows[j] == j) j++;
    return j == b;
}

/* The rows of the batch of step k, for a first layer that is trained by its weights, unless they
are those of the step before; those of the next are asked of the memory meanwhile. */
static void take_rows(const Job *job, Room *room, const Client *client, int64_t k) {
    const int64_t *rows = client->index + k * job->batch;
    if (k && in_order(rows, client->b) && in_order(rows - job->batch, client->b)) return;
    for (int64_t j = 0; j < client->b; j++) {
        copy_rows(client->x + rows[j] * job->p, 1, job->p, room->taken + j * padded(job->p));
        if (k + 1 == client->steps) continue;
        const float *next = client->x + rows[job->batch + j] * job->p;
        for (int64_t i = 0; i < job->p; i += LANES) __builtin_prefetch(next + i, 0, 2);
    }
}

/* What a layer is given: [b][padded inputs]. */
INLINE const float *given_to(const Room *room, int64_t l) {
    return l ? room->layer[l - 1].a : room->taken;
}

/* Puts a layer's outputs [b][padded outputs] through its activation; what is padding stays 0. */
INLINE void activate_by(float *a, int64_t b, int64_t outputs, int kind) {
    int64_t width = padded(outputs);
    for (int64_t at = 0; at < b * width; at += LANES) {
        v16 v = load(a + at);
        if (kind == RELU) v = passed(v, v);
        if (kind == TANH) EACH v.p[i] = tanh_of(v.p[i]);
        if (kind == SIGMOID) EACH v.p[i] = sigmoid_of(v.p[i]);
        store(a + at, v);
    }
    if (kind != SIGMOID) return;
    for (int64_t j = 1; j <= b; j++)
        memset(a + j * width - (width - outputs), 0, (width - outputs) * sizeof(float));
}

/* Multiplies the gradients [count] by the derivative, from the outputs `a`. */
INLINE void derive_by(const float *a, float *g, int64_t count, int kind) {
    for (int64_t at = 0; at < count; at += LANES) {
        v16 out = load(a + at), v = load(g + at);
        if (kind == RELU) v = passed(out, v);
        if (kind == TANH) EACH v.p[i] *= fused(-out.p[i], out.p[i], (part){} + 1.0f);
        if (kind == SIGMOID) EACH v.p[i] *= fused(-out.p[i], out.p[i], out.p[i]);
        store(g + at, v);
    }
}

#define BY_KIND(kind, call)                                                                     \
    {                                                                                           \
        if ((kind) == RELU) call(RELU);                                                         \
        if ((kind) == TANH) call(TANH);                                                         \
        if ((kind) == SIGMOID) call(SIGMOID);                                                   \
    }

/* The outputs of all layers for the batch `rows`, [b]. */
static void forward(const Job *job, Room *room, const int64_t *rows, int64_t b) {
    for (int64_t l = 0; l < job->layers; l++) {
        Layer *layer = &room->layer[l];
        int64_t o = padded(job->outputs[l]);
        if (l == 0 && room->spanned) {
            for (int64_t j = 0; j < b; j++)
                copy(room->z + rows[j] * o, o, layer->a + j * o);
        } else {
            int64_t width = padded(job->inputs[l]);
            if (l == 0 && room->across) {
                multiply(room->taken, width, 1, layer->weight, o, b, job->p, o, 0, 1, layer->a, o);
            } else {
                memset(layer->a, 0, b * o * sizeof(float));
                multiply_rows(given_to(room, l), width, layer->weight, width, b, job->outputs[l],
                              width, layer->a, o, 0);
            }
            for (int64_t j = 0; j < b; j++) scale_add(layer->a + j * o, o, 1, layer->bias, 1);
        }
#define ACTIVATE(kind) activate_by(layer->a, b, job->outputs[l], kind)
        BY_KIND(job->activations[l], ACTIVATE)
    }
}

/* The batch's loss; the gradients by the outputs of all layers, of each sample's own loss if it is
to be clipped, else of the mean. */
static double backward(const Job *job, Room *room, const int64_t *rows, int64_t b,
                       const void *y) {
    int64_t last = job->layers - 1;
    Layer *top = &room->layer[last];
    int64_t o = padded(job->outputs[last]);
    float share = job->clip > 0 ? 1 : 1.0f / b;
    double loss = 0;
    if (job->squares)
        for (int64_t j = 0; j < b; j++)
            loss += squared_error(top->a + j * o, job->outputs[last],
                                  (const float *)y + rows[j] * job->outputs[last], share,
                                  top->g + j * o);
    else if (o == LANES) /* the loops over a row's vectors fall away */
        loss = cross_entropies(top->a, b, job->outputs[last], LANES, y, rows, share, top->g);
    else
        loss = cross_entropies(top->a, b, job->outputs[last], o, y, rows, share, top->g);
    for (int64_t l = last; l >= 0; l--) {
        Layer *layer = &room->layer[l];
        int64_t width = padded(job->outputs[l]);
        if (l < last) {
            Layer *next = &room->layer[l + 1];
            multiply(next->g, padded(job->outputs[l + 1]), 1, next->weight, width, b,
                     job->outputs[l + 1], width, 0, 1, layer->g, width);
        }
#define DERIVE(kind) derive_by(layer->a, layer->g, b * width, kind)
        BY_KIND(job->activations[l], DERIVE)
    }
    return job->clip > 0 ? loss / b : loss;
}

INLINE float squares_of(const float *a, int64_t width) {
    v16 total = all(0);
    for (int64_t c = 0; c < width; c += LANES) {
        v16 v = load(a + c);
        total = fma16(v, v, total);
    }
    return sum_of(total);
}

static const float LOST = 0x1p-126f; /* at most, by the square of a float that underflows */

/* Scales the gradients of each sample to the bound, and by its share of the mean; how many were
longer. The squared norm of a sample's is the sum over the layers of (|a|^2 + 1) |g|^2, both with
what underflow may have taken: the other may be large. */
static int64_t clip_samples(const Job *job, Room *room, const int64_t *rows, int64_t b) {
    int64_t wide = padded(room->most);
    int64_t longer = 0;
    for (int64_t j = 0; j < b; j++) {
        float square = 0;
        for (int64_t l = 0; l < job->layers; l++) {
            int64_t o = padded(job->outputs[l]);
            float inputs = job->biases[l] < 0 ? 0 : 1;
            int64_t width = padded(job->inputs[l]);
            if (l == 0 && room->spanned)
                inputs = room->kernel[rows[j] * wide + rows[j]];
            else
                inputs += squares_of(given_to(room, l) + j * width, width);
            inputs += LOST * width;
            square += inputs * (squares_of(room->layer[l].g + j * o, o) + LOST * o);
        }
        float norm = sqrtf(square);
        float factor = job->clip / norm;
        factor = (factor > 1 ? 1 : factor) + norm * 0; /* NaN for a norm that is not finite */
        longer += factor < 1;
        factor *= 1.0f / b;
        for (int64_t l = 0; l < job->layers; l++) {
            int64_t o = padded(job->outputs[l]);
            float *g = room->layer[l].g + j * o;
            for (int64_t c = 0; c < o; c += LANES) store(g + c, times(load(g + c), factor));
        }
    }
    return longer;
}

/* --- noise on steps; raydpfl/training/span_noise.py says what is drawn, and why --- */

/* products that take as long as a normal, one in double, reading and writing a weight, and summing
the numbers of a vector */
enum { NORMAL = 50, EXACT = 3, MEMORY = 8, ACROSS = 56 };
static const double NEAR = 1e-6;  /* squared: the part of a row outside of the span of others */

static void stream_normals(const uint64_t name[5], float std, int64_t count, float *out);

static void draw(const Job *job, const Client *client, int64_t step, int64_t count, float std,
                 float *out) {
    const uint64_t nonce = client->draw << 32 | (uint64_t)step;
    const uint64_t name[] = {job->seed, job->purpose, job->round, client->id, nonce};
    stream_normals(name, std, count, out);
}

/* to [count] = a - b. */
static void subtract_floats(const float *a, const float *b, int64_t count, float *to) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, plus(load(a + i), times(load(b + i), -1)));
    for (; i < count; i++) to[i] = a[i] - b[i];
}

/* to [count] += scale what. */
static void add_scaled(float *to, int64_t count, const float *what, float scale) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store(to + i, fma16(load(what + i), all(scale), load(to + i)));
    for (; i < count; i++) to[i] = fmaf(what[i], scale, to[i]);
}

/* Whether the first layer's weights, for steps without noise, take less time where its outputs lie
beside one another than where its inputs do, whose products are summed across a vector. */
INLINE int lies_across(const Job *job) {
    int64_t o = job->outputs[0];
    return 2 * job->p * padded(o) < o * (2 * padded(job->p) + ACROSS);
}

/* Whether a client's first layer takes less time in the span of its rows, with the noise on its
steps, than by its weights. */
static int span_pays(const Job *job, const Client *client) {
    int64_t n = client->n;
    int64_t o = job->outputs[0];
    int64_t steps = client->steps;
    int64_t numbers = first_numbers(job);
    int64_t products = n * n * (numbers / o) / 2;
    int64_t weights = steps * numbers * (2 * client->b + MEMORY);
    int64_t span = 2 * n * numbers + products + steps * n * client->b * o;
    if (job->noised && client->std > 0) {
        weights += steps * numbers * NORMAL;
        span += (EXACT - 1) * products;
        span += (steps * n * o + numbers) * (NORMAL + n);
    }
    return span < weights;
}

INLINE double sum_of_eight(const double *at) {
    four_doubles four = *(const four_doubles *)at + *(const four_doubles *)(at + 4);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* Dots of R rows with S rows, each as 8 sums of every 8th product, which are added by halves. A
product of floats is exact in double, so that it may be fused with a sum. `same`: of R rows with
themselves, on and above the diagonal, which are put down in double, `left` [R][width], for the dots
with others. */
INLINE void exact_dots(double *left, const float *b, int64_t width, double *out, int64_t down,
                       int R, int S, int same) {
    double sums[25][PARTIAL];
    for (int from = 0; from < PARTIAL; from += NUMBERS) {
        doubles acc[25], right[5];
        UNROLL for (int i = 0; i < R * S; i++) acc[i] = (doubles){};
        for (int64_t j = from; j < width; j += PARTIAL) {
            UNROLL for (int s = 0; s < S; s++) right[s] = widened(b + s * width + j);
            UNROLL for (int r = 0; r < R; r++) {
                doubles *a = (doubles *)(left + r * width + j);
                if (same) *a = right[r];
                UNROLL for (int s = same ? r : 0; s < S; s++)
                    acc[r * S + s] = fused_doubles(same ? right[r] : *a, right[s], acc[r * S + s]);
            }
        }
        UNROLL for (int i = 0; i < R * S; i++) *(doubles_anywhere *)(sums[i] + from) = acc[i];
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int s = same ? r : 0; s < S; s++)
            out[r * down + s] = sum_of_eight(sums[r * S + s]);
}

/* K = X X^T (+ 1): the products exact, their sums in double on and above the diagonal, 0 below it;
and rounded, all of it. */
static void exact_kernel(const Job *job, Room *room, const float *x, int64_t n) {
    int64_t width = padded(job->p);
    int64_t down = across(n);
    int64_t wide = padded(room->most);
    double one = job->biases[0] < 0 ? 0 : 1;
    double *left = room->left;
    int64_t r = 0;
#define EXACT_DOTS(R, S, same)                                                                  \
    exact_dots(left, x + s * width, width, room->exact + r * down + s, down, R, S, same)
    for (; r + SIDE <= n; r += SIDE) {
        int64_t s = r;
        EXACT_DOTS(SIDE, SIDE, 1);
        for (s += SIDE; s + SIDE <= n; s += SIDE) EXACT_DOTS(SIDE, SIDE, 0);
        for (; s < n; s++) EXACT_DOTS(SIDE, 1, 0);
    }
    for (; r < n; r++) {
        int64_t s = r;
        EXACT_DOTS(1, 1, 1);
        for (s++; s < n; s++) EXACT_DOTS(1, 1, 0);
    }
    for (r = 0; r < n; r++) {
        double *k = room->exact + r * down;
        float *rounded = room->kernel + r * wide;
        memset(k, 0, r * sizeof(double));
        memset(k + n, 0, (down - n) * sizeof(double));
        for (int64_t s = r; s < n; s++) rounded[s] = k[s] += one;
    }
    mirror(room->kernel, wide, n);
}

static int has_twin(const float *x, int64_t width, int64_t row) {
    for (int64_t r = 0; r < row; r++)
        if (!memcmp(x + r * width, x + row * width, width * sizeof(float))) return 1;
    return 0;
}

/* to [count] -= factor what, by whole vectors, which may pass the end. */
INLINE void subtract(double *to, int64_t count, double factor, const double *what) {
    for (int64_t c = 0; c < count; c += NUMBERS) {
        doubles product = *(const doubles_anywhere *)(what + c) * factor;
        *(doubles_anywhere *)(to + c) -= product;
    }
}

INLINE void scale(double *to, int64_t count, double factor) {
    for (int64_t c = 0; c < count; c += NUMBERS) *(doubles_anywhere *)(to + c) *= factor;
}

/* L of K = L L^T: its transpose to `exact` and `upper`. Its columns are 0 for rows equal to an
earlier one. 0: some row is so near to the span of those before that L would not be exact. */
static int triangle(const Job *job, Room *room, const float *x, int64_t n) {
    int64_t wide = padded(room->most);
    int64_t down = across(n);
    for (int64_t s = 0; s < n; s++) {
        double *row = room->exact + s * down;
        double left = row[s];
        if (!(left >= NEAR * room->kernel[s * wide + s])) {
            if (!has_twin(x, padded(job->p), s)) return 0;
            left = 0;
        }
        scale(row + s, n - s, left == 0 ? 0 : 1 / sqrt(left));
        for (int64_t r = s + 1; r < n; r++)
            subtract(room->exact + r * down + r, n - r, row[r], row + r);
        for (int64_t r = 0; r < n; r++) room->upper[s * wide + r] = row[r];
    }
    return 1;
}

/* Whether the first layer is trained in the span of the rows `x`; their products, if it is. */
static int has_span(const Job *job, Room *room, int64_t n, const float *x) {
    if (!room->noised) {
        find_kernel(job, room, x, n);
        return 1;
    }
    exact_kernel(job, room, x, n);
    return triangle(job, room, x, n);
}

/* Puts down where the noise of a step is, for the layers that are trained by their weights; `later`:
that of those after the first. */
static void place_noise(const Job *job, Room *room, const float *later) {
    for (int64_t l = room->spanned; l < job->layers; l++) {
        Layer *layer = &room->layer[l];
        layer->w_noise = room->spanned ? later : room->drawn + job->weights[l];
        later += job->outputs[l] * job->inputs[l];
        if (job->biases[l] < 0) continue;
        layer->b_noise = room->spanned ? later : room->drawn + job->biases[l];
        later += job->outputs[l];
    }
}

/* What the noise `weights` and `biases` on the first layer does to its outputs on the rows. */
static void see(const Job *job, Room *room, const float *x, int64_t n, const float *weights,
                const float *biases) {
    int64_t o = padded(job->outputs[0]);
    int64_t width = padded(job->p);
    if (job->p % LANES) copy_rows(weights, job->outputs[0], job->p, room->field);
    const float *field = job->p % LANES ? room->field : weights;
    memset(room->rest, 0, n * o * sizeof(float));
    multiply_rows(x, width, field, width, n, job->outputs[0], width, room->rest, o, 0);
    for (int64_t r = 0; r < n && job->biases[0] >= 0; r++)
        add_scaled(room->rest + r * o, job->outputs[0], biases, 1);
}

/* Draws B, the sum of c_t z_t over all steps, to where the first layer's update is to be, and finds
what it does to the outputs on the rows. */
static void draw_whole(const Job *job, Room *room, const Client *client, const float *x,
                       double length, float *update) {
    int64_t weights = job->outputs[0] * job->p;
    int64_t bias = job->biases[0];
    int whole = bias < 0 || bias == job->weights[0] + weights; /* one run of parameters */
    float *to = whole ? update + job->weights[0] : room->drawn;
    draw(job, client, client->steps, first_numbers(job), client->std * length, to);
    if (!whole) {
        memcpy(update + job->weights[0], to, weights * sizeof(float));
        memcpy(update + bias, to + weights, job->outputs[0] * sizeof(float));
    }
    see(job, room, x, client->n, to, to + weights);
}

static void begin_noise(const Job *job, Room *room, const Client *client, const float *x,
                        const double *lengths, float *update) {
    for (int64_t l = 0; l < job->layers; l++)
        room->layer[l].w_noise = room->layer[l].b_noise = NULL;
    if (room->spanned && room->noised) draw_whole(job, room, client, x, *lengths, update);
}

/* Draws the a_t of `along` steps from the k-th on, [n][along][outputs], and what the layers after
the first have of each of `count`; finds L a_t. */
static void draw_along(const Job *job, Room *room, const Client *client, int64_t k, int64_t along,
                       int64_t count) {
    int64_t n = client->n;
    int64_t later = job->d - first_numbers(job);
    int64_t wide = padded(room->most);
    int64_t run = along * job->outputs[0];
    int64_t width = padded(run);
    draw(job, client, k, n * run + count * later, client->std, room->drawn);
    for (int64_t r = 0; r < n; r += 5) {
        int64_t end = r + 5 < n ? r + 5 : n;
        multiply(room->upper + r, 1, wide, room->drawn, run, end - r, end, width, 0, 1,
                 room->seen + r * width, width);
    }
}

/* Adds to the outputs on the rows `step` times what a step's noise does to them, X z_t: of what the
rest of the noise does, the part `share`, and `scale` L a_t. Takes `response` times it from the
rest. */
static void see_step(const Room *room, float *moved, int64_t n, int64_t outputs, float step,
                     float response) {
    int64_t o = padded(outputs);
    for (int64_t c = 0; c < o; c += LANES) {
        const float *seen = room->step_seen + c;
        float *left = room->rest + c;
        float *to = moved + c;
        int64_t width = room->step_width;
        v16 share = all(room->share), scale = all(room->scale);
        v16 steps = all(step), taken = all(-response);
        bits kept[PARTS];
        EACH kept[i] = places(i, outputs - c) < 0;
        for (int64_t r = 0; r < n; r++, seen += width, left += o, to += o) {
            v16 noise = load(seen), rest = load(left);
            EACH noise.p[i] = (part)((bits)noise.p[i] & kept[i]);
            EACH noise.p[i] *= scale.p[i];
            noise = fma16(rest, share, noise);
            store(left, fma16(noise, taken, rest));
            store(to, fma16(noise, steps, load(to)));
        }
    }
}

/* Draws step k's noise; in the span that of several steps together, but of the last one, for which
the others leave what they leave. */
static void noise_step(const Job *job, Room *room, const Client *client, int64_t k,
                       const float *responses, const double *lengths) {
    if (!room->spanned) {
        draw(job, client, k, job->d, client->std, room->drawn);
        place_noise(job, room, NULL);
        return;
    }
    int64_t outputs = job->outputs[0];
    int64_t later = job->d - first_numbers(job);
    int64_t most = TOGETHER / (client->n * outputs + later);
    int64_t nth = most > 1 ? k % most : 0;
    int64_t count = client->steps - k + nth;
    if (most < count) count = most > 1 ? most : 1;
    int64_t along = k - nth + count < client->steps ? count : count - 1;
    if (nth == 0) draw_along(job, room, client, k, along, count);
    double length = lengths[k];
    room->share = length > 0 ? responses[k] / (length * length) : 0;
    room->scale = length > 0 ? lengths[k + 1] / length : 0;
    room->step_seen = nth < along ? room->seen + nth * outputs : room->rest; /* `scale` is 0 */
    room->step_width = nth < along ? padded(along * outputs) : padded(outputs);
    place_noise(job, room, room->drawn + client->n * along * outputs + nth * later);
}

/* moved [n][LANES] = keep moved + step `some`^T g, as `multiply` has it, but along the rows: where
outputs are fewer than lanes, that takes fewer products. */
static void step_across(const Job *job, Room *room, const float *some, int64_t b, int64_t n,
                        float *moved) {
    int64_t width = padded(n);
    multiply(room->layer[0].g, 1, LANES, some, padded(room->most), job->outputs[0], b, width, 0,
             job->step, room->turned, width);
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < job->outputs[0]; c++) {
            float *to = moved + r * LANES + c;
            float step = room->turned[c * width + r];
            *to = job->keep == 0 ? step : fmaf(*to, job->keep, step);
        }
}

static void step_span(const Job *job, Room *room, const int64_t *rows, int64_t b, int64_t n,
                      float response) {
    int64_t o = padded(job->outputs[0]);
    const float *g = room->layer[0].g;
    float *moved = job->momentum != 0 ? room->z_speed : room->z;
    int64_t wide = padded(room->most);
    const float *some = room->kernel; /* of all rows in their order */
    int ordered = in_order(rows, b);
    if (!ordered) {
        for (int64_t j = 0; j < b; j++)
            copy(room->kernel + rows[j] * wide, padded(n), room->some + j * wide);
        some = room->some;
    }
    if (o == LANES && 4 * padded(n) * job->outputs[0] < 3 * n * LANES)
        step_across(job, room, some, b, n, moved);
    else /* equal to its transpose where all rows are in their order */
        multiply(some, ordered ? wide : 1, ordered ? 1 : wide, g, o, n, b, o, job->keep, job->step,
                 moved, o);
    if (room->noised)
        see_step(room, moved, n, job->outputs[0], job->step, response);
    finish_step(job, room->z, room->z_speed, room->z_first, n * o);
    for (int64_t j = 0; j < b; j++)
        scale_add(room->coef + rows[j] * o, o, 1, g + j * o, response);
}

/* The step of a first layer whose weight lies across. */
static void step_weight_across(const Job *job, Room *room, int64_t b) {
    Layer *layer = room->layer;
    int64_t o = padded(job->outputs[0]);
    float *moved = job->momentum != 0 ? layer->w_speed : layer->weight;
    multiply(room->taken, 1, padded(job->p), layer->g, o, job->p, b, o, job->keep, job->step, moved,
             o);
    finish_step(job, layer->weight, layer->w_speed, job->columns, job->p * o);
}

static void step_weight(const Job *job, Room *room, int64_t l, int64_t b) {
    Layer *layer = &room->layer[l];
    int64_t width = padded(job->inputs[l]);
    int64_t o = padded(job->outputs[l]);
    int64_t out = job->outputs[l];
    float *moved = job->momentum != 0 ? layer->w_speed : layer->weight;
    multiply(layer->g, 1, o, given_to(room, l), width, out, b, width, job->keep, job->step, moved,
             width);
    for (int64_t c = 0; c < out; c++) {
        const float *first = job->model + job->weights[l] + c * job->inputs[l];
        if (job->proximal != 0) {
            copy_rows(first, 1, job->inputs[l], room->scratch);
            first = room->scratch;
        }
        if (layer->w_noise)
            add_scaled(moved + c * width, job->inputs[l], layer->w_noise + c * job->inputs[l],
                       job->step);
        finish_step(job, layer->weight + c * width, layer->w_speed + c * width, first, width);
    }
}

static void step_layer(const Job *job, Room *room, int64_t l, int64_t b) {
    Layer *layer = &room->layer[l];
    int64_t o = padded(job->outputs[l]);
    int64_t out = job->outputs[l];
    if (l == 0 && room->across)
        step_weight_across(job, room, b);
    else
        step_weight(job, room, l, b);
    if (job->biases[l] < 0) return;
    float *bias = job->momentum != 0 ? layer->b_speed : layer->bias;
    memset(room->scratch, 0, o * sizeof(float));
    for (int64_t j = 0; j < b; j++) scale_add(room->scratch, o, 1, layer->g + j * o, 1);
    scale_add(bias, o, job->keep, room->scratch, job->step);
    if (layer->b_noise) add_scaled(bias, out, layer->b_noise, job->step);
    if (job->proximal != 0) copy_rows(job->model + job->biases[l], 1, out, room->scratch);
    finish_step(job, layer->bias, layer->b_speed, room->scratch, o);
}

/* The first layer's update, which begins with the noise where there is some. */
static void write_span(const Job *job, Room *room, const float *x, int64_t n, float gamma,
                       float *update) {
    int64_t width = padded(job->p);
    int64_t o = padded(job->outputs[0]);
    int64_t whole = job->p / LANES * LANES;
    int64_t numbers = job->outputs[0] * job->p;
    float shrunk = gamma - 1;
    float *to = update + job->weights[0];
    const float *model = job->model + job->weights[0];
    multiply(room->coef, 1, o, x, width, job->outputs[0], n, whole, room->noised, 1, to, job->p);
    for (int64_t c = 0; c < job->outputs[0] && whole < job->p; c++) {
        float *end = to + c * job->p + whole;
        v16 tail = all(0);
        for (int64_t r = 0; r < n; r++)
            tail = fma16(load(x + r * width + whole), all(room->coef[r * o + c]), tail);
        float last[LANES];
        store(last, tail);
        for (int64_t i = 0; i < job->p - whole; i++)
            end[i] = room->noised ? end[i] + last[i] : last[i];
    }
    if (shrunk != 0) add_scaled(to, numbers, model, shrunk);
    if (job->biases[0] < 0) return;
    for (int64_t c = 0; c < job->outputs[0]; c++) {
        float sum = room->noised ? update[job->biases[0] + c] : 0;
        for (int64_t r = 0; r < n; r++) sum += room->coef[r * o + c];
        update[job->biases[0] + c] = fmaf(job->model[job->biases[0] + c], shrunk, sum);
    }
}

/* The update of a first layer's weight that lies across. */
static void write_across(const Job *job, const Room *room, float *update) {
    const float *weight = room->layer[0].weight;
    const float *model = job->model + job->weights[0];
    float *to = update + job->weights[0];
    int64_t o = padded(job->outputs[0]);
    for (int64_t from = 0; from < job->outputs[0]; from += LANES) {
        int64_t end = from + LANES < job->outputs[0] ? from + LANES : job->outputs[0];
        for (int64_t i = 0; i < job->p; i++)
            for (int64_t c = from; c < end; c++)
                to[c * job->p + i] = weight[i * o + c] - model[c * job->p + i];
    }
}

static void write_weight(const Job *job, const Room *room, int64_t l, float *update) {
    int64_t width = padded(job->inputs[l]);
    for (int64_t c = 0; c < job->outputs[l]; c++) {
        int64_t at = job->weights[l] + c * job->inputs[l];
        subtract_floats(room->layer[l].weight + c * width, job->model + at, job->inputs[l],
                        update + at);
    }
}

static void write_layers(const Job *job, const Room *room, float *update) {
    for (int64_t l = room->spanned; l < job->layers; l++) {
        const Layer *layer = &room->layer[l];
        if (l == 0 && room->across)
            write_across(job, room, update);
        else
            write_weight(job, room, l, update);
        if (job->biases[l] >= 0)
            subtract_floats(layer->bias, job->model + job->biases[l], job->outputs[l],
                            update + job->biases[l]);
    }
}

/* The mean over the steps of the batches' losses; to `clipped` the share of its samples and steps
with a gradient longer than the bound. */
static double train_one(const Job *job, Room *room, const Client *client, float *update,
                        double *clipped) {
    const float *x = client->x;
    room->noised = job->noised && client->std > 0;
    room->spanned = span_pays(job, client);
    if (room->spanned && job->p % LANES) {
        copy_rows(x, client->n, job->p, room->rows);
        x = room->rows;
    }
    if (room->spanned) begin_span(job, room, x, client->n);
    room->spanned = room->spanned && has_span(job, room, client->n, x);
    room->across = !room->spanned && !room->noised && lies_across(job);
    begin_layers(job, room);
    const float *responses = job->responses + job->steps - client->steps;
    const double *lengths = job->lengths + job->steps - client->steps;
    begin_noise(job, room, client, x, lengths, update);
    double loss = 0;
    int64_t longer = 0;
    for (int64_t k = 0; k < client->steps; k++) {
        const int64_t *rows = client->index + k * job->batch;
        if (!room->spanned) take_rows(job, room, client, k);
        forward(job, room, rows, client->b);
        loss += backward(job, room, rows, client->b, client->y);
        if (job->clip > 0) longer += clip_samples(job, room, rows, client->b);
        if (room->noised) noise_step(job, room, client, k, responses, lengths);
        for (int64_t l = job->layers - 1; l >= room->spanned; l--)
            step_layer(job, room, l, client->b);
        if (room->spanned) step_span(job, room, rows, client->b, client->n, responses[k]);
    }
    if (room->spanned) write_span(job, room, x, client->n, client->gamma, update);
    write_layers(job, room, update);
    if (clipped) *clipped = (double)longer / (client->steps * client->b);
    return loss / client->steps;
}

/* --- sums of updates --- */

#define SUMS (64 / NUMBERS)

/* The L2 norm of a row [d]: 64 partial sums of squares, which are added up by halves. */
#define NORM(name, number, some)                                                                \
    static double name(int64_t d, const number *row) {                                          \
        doubles acc[SUMS];                                                                      \
        UNROLL for (int a = 0; a < SUMS; a++) acc[a] = (doubles){};                             \
        int64_t j = 0;                                                                          \
        for (; j + 64 <= d; j += 64) UNROLL for (int a = 0; a < SUMS; a++) {                    \
                const some *at = (const some *)(row + j + NUMBERS * a);                         \
                doubles v = __builtin_convertvector(*at, doubles);                              \
                acc[a] += v * v;                                                                \
            }                                                                                   \
        double s[64];                                                                           \
        memcpy(s, acc, sizeof s);                                                               \
        for (; j < d; j++) s[j % 64] += (double)row[j] * row[j];                                \
        for (int half = 32; half; half /= 2)                                                    \
            for (int l = 0; l < half; l++) s[l] += s[l + half];                                 \
        return sqrt(s[0]);                                                                      \
    }

NORM(norm32, float, floats_anywhere)
NORM(norm64, double, doubles_anywhere)

enum { COLUMNS = 2048, PIECE = 8 * COLUMNS };

/* The multiples of `step`, a power of two, to which what clients send is rounded, to even halfway, and
the largest size of a coordinate of theirs, of at most 2^51 steps. */
typedef struct {
    double step, most;
} Grid;

static int all_of(longs fit) {
    int all = 1;
    for (int i = 0; i < NUMBERS; i++) all &= fit[i] != 0;
    return all;
}

/* Numbers on the grid, and unless `fit` is NULL whether all of them are small enough. */
INLINE doubles on_grid(doubles number, Grid grid, longs *fit) {
    const longs sign = (longs){} + INT64_MIN;
    if (fit) *fit &= (doubles)((longs)number & ~sign) <= grid.most;
    double magic = 0x1.8p52 * grid.step; /* numbers of its size are multiples of the step */
    return (number + magic) - magic;
}

/* total [count] += factor row (+ std noise), on the grid; `noise` is read in the type `some`. With
`looks`, whether all of it fits. What lies `after` numbers further on comes next: another thread's
cache may have it. */
#define ADD_ROW(name, looks, noises, some, number)                                              \
    INLINE int name(int64_t count, const float *row, int64_t after, double factor,              \
                    const number *noise, double std, Grid grid, double *total) {                \
        longs all = ~(longs){}, *fit = looks ? &all : NULL;                                     \
        int64_t j = 0;                                                                          \
        for (; j + NUMBERS <= count; j += NUMBERS) {                                            \
            const floats_anywhere *at = (const floats_anywhere *)(row + j);                     \
            if (after) __builtin_prefetch(row + after + j);                                     \
            doubles sent = factor * __builtin_convertvector(*at, doubles);                      \
            if (noises)                                                                         \
                sent += std * __builtin_convertvector(*(const some *)(noise + j), doubles);     \
            *(doubles_anywhere *)(total + j) += on_grid(sent, grid, fit);                       \
        }                                                                                       \
        for (; j < count; j++) {                                                                \
            double sent = factor * row[j];                                                      \
            if (noises) sent += std * noise[j];                                                 \
            total[j] += on_grid((doubles){} + sent, grid, fit)[0];                              \
        }                                                                                       \
        return all_of(all);                                                                     \
    }

ADD_ROW(add_small, 0, 0, floats_anywhere, float)
ADD_ROW(add_small_noised, 0, 1, floats_anywhere, float)
ADD_ROW(add_any, 1, 0, floats_anywhere, float)
ADD_ROW(add_any_noised, 1, 1, floats_anywhere, float)
ADD_ROW(add_beside, 1, 1, doubles_anywhere, double)

/* total [count] += row, on the grid. Whether all of it fits. */
INLINE int add_vector(int64_t count, const double *row, Grid grid, double *total) {
    longs all = ~(longs){};
    int64_t j = 0;
    for (; j + NUMBERS <= count; j += NUMBERS) {
        doubles sent = *(const doubles_anywhere *)(row + j);
        *(doubles_anywhere *)(total + j) += on_grid(sent, grid, &all);
    }
    for (; j < count; j++) total[j] += on_grid((doubles){} + row[j], grid, &all)[0];
    return all_of(all);
}

/* What is added up as it is trained; raydpfl/training/backends/compiled.py fills it. Of each client its update
times its factor and its weight, and normals of this std, on the grid, are added to a vector of the
thread's own. An update of norm n has the factor 1 up to `most`, else above (1 / (beside + n)), or 0
where that divides by 0; one that is not finite counts as 0. */
typedef struct {
    double most, above, beside;
    Grid grid;
    double std;                     /* 0: no normals */
    uint64_t seed, purpose, round;  /* of the normals */
    const uint64_t *clients, *draws; /* [C], likewise */
    const double *weights;          /* [C] */
    double *factors;                /* [C] */
    double *found;                  /* [threads][padded(d)] */
    int64_t threads;
    atomic_llong fits;              /* whether all were small enough for the grid */
} Sum;

static double factor_of(const Sum *sum, double norm) {
    if (norm <= sum->most) return 1;
    double by = sum->beside + norm;
    return by > 0 ? sum->above * (1 / by) : 0;
}

/* Clients of a lane in training. Of all C: `x` [C, n, p], `y` [C, n], int64, or float32 [C, n,
outputs] for squares; `sizes` [C], `index` [C, steps, batch], `batches`, `steps` and `gammas` [C]; of
noise `stds`, `clients` and `draws` [C]; `clipped` [C], which is given, or NULL. Of those to train:
`slots` [count], and where to write their `updates` [count][d], `losses`, `norms` and whether they
are `done` [count]; with `sum`, their updates are added to it in place of that. */
typedef struct {
    const Job *job;
    int64_t count;
    const int64_t *slots;
    const float *x;
    const char *y;
    const int64_t *sizes, *index, *batches, *steps;
    const float *gammas, *stds;
    const uint64_t *clients, *draws;
    double *clipped;
    float **updates;
    double *losses, *norms;
    atomic_uchar *done;
    Sum *sum;    /* or NULL */
    Room *rooms; /* of each thread */
    Layer *layers;
    float *memory;
    int64_t trained; /* the first so many */
    int shared;      /* with the crew */
    float *updates_here; /* of a sum: of each thread one, padded(d), and as many normals */
} Lane;

static Client client_at(const Lane *lane, int64_t place) {
    const Job *job = lane->job;
    int64_t slot = lane->slots[place];
    int64_t width = job->squares ? 4 * job->outputs[job->layers - 1] : 8; /* bytes of a target */
    Client client = {
        .x = lane->x + slot * job->n * job->p,
        .y = lane->y + slot * job->n * width,
        .index = lane->index + slot * job->steps * job->batch,
        .n = lane->sizes[slot],
        .b = lane->batches[slot],
        .steps = lane->steps[slot],
        .gamma = lane->gammas[slot],
    };
    if (job->noised) {
        client.std = lane->stds[slot];
        client.id = lane->clients[slot];
        client.draw = lane->draws[slot];
    }
    return client;
}

static void stream_normals(const uint64_t name[5], float std, int64_t count, float *out);

static const double FARTHEST = 8; /* no normal is as large */

/* Adds the update of a client that is trained, which has room for its normals after it. Where its norm
says that all of it fits, it is not looked at. */
static void add_client(const Lane *lane, int64_t place, float *update, double *total) {
    Sum *sum = lane->sum;
    int64_t d = lane->job->d, slot = lane->slots[place];
    double norm = lane->norms[place];
    if (!isfinite(norm)) memset(update, 0, d * sizeof(float)), norm = 0;
    sum->factors[slot] = factor_of(sum, norm);
    double factor = sum->factors[slot] * sum->weights[slot], std = sum->std;
    Grid grid = sum->grid;
    float *noise = update + padded(d);
    if (std > 0) {
        uint64_t name[5] = {sum->seed, sum->purpose, sum->round, sum->clients[slot],
                            sum->draws[slot] << 32};
        stream_normals(name, 1, d, noise);
    }
    int fit = (fabs(factor) * norm + FARTHEST * std) * (1 + 1e-9) <= grid.most;
    if (fit && std > 0)
        add_small_noised(d, update, 0, factor, noise, std, grid, total);
    else if (fit)
        add_small(d, update, 0, factor, NULL, 0, grid, total);
    else if (std > 0)
        fit = add_any_noised(d, update, 0, factor, noise, std, grid, total);
    else
        fit = add_any(d, update, 0, factor, NULL, 0, grid, total);
    if (!fit) atomic_store(&sum->fits, 0);
}

static void train_slot(void *what, int64_t place, int64_t thread) {
    Lane *lane = what;
    const Job *job = lane->job;
    Client client = client_at(lane, place);
    int64_t d = job->d;
    float *update = lane->sum ? lane->updates_here + 2 * padded(d) * thread : lane->updates[place];
    double *clipped = lane->clipped ? lane->clipped + lane->slots[place] : NULL;
    lane->losses[place] = train_one(job, lane->rooms + thread, &client, update, clipped);
    lane->norms[place] = norm32(d, update);
    if (lane->sum) add_client(lane, place, update, lane->sum->found + padded(d) * thread);
    atomic_store(lane->done + place, 1);
}

/* The most rows of a client that is to be trained in the span of its rows; 0: none is. */
static int64_t most_spanned(const Lane *lane) {
    int64_t most = 0;
    for (int64_t i = 0; i < lane->count; i++) {
        const Client client = client_at(lane, i);
        if (client.n > most && span_pays(lane->job, &client)) most = client.n;
    }
    return most;
}

/* Ends the training of a lane, and frees what it has taken. */
void raydpfl_end(Lane *lane) {
    if (lane->shared) dismiss();
    free(lane->memory);
    free(lane->rooms);
    free(lane->layers);
    free(lane);
}

/* Begins to train the clients of a lane; NULL: no memory. Whatever it is given must stay. */
Lane *raydpfl_begin(const Job *job, int64_t count, const int64_t *slots, const float *x,
                    const char *y, const int64_t *sizes, const int64_t *index,
                    const int64_t *batches, const int64_t *steps, const float *gammas,
                    const float *stds, const uint64_t *clients, const uint64_t *draws,
                    double *clipped, float **updates, double *losses, double *norms,
                    atomic_uchar *done, Sum *sum) {
    Lane *lane = job->layers > MOST ? NULL : malloc(sizeof(Lane));
    if (!lane) return NULL;
    *lane = (Lane){job,   count,   slots, x,       y,       sizes,  index, batches, steps, gammas,
                   stds,  clients, draws, clipped, updates, losses, norms, done,    sum};
    lane->shared = engage(train_slot, lane);
    if (lane->shared && sum && sum->threads < crew.members)
        atomic_store(&crew.members, sum->threads);
    int64_t threads = lane->shared ? crew.members : 1;
    Room room = {.most = most_spanned(lane)};
    int64_t floats = padded(furnish(job, &room, NULL));
    int64_t here = sum ? 2 * padded(job->d) : 0;
    lane->memory = aligned_alloc(64, threads * (floats + here) * sizeof(float));
    lane->rooms = calloc(threads, sizeof(Room));
    lane->layers = calloc(threads * job->layers, sizeof(Layer));
    if (!lane->memory || !lane->rooms || !lane->layers) {
        raydpfl_end(lane);
        return NULL;
    }
    lane->updates_here = lane->memory + threads * floats;
    for (int64_t i = 0; i < threads; i++) {
        lane->rooms[i].layer = lane->layers + i * job->layers;
        lane->rooms[i].most = room.most;
        furnish(job, lane->rooms + i, lane->memory + i * floats);
    }
    return lane;
}

/* Comes back when the first `end` of a lane's clients are trained. Those below `limit`, whose
`updates` are known, may be. */
void raydpfl_train(Lane *lane, int64_t end, int64_t limit) {
    if (!lane->shared) {
        for (; lane->trained < end; lane->trained++) train_slot(lane, lane->trained, 0);
        return;
    }
    allow(limit);
    for (; lane->trained < end; lane->trained++)
        while (!atomic_load(lane->done + lane->trained))
            if (!do_one(0)) await(lane->done + lane->trained);
}

/* Rows [k, d], and what is made of them. */
typedef struct {
    int64_t k, d;
    const void *rows;
    const double *factors, *noise;
    double *found;
    Grid grid;
    atomic_int *fits;
} Rows;

static void find_norm32(void *what, int64_t place, int64_t thread) {
    const Rows *r = what;
    r->found[place] = norm32(r->d, (const float *)r->rows + place * r->d);
}

static void find_norm64(void *what, int64_t place, int64_t thread) {
    const Rows *r = what;
    r->found[place] = norm64(r->d, (const double *)r->rows + place * r->d);
}

/* The L2 norms of rows [k, d]. */
void raydpfl_norms32(int64_t k, int64_t d, const float *rows, double *norms) {
    Rows r = {.d = d, .rows = rows, .found = norms};
    share(k, find_norm32, &r);
}

void raydpfl_norms64(int64_t k, int64_t d, const double *rows, double *norms) {
    Rows r = {.d = d, .rows = rows, .found = norms};
    share(k, find_norm64, &r);
}

static void add_piece(void *what, int64_t place, int64_t thread) {
    const Rows *r = what;
    int64_t last = (place + 1) * PIECE < r->d ? (place + 1) * PIECE : r->d;
    int fit = 1;
    for (int64_t from = place * PIECE; from < last; from += COLUMNS) {
        int64_t count = from + COLUMNS < last ? COLUMNS : last - from;
        double *total = r->found + from;
        for (int64_t i = 0; i < r->k; i++) {
            int64_t at = i * r->d + from;
            const float *row = (const float *)r->rows + at;
            int64_t after = i + 1 < r->k ? r->d : 0;
            if (!r->factors)
                fit &= add_vector(count, (const double *)r->rows + at, r->grid, total);
            else if (r->noise)
                fit &=
                    add_beside(count, row, after, r->factors[i], r->noise + at, 1, r->grid, total);
            else
                fit &= add_any(count, row, after, r->factors[i], NULL, 0, r->grid, total);
        }
    }
    if (!fit) atomic_store(r->fits, 0);
}

/* total [d] += factors[i] rows[i] (+ noise[i]), of float rows, or with NULL for factors rows[i], of
doubles, each on the grid. `noise` [k, d] or NULL. Whether all fit: else the total is any. */
int raydpfl_add(int64_t k, int64_t d, const void *rows, const double *factors, const double *noise,
                double step, double most, double *total) {
    atomic_int fits = 1;
    Rows r = {k, d, rows, factors, noise, total, {step, most}, &fits};
    share((d + PIECE - 1) / PIECE, add_piece, &r);
    return fits;
}

/* --- keyed words --- */

/* Streams, as raydpfl_words is given them. */
typedef struct {
    uint64_t key[2], round;
    const uint64_t *clients, *draws;
    const int64_t *steps, *sizes;
    int64_t most, width;
    uint64_t *found;
} Streams;

/* A block of Philox of 4 words of 64 bits, 10 rounds (Salmon et al. 2011). */
static void philox(const uint64_t key[2], const uint64_t counter[4], uint64_t words[4]) {
    uint64_t first = key[0], second = key[1];
    uint64_t a = counter[0], b = counter[1], c = counter[2], d = counter[3];
    for (int i = 0; i < 10; i++) {
        unsigned __int128 low = (unsigned __int128)0xD2E7470EE14C6C93u * a;
        unsigned __int128 high = (unsigned __int128)0xCA5A826395121157u * c;
        a = (uint64_t)(high >> 64) ^ b ^ first;
        b = (uint64_t)high;
        c = (uint64_t)(low >> 64) ^ d ^ second;
        d = (uint64_t)low;
        first += 0x9E3779B97F4A7C15u;
        second += 0xBB67AE8584CAA73Bu;
    }
    words[0] = a, words[1] = b, words[2] = c, words[3] = d;
}

/* One of them, and the words that are left of its last block. */
typedef struct {
    uint64_t counter[4], words[4];
    int left;
} Stream;

static Stream stream_at(const Streams *s, int64_t place) {
    return (Stream){{0, s->draws[place] << 32, s->clients[place], s->round}};
}

static void next_words(const Streams *s, Stream *stream, int64_t count, uint64_t *to) {
    for (int64_t i = 0; i < count; i++) {
        if (!stream->left) {
            stream->counter[0]++;
            philox(s->key, stream->counter, stream->words);
            stream->left = 4;
        }
        to[i] = stream->words[4 - stream->left--];
    }
}

static void draw_words(void *what, int64_t place, int64_t thread) {
    const Streams *s = what;
    uint64_t *to = s->found + place * s->most * s->width;
    Stream stream = stream_at(s, place);
    memset(to, 0xFF, s->most * s->width * sizeof *to);
    for (int64_t step = 0; step < s->steps[place]; step++)
        next_words(s, &stream, s->sizes[place], to + step * s->width);
}

/* The words of k streams, of which each fills the first sizes[i] of a row of `width`, in the first
steps[i] of `most` rows; all bits are set elsewhere. `found` [k][most][width]. */
void raydpfl_words(int64_t k, uint64_t seed, uint64_t purpose, uint64_t round,
                   const uint64_t *clients, const uint64_t *draws, const int64_t *steps,
                   const int64_t *sizes, int64_t most, int64_t width, uint64_t *found) {
    Streams s = {{seed, purpose}, round, clients, draws, steps, sizes, most, width, found};
    share(k, draw_words, &s);
}

enum { RANKED = 128 }; /* rows of a client */

/* Streams, and the batches [k][steps][width] that their words shuffle. */
typedef struct {
    Streams s;
    const int64_t *places, *batches;
    int64_t rows, *index;
} Shuffled;

/* `counts`, and one more where `own` is larger than `other`. */
INLINE longs one_more(longs counts, longs own, int64_t other) {
#if WIDE == 16
    __mmask8 more = _mm512_cmpgt_epi64_mask((__m512i)own, _mm512_set1_epi64(other));
    const __m512i one = _mm512_set1_epi64(1);
    return (longs)_mm512_mask_add_epi64((__m512i)counts, more, (__m512i)counts, one);
#else
    return counts - (longs)(own > other);
#endif
}

/* The first `batch` of n rows in the order of their words, of which the row's number takes the low
24 bits. Every other row counts as one before those with larger words. */
static void rank(int64_t n, int64_t batch, const uint64_t *words, int64_t *found) {
    int64_t keys[RANKED], ranks[RANKED], rows[RANKED];
    for (int64_t i = 0; i < n; i++)
        keys[i] = (int64_t)((words[i] & ~(uint64_t)0xFFFFFF | i) ^ (1ull << 63));
    for (int64_t i = n; i % NUMBERS; i++) keys[i] = 0;
    for (int64_t i = 0; i < n; i += NUMBERS) {
        longs own = *(const longs_anywhere *)(keys + i), before = {};
        for (int64_t other = 0; other < n; other++) before = one_more(before, own, keys[other]);
        *(longs_anywhere *)(ranks + i) = before;
    }
    for (int64_t i = 0; i < n; i++) rows[ranks[i]] = i;
    memcpy(found, rows, batch * sizeof *found);
}

static void shuffle_rows(void *what, int64_t place, int64_t thread) {
    const Shuffled *r = what;
    const Streams *s = &r->s;
    int64_t batch = r->batches[place];
    int64_t *to = r->index + r->places[place] * r->rows * s->width;
    uint64_t words[RANKED];
    Stream stream = stream_at(s, place);
    for (int64_t step = 0; step < s->most; step++, to += s->width)
        if (step < s->steps[place]) {
            next_words(s, &stream, s->sizes[place], words);
            rank(s->sizes[place], batch, words, to);
        } else
            for (int64_t i = 0; i < batch; i++) to[i] = i;
}

/* For each of k clients, of RANKED rows at most, batches of so many of its `sizes[i]` rows, shuffled
by keyed words; `index` [C][rows][width], of which places[i] is the client's part; its batches fill
the first `most` rows, and those beyond its own steps have the rows in their order. */
void raydpfl_shuffled(int64_t k, uint64_t seed, uint64_t purpose, uint64_t round,
                      const uint64_t *clients, const uint64_t *draws, const int64_t *steps,
                      const int64_t *sizes, const int64_t *places, const int64_t *batches,
                      int64_t most, int64_t rows, int64_t width, int64_t *index) {
    Streams s = {{seed, purpose}, round, clients, draws, steps, sizes, most, width};
    Shuffled r = {s, places, batches, rows, index};
    share(k, shuffle_rows, &r);
}

/* --- keyed normals --- */

typedef uint32_t lanes __attribute__((vector_size(4 * WIDE)));

enum { BLOCKS = 16, WORDS = 8 * BLOCKS }; /* blocks of a group, and its words of 64 bits */

#define ROTATED(v, by) ((v) << (by) | (v) >> (32 - (by)))
#define MIX(a, b, c, d)                                                                         \
    {                                                                                           \
        a += b, d ^= a, d = ROTATED(d, 16);                                                     \
        c += d, b ^= c, b = ROTATED(b, 12);                                                     \
        a += b, d ^= a, d = ROTATED(d, 8);                                                      \
        c += d, b ^= c, b = ROTATED(b, 7);                                                      \
    }

#define COLUMN(w, i) MIX(w[i], w[4 + i], w[8 + i], w[12 + i])
#define DIAGONAL(w, i) MIX(w[i], w[4 + (i + 1) % 4], w[8 + (i + 2) % 4], w[12 + (i + 3) % 4])

/* ChaCha with 8 rounds (Bernstein 2008) under a name, from some block on: its state before the
first round, in all lanes, and what of that round depends on no lane's block. */
typedef struct {
    lanes start[16], begun[16];
} Cipher;

static void begin_cipher(Cipher *cipher, const uint64_t name[5], uint64_t first) {
    const uint64_t state[8] = {0x3320646E61707865u, 0x6B20657479622D32u, name[0], name[1],
                               name[2],             name[3],             first,   name[4]};
    lanes *w = cipher->begun;
    for (int i = 0; i < 16; i++)
        w[i] = cipher->start[i] = (lanes){} + (uint32_t)(state[i / 2] >> (i % 2 * 32));
    UNROLL for (int i = 1; i < 4; i++) COLUMN(w, i);
}

/* The blocks from `first` on, one a lane: word i of all of them to words[i]. */
INLINE void chacha(const Cipher *cipher, uint64_t first, lanes words[16]) {
    lanes *w = words;
    UNROLL for (int i = 0; i < 16; i++) w[i] = cipher->begun[i];
    w[12] = (lanes)places(0, 0) + (uint32_t)first;
    COLUMN(w, 0);
    for (int turn = 0;; turn++) {
        UNROLL for (int i = 0; i < 4; i++) DIAGONAL(w, i);
        if (turn == 3) break;
        UNROLL for (int i = 0; i < 4; i++) COLUMN(w, i);
    }
    UNROLL for (int i = 0; i < 16; i++) w[i] += cipher->start[i];
    w[12] += (lanes)places(0, 0) + (uint32_t)first - cipher->start[12];
}

INLINE part root(part v) {
#if WIDE == 16
    return (part)_mm512_sqrt_ps((__m512)v);
#elif WIDE == 8
    return (part)_mm256_sqrt_ps((__m256)v);
#else
    for (int i = 0; i < WIDE; i++) v[i] = sqrtf(v[i]);
    return v;
#endif
}

/* a where the word is odd, b where it is even. */
INLINE part pick_odd(bits word, part a, part b) {
#if WIDE == 16
    return (part)_mm512_mask_blend_ps(_mm512_test_epi32_mask((__m512i)word, _mm512_set1_epi32(1)),
                                      (__m512)b, (__m512)a);
#elif WIDE == 8
    return (part)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)(word << 31));
#else
    return pick(-(word & 1), a, b);
#endif
}

/* Vectors that are transformed at a time, as what one of them comes to waits for what it comes
from. */
enum { ABREAST = WIDE == 16 ? 4 : 1 };
#define EVERY UNROLL for (int i = 0; i < ABREAST; i++)

/* (word & kept) | set, and a ^ (b & kept). */
INLINE bits kept_or(bits word, int32_t kept, int32_t set) {
#if WIDE == 16
    return (bits)_mm512_ternarylogic_epi32((__m512i)word, _mm512_set1_epi32(kept),
                                           _mm512_set1_epi32(set), 0xEA);
#else
    return (word & kept) | set;
#endif
}

INLINE part signed_by(part a, bits b) {
#if WIDE == 16
    return (part)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, _mm512_set1_epi32(INT32_MIN),
                                           0x78);
#else
    return (part)((bits)a ^ (b & INT32_MIN));
#endif
}

/* v to -2 log(2^-31 v), of v in [2^-10, 2^31]. */
INLINE void minus_two_logarithms(part v[]) {
    static const float terms[] = {-0.1746968627f, 0.2861504257f, -0.2983594835f, 0.3314101696f,
                                  -0.3992414474f, 0.5000351071f, -0.6666790247f, 0.9999998212f,
                                  -2.0f};
    const part zero = {};
    bits e[ABREAST];
    part f[ABREAST], y[ABREAST];
    /* v = (f + 1) 2^(e 2^-23 + 31), f + 1 in [sqrt(1/2), sqrt(2)) */
    EVERY e[i] = ((bits)v[i] - 0x4EB504F3) & (int32_t)0xFF800000;
    EVERY f[i] = fused((part)((bits)v[i] - e[i]), zero + 0x1p-31f, zero - 1.0f);
    EVERY y[i] = zero + terms[0];
    UNROLL for (int k = 1; k < 9; k++) EVERY y[i] = fused(y[i], f[i], zero + terms[k]);
    EVERY v[i] = fused(__builtin_convertvector(e[i], part), zero - 1.3862943611f * 0x1p-23f,
                       y[i] * f[i]);
}

/* r to its sines; to `c` the cosines. */
INLINE void sines_and_cosines(part r[], part c[]) {
    const part zero = {};
    part s[ABREAST], z[ABREAST];
    EVERY z[i] = r[i] * r[i];
    EVERY s[i] = fused(z[i], zero - 0.0001951528393f, zero + 0.008332160302f);
    EVERY c[i] = fused(z[i], zero + 2.44331568e-05f, zero - 0.001388731645f);
    EVERY s[i] = fused(s[i], z[i], zero - 0.1666665524f) * z[i];
    EVERY c[i] = fused(c[i], z[i], zero + 0.04166664556f);
    EVERY r[i] = fused(s[i], r[i], r[i]);
    EVERY c[i] = fused(fused(c[i], z[i], zero - 0.5f), z[i], zero + 1.0f);
}

/* Box and Muller's transform of words, by their halves, each operation rounded once, the fused ones
too: raydpfl/core/prng.py has the same in numpy. */
INLINE void box_muller(const lanes *words, float std, float *cosines, float *sines) {
    bits low[ABREAST], high[ABREAST];
    part v[ABREAST], s[ABREAST], c[ABREAST];
    EVERY low[i] = (bits)words[2 * i], high[i] = (bits)words[2 * i + 1];
    EVERY s[i] = __builtin_convertvector(kept_or(high[i], 0x7FFFFC00, 0x200), part);
    EVERY v[i] = __builtin_convertvector(kept_or(high[i], 0x3FE, 1), part);
    EVERY v[i] = fused(v[i], (part){} + 0x1p-10f,
                       __builtin_convertvector(low[i] & INT32_MAX, part));
    minus_two_logarithms(v);
    EVERY s[i] *= 1.8725351414619645e-07f * 0x1p-9f;
    sines_and_cosines(s, c);
    EVERY v[i] = root(v[i]) * std;
    EVERY {
        part x = signed_by(pick_odd(high[i], s[i], c[i]), low[i]);
        part y = signed_by(pick_odd(high[i], c[i], s[i]), high[i]);
        *(part_anywhere *)(cosines + i * BLOCKS) = x * v[i];
        *(part_anywhere *)(sines + i * BLOCKS) = y * v[i];
    }
}

/* `count` of WORDS cosines and sines, or somewhat more, from the group of blocks that begins at
`first`. A pair of a block's words is a word here; the first pairs of all blocks come first. */
INLINE void some_normals(const Cipher *cipher, uint64_t first, float std, int64_t count,
                         float *cosines, float *sines) {
    for (int lane = 0; lane < BLOCKS; lane += WIDE) {
        lanes words[16];
        chacha(cipher, first + lane, words);
        for (int w = 0; w < count; w += ABREAST * BLOCKS)
            box_muller(words + w / 8, std, cosines + w + lane, sines + w + lane);
    }
}

/* The first `count` normals, times `std`, of a stream for an even number of them. */
static void stream_normals(const uint64_t name[5], float std, int64_t count, float *out) {
    int64_t half = (count + 1) / 2;
    float *sines = out + half;
    Cipher cipher;
    for (int64_t j = 0; j < half; j += WORDS) {
        uint64_t first = j / 8;
        if ((uint32_t)first == 0) begin_cipher(&cipher, name, first);
        for (int64_t i = j + WORDS; i < j + 2 * WORDS && i < half; i += LANES) {
            __builtin_prefetch(out + i, 1);
            __builtin_prefetch(sines + i, 1);
        }
        if (j + WORDS <= count - half) {
            some_normals(&cipher, first, std, WORDS, out + j, sines + j);
            continue;
        }
        float last[2][WORDS];
        some_normals(&cipher, first, std, padded(half - j), last[0], last[1]);
        memcpy(out + j, last[0], (half - j) * sizeof(float));
        memcpy(sines + j, last[1], (count - half - j) * sizeof(float));
    }
}

/* Normals of k streams times `stds` [k]: `out` [k][2 half]. `names` [k][5]: seed, purpose, round,
client, and the draw over the step. */
void raydpfl_normals(int64_t k, int64_t half, const uint64_t *names, const float *stds,
                     float *out) {
    for (int64_t i = 0; i < k; i++)
        stream_normals(names + 5 * i, stds[i], 2 * half, out + i * 2 * half);
}

/* --- convolutions that are max-pooled, sample by sample --- */

/* raydpfl/training/layers/pooled_convolution.py fills it. Images have their channels last; they are padded in here. A
cell is an output of the pooling. A sample's gradient by a channel's filter is the sum, over its
cells, of g times the patch of the image at the output that the cell takes its maximum from. */
typedef struct {
    int64_t samples, channels;
    int64_t given[2];      /* of an image that is not padded: rows, and numbers of one */
    int64_t inside;        /* where that begins in the padded one */
    int64_t image;         /* floats from one padded image to the next */
    int64_t row;           /* from one row of it to the next */
    int64_t rows, run;     /* of a filter: rows, and numbers of one */
    int64_t outputs[2];    /* of a channel: down, and across */
    int64_t step[2];       /* floats from an output's patch to the next */
    int64_t grid[2];       /* cells of a channel */
    int64_t kernel[2], stride[2], padding[2], dilation[2]; /* of the pooling, in outputs */
} Filters;

/* Of a sample, the cells of each channel whose gradient is not 0. */
typedef struct {
    int64_t *counts; /* [channels] */
    float *values;   /* [channels][cells], their gradients */
    int32_t *places; /* the same, where their patches begin in the image */
} Cells;

INLINE int64_t cells_of(const Filters *f) { return f->grid[0] * f->grid[1]; }

/* z [R][V vectors of `wide`] of R outputs that are next to each other. */
INLINE void strip(const Filters *f, const float *image, const float *weights, const float *bias,
                  int64_t wide, float *z, int R, int V) {
    v16 acc[28];
    UNROLL for (int i = 0; i < R * V; i++) acc[i] = load(bias + i % V * LANES);
    for (int64_t r = 0; r < f->rows; r++)
        tile(image + r * f->row, f->step[1], 1, weights + r * f->run * wide, wide, f->run, acc, R,
             V);
    UNROLL for (int i = 0; i < R * V; i++) store(z + i / V * wide + i % V * LANES, acc[i]);
}

/* The last strip of a row ends where the row does: what it shares with that before is the same. */
#define STRIPS(R, V)                                                                            \
    for (int64_t y = 0; y < f->outputs[0]; y++)                                                 \
        for (int64_t x = 0; x < across; x += (R)) {                                             \
            int64_t at = x + (R) < across ? x : across - (R);                                   \
            strip(f, image + y * f->step[0] + at * f->step[1], weights + c, bias + c, wide,     \
                  z + (y * across + at) * wide + c, R, V);                                      \
        }

#if WIDE == 16
#define LONG 14 /* outputs of a strip, such that their sums are in registers */
#define SHORT 8
#define SMALL 4
#else
#define LONG 6
#define SHORT 4
#define SMALL 2
#endif

/* z [outputs][wide]: what the convolution of an image gives. `weights` [rows][run][wide] and `bias`
[wide], a multiple of 16, with zeros after the channels. */
static void convolve(const Filters *f, const float *image, const float *weights, const float *bias,
                     int64_t wide, float *z) {
    int64_t across = f->outputs[1];
    int64_t in_long = (across + LONG - 1) / LONG * LONG;
    int64_t in_short = (across + SHORT - 1) / SHORT * SHORT;
    for (int64_t c = 0; c < wide;) {
        int two = WIDE == 16 && wide - c >= 2 * LANES;
        if (across >= LONG && in_long <= in_short) {
            if (two) STRIPS(LONG, 2) else STRIPS(LONG, 1)
        } else if (across >= SHORT) {
            if (two) STRIPS(SHORT, 2) else STRIPS(SHORT, 1)
        } else if (across >= SMALL) {
            if (two) STRIPS(SMALL, 2) else STRIPS(SMALL, 1)
        } else {
            if (two) STRIPS(1, 2) else STRIPS(1, 1)
        }
        c += two ? 2 * LANES : LANES;
    }
}

/* The first of the outputs first, first + by, ... that there is, and after the last of `count`. */
INLINE void within(int64_t first, int64_t by, int64_t count, int64_t all, int64_t span[2]) {
    span[0] = first < 0 ? first + (by - 1 - first) / by * by : first;
    span[1] = first + count * by < all ? first + count * by : all;
}

/* The maxima of the cells, from the outputs z [outputs][wide], and where their patches begin in the
image, of channels `c` to `c` + 15. Of equals the first is taken, and NaN before all. */
INLINE void pool(const Filters *f, const float *z, int64_t wide, int64_t c, float *maxima,
                 int32_t *where) {
    int64_t left = f->channels - c < LANES ? f->channels - c : LANES;
    int64_t ys[2], xs[2];
    for (int64_t i = 0; i < f->grid[0]; i++) {
        within(i * f->stride[0] - f->padding[0], f->dilation[0], f->kernel[0], f->outputs[0], ys);
        for (int64_t j = 0; j < f->grid[1]; j++) {
            within(j * f->stride[1] - f->padding[1], f->dilation[1], f->kernel[1], f->outputs[1],
                   xs);
            v16 most = load(z + (ys[0] * f->outputs[1] + xs[0]) * wide + c);
            bits places[PARTS];
            EACH places[i] = (bits){} + (int32_t)(ys[0] * f->step[0] + xs[0] * f->step[1]);
            for (int64_t y = ys[0]; y < ys[1]; y += f->dilation[0])
                for (int64_t x = xs[0]; x < xs[1]; x += f->dilation[1]) {
                    v16 v = load(z + (y * f->outputs[1] + x) * wide + c);
                    bits at = (bits){} + (int32_t)(y * f->step[0] + x * f->step[1]);
                    EACH {
                        bits taken = (v.p[i] > most.p[i]) | (v.p[i] != v.p[i]);
                        most.p[i] = pick(taken, v.p[i], most.p[i]);
                        places[i] = (taken & at) | (~taken & places[i]);
                    }
                }
            float *to = maxima + (i * f->grid[1] + j) * f->channels + c;
            int32_t *at = where + (i * f->grid[1] + j) * f->channels + c;
            if (left == LANES) {
                store(to, most);
                memcpy(at, places, sizeof(places));
            } else {
                float found[LANES];
                store(found, most);
                memcpy(to, found, left * sizeof(float));
                memcpy(at, places, left * sizeof(int32_t));
            }
        }
    }
}

/* Of `given` [samples][given]: to `images` [samples][image] the padded ones, and the maxima of the
outputs, and where the patches of these begin in their image, both [samples][cells][channels];
`weights` [channels][rows][run], `bias` [channels] or NULL. 0: done; 1: no memory. */
int raydpfl_maxima(const Filters *f, const float *given, float *images, const float *weights,
                   const float *bias, float *maxima, int32_t *where) {
    int64_t wide = padded(f->channels);
    int64_t numbers = f->rows * f->run;
    int64_t outputs = f->outputs[0] * f->outputs[1];
    float *own = aligned_alloc(64, (numbers + 1 + outputs) * wide * sizeof(float));
    if (!own) return 1;
    float *last = own + numbers * wide;
    float *z = last + wide;
    memset(own, 0, (numbers + 1) * wide * sizeof(float));
    for (int64_t c = 0; c < f->channels; c++)
        for (int64_t j = 0; j < numbers; j++) own[j * wide + c] = weights[c * numbers + j];
    if (bias) memcpy(last, bias, f->channels * sizeof(float));
    for (int64_t s = 0; s < f->samples; s++) {
        int64_t at = s * cells_of(f) * f->channels;
        float *image = images + s * f->image;
        memset(image, 0, f->image * sizeof(float));
        for (int64_t r = 0; r < f->given[0]; r++, given += f->given[1])
            memcpy(image + f->inside + r * f->row, given, f->given[1] * sizeof(float));
        convolve(f, image, own, last, wide, z);
        for (int64_t c = 0; c < wide; c += LANES) pool(f, z, wide, c, maxima + at, where + at);
    }
    free(own);
    return 0;
}

INLINE int64_t cells_room(const Filters *f) { return padded(f->channels * (cells_of(f) + 1)) * 4; }

/* `memory` has `cells_room` floats. */
INLINE Cells cells_in(const Filters *f, float *memory) {
    int64_t numbers = padded(f->channels * cells_of(f));
    return (Cells){(int64_t *)(memory + 2 * numbers), memory, (int32_t *)(memory + numbers)};
}

/* Those of a sample, from `g` and `where` [cells][channels]. */
static void find_cells(const Filters *f, const float *g, const int32_t *where, Cells *found) {
    int64_t cells = cells_of(f);
    memset(found->counts, 0, f->channels * sizeof(int64_t));
    for (int64_t i = 0; i < cells; i++, g += f->channels, where += f->channels)
        for (int64_t c = 0; c < f->channels; c++) {
            int64_t at = c * cells + found->counts[c];
            found->values[at] = g[c];
            found->places[at] = where[c];
            found->counts[c] += g[c] != 0;
        }
}

/* acc [R][V vectors] += factor times the patches, of R rows and V vectors, times their values. */
INLINE void add_patches(const Filters *f, const Cells *cells, int64_t channel, const float *image,
                        float factor, float *acc, int64_t width, int R, int V) {
    const float *values = cells->values + channel * cells_of(f);
    const int32_t *places = cells->places + channel * cells_of(f);
    int64_t count = cells->counts[channel];
    int64_t row = f->row;
    v16 sums[25];
    UNROLL for (int i = 0; i < R * V; i++) sums[i] = all(0);
    for (int64_t i = 0; i < count; i++) {
        const float *patch = image + places[i];
        v16 value = all(values[i]);
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++)
                sums[r * V + v] = fma16(load(patch + r * row + v * LANES), value, sums[r * V + v]);
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) {
            float *to = acc + r * width + v * LANES;
            store(to, fma16(sums[r * V + v], all(factor), load(to)));
        }
}

/* DO(R, V) for R rows at a time of a filter, from row r on, and V of the vectors of a row, at c. */
#define BLOCKS(DO)                                                                              \
    for (int64_t c = 0, left; c < width; c += left * LANES) {                                   \
        int64_t r = 0;                                                                          \
        left = (width - c) / LANES;                                                             \
        if (left >= 5) {                                                                        \
            left = 5;                                                                           \
            DOWN(DO, 5)                                                                         \
        } else if (left == 4) {                                                                 \
            DOWN(DO, 4)                                                                         \
        } else if (left == 3) {                                                                 \
            DOWN(DO, 3)                                                                         \
        } else if (left == 2) {                                                                 \
            DOWN(DO, 2)                                                                         \
        } else {                                                                                \
            DOWN(DO, 1)                                                                         \
        }                                                                                       \
    }
#define DOWN(DO, V)                                                                             \
    for (; r + 5 <= f->rows; r += 5) DO(5, V);                                                  \
    for (; r + 3 <= f->rows; r += 3) DO(3, V);                                                  \
    for (; r < f->rows; r++) DO(1, V);

/* `acc` [rows][padded run] += factor times a channel's filter gradient of a sample. */
static void add_filter(const Filters *f, const Cells *cells, int64_t channel, const float *image,
                       float factor, float *acc) {
    int64_t width = padded(f->run);
#define PATCHES(R, V)                                                                           \
    add_patches(f, cells, channel, image + r * f->row + c, factor, acc + r * width + c, width, R, V)
    BLOCKS(PATCHES)
}

/* Of `images`, with 16 floats after each: to `squares` [samples] the squared norm of each sample's
gradient, or, where that is NULL, to `total` [channels][rows][run] their sum, weighted by `factors`
[samples] unless that is NULL. 0: done; 1: no memory. */
int raydpfl_filters(const Filters *f, const float *images, const float *g, const int32_t *where,
                    const float *factors, float *squares, float *total) {
    int64_t width = padded(f->run);
    int64_t size = f->rows * width;
    int64_t floats = (squares ? 1 : f->channels) * size;
    int64_t step = f->channels * cells_of(f);
    float *sums = aligned_alloc(64, (floats + cells_room(f)) * sizeof(float));
    if (!sums) return 1;
    Cells cells = cells_in(f, sums + floats);
    memset(sums, 0, floats * sizeof(float));
    for (int64_t s = 0; s < f->samples; s++) {
        float square = 0;
        find_cells(f, g + s * step, where + s * step, &cells);
        for (int64_t c = 0; c < f->channels; c++) {
            float *own = squares ? sums : sums + c * size;
            add_filter(f, &cells, c, images + s * f->image, factors ? factors[s] : 1, own);
            if (!squares) continue;
            for (int64_t r = 0; r < f->rows; r++) {
                memset(own + r * width + f->run, 0, (width - f->run) * sizeof(float));
                square += squares_of(own + r * width, width);
            }
            memset(own, 0, size * sizeof(float));
        }
        if (squares) squares[s] = square;
    }
    for (int64_t r = 0; r < f->channels * f->rows && !squares; r++)
        memcpy(total + r * f->run, sums + r * width, f->run * sizeof(float));
    free(sums);
    return 0;
}

/* image += the filter `weight` [R][V vectors of `width`] times each value, where its patch is. */
INLINE void spread(const Filters *f, const Cells *cells, int64_t channel, float *image,
                   const float *weight, int64_t width, int R, int V) {
    const float *values = cells->values + channel * cells_of(f);
    const int32_t *places = cells->places + channel * cells_of(f);
    int64_t count = cells->counts[channel];
    int64_t row = f->row;
    v16 own[25];
    UNROLL for (int i = 0; i < R * V; i++) own[i] = load(weight + i / V * width + i % V * LANES);
    for (int64_t i = 0; i < count; i++) {
        v16 value = all(values[i]);
        float *to = image + places[i];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) {
                float *part = to + r * row + v * LANES;
                store(part, fma16(own[r * V + v], value, load(part)));
            }
    }
}

/* `image` += a channel's part of a sample's gradient by its image; `weight` [rows][padded run]. */
static void add_image(const Filters *f, const Cells *cells, int64_t channel, const float *weight,
                      float *image) {
    int64_t width = padded(f->run);
#define SPREAD(R, V)                                                                            \
    spread(f, cells, channel, image + r * f->row + c, weight + r * width + c, width, R, V)
    BLOCKS(SPREAD)
}

/* The gradient by the images, `found` [samples][given], from `weights` [channels][rows][run]. 0:
done; 1: no memory. */
int raydpfl_by_images(const Filters *f, const float *g, const int32_t *where, const float *weights,
                      float *found) {
    int64_t size = f->rows * padded(f->run);
    int64_t step = f->channels * cells_of(f);
    int64_t floats = f->channels * size + padded(f->image);
    float *own = aligned_alloc(64, (floats + cells_room(f)) * sizeof(float));
    if (!own) return 1;
    float *image = own + f->channels * size;
    Cells cells = cells_in(f, own + floats);
    copy_rows(weights, f->channels * f->rows, f->run, own);
    for (int64_t s = 0; s < f->samples; s++) {
        memset(image, 0, f->image * sizeof(float));
        find_cells(f, g + s * step, where + s * step, &cells);
        for (int64_t c = 0; c < f->channels; c++) add_image(f, &cells, c, own + c * size, image);
        for (int64_t r = 0; r < f->given[0]; r++, found += f->given[1])
            memcpy(found, image + f->inside + r * f->row, f->given[1] * sizeof(float));
    }
    free(own);
    return 0;
}

/* --- rows of a file --- */

typedef struct {
    int file;
    const int64_t *at, *lengths, *places;
    char *to;
    int64_t most, *done;
    atomic_int failed;
} Reading;

/* Reads of a stretch what is in memory, and has the system begin to fetch the rest. */
static void read_present(void *what, int64_t i, int64_t thread) {
    Reading *r = what;
    if (r->done[i]) return;
#ifdef RWF_NOWAIT
    struct iovec into = {r->to + r->places[i], r->lengths[i] < r->most ? r->lengths[i] : r->most};
    ssize_t got = preadv2(r->file, &into, 1, r->at[i], RWF_NOWAIT);
    if (got > 0) r->done[i] = got;
    if (got >= 0 || errno == EAGAIN) return;
#endif
#ifdef POSIX_FADV_WILLNEED
    posix_fadvise(r->file, r->at[i], r->lengths[i], POSIX_FADV_WILLNEED);
#endif
}

static void read_rest(void *what, int64_t i, int64_t thread) {
    Reading *r = what;
    while (r->done[i] < r->lengths[i]) {
        int64_t done = r->done[i], left = r->lengths[i] - done;
        char *to = r->to + r->places[i] + done;
        ssize_t got = pread(r->file, to, left < r->most ? left : r->most, r->at[i] + done);
        if (got <= 0) {
            r->failed = got ? errno : -1;
            return;
        }
        r->done[i] += got;
    }
}

/* Reads lengths[i] bytes from at[i] on to to + places[i], at most `most` at once, for each i.
`done` [count]: how many bytes of each are read, 0 at first, so that a call that was interrupted goes
on. Returns 0, an error's number, or -1 where the file ends before. */
int raydpfl_read(int file, int64_t count, const int64_t *at, const int64_t *lengths, char *to,
                 const int64_t *places, int64_t most, int64_t *done) {
    Reading r = {file, at, lengths, places, to, most, done, 0};
    int64_t whole = 0;
    share(count, read_present, &r);
    while (whole < count && done[whole] == lengths[whole]) whole++;
    if (whole < count) share(count, read_rest, &r);
    return r.failed;
}
