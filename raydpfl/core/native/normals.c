/* Keyed normals: ChaCha with 8 rounds, transformed by Box and Muller. */

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
    lanes start[16], block[16];
} Cipher;

static void begin_cipher(Cipher *cipher, const uint64_t name[5], uint64_t first) {
    const uint64_t state[8] = {0x3320646E61707865u, 0x6B20657479622D32u, name[0], name[1],
                               name[2],             name[3],             first,   name[4]};
    lanes *w = cipher->block;
    for (int i = 0; i < 16; i++)
        w[i] = cipher->start[i] = (lanes){} + (uint32_t)(state[i / 2] >> (i % 2 * 32));
    UNROLL for (int i = 1; i < 4; i++) COLUMN(w, i);
}

/* The blocks from `first` on, one a lane: word i of all of them to words[i]. */
INLINE void chacha(const Cipher *cipher, uint64_t first, lanes words[16]) {
    lanes *w = words;
    UNROLL for (int i = 0; i < 16; i++) w[i] = cipher->block[i];
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

/* (word & mask) | set, and a ^ (b & mask). */
INLINE bits masked_or(bits word, int32_t mask, int32_t set) {
#if WIDE == 16
    return (bits)_mm512_ternarylogic_epi32((__m512i)word, _mm512_set1_epi32(mask),
                                           _mm512_set1_epi32(set), 0xEA);
#else
    return (word & mask) | set;
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
    EVERY s[i] = __builtin_convertvector(masked_or(high[i], 0x7FFFFC00, 0x200), part);
    EVERY v[i] = __builtin_convertvector(masked_or(high[i], 0x3FE, 1), part);
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
