/* Keyed random words (Philox), and the batches that they shuffle. */

/* Streams, and how much of them is taken: see raydpfl_shuffled. */
typedef struct {
    uint64_t key[2], round;
    const uint64_t *clients, *draws;
    const int64_t *steps, *sizes;
    int64_t most, width;
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

enum { RANKED = 128 }; /* rows of a client */

/* Streams, and the batches [k][steps][width] that their words shuffle. */
typedef struct {
    Streams s;
    const int64_t *places, *batches;
    int64_t rows, *index;
} Shuffled;

/* `counts`, and one more where `values` is larger than `other`. */
INLINE longs one_more(longs counts, longs values, int64_t other) {
#if WIDE == 16
    __mmask8 more = _mm512_cmpgt_epi64_mask((__m512i)values, _mm512_set1_epi64(other));
    const __m512i one = _mm512_set1_epi64(1);
    return (longs)_mm512_mask_add_epi64((__m512i)counts, more, (__m512i)counts, one);
#else
    return counts - (longs)(values > other);
#endif
}

/* The first `batch` of n rows in the order of their words, of which the row's number takes the low
24 bits. Every other row counts as one before those with larger words. */
static void rank(int64_t n, int64_t batch, const uint64_t *words, int64_t *result) {
    int64_t keys[RANKED], ranks[RANKED], rows[RANKED];
    for (int64_t i = 0; i < n; i++)
        keys[i] = (int64_t)((words[i] & ~(uint64_t)0xFFFFFF | i) ^ (1ull << 63));
    for (int64_t i = n; i % NUMBERS; i++) keys[i] = 0;
    for (int64_t i = 0; i < n; i += NUMBERS) {
        longs values = *(const longs_anywhere *)(keys + i), before = {};
        for (int64_t other = 0; other < n; other++) before = one_more(before, values, keys[other]);
        *(longs_anywhere *)(ranks + i) = before;
    }
    for (int64_t i = 0; i < n; i++) rows[ranks[i]] = i;
    memcpy(result, rows, batch * sizeof *result);
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

/* For each of k clients, of RANKED rows at most, batches of so many of its `sizes[i]` rows,
shuffled by keyed words; `index` [C][rows][width], of which places[i] is the client's part; its
batches fill the first `most` rows, and those beyond its steps have the rows in their order. */
void raydpfl_shuffled(int64_t k, uint64_t seed, uint64_t purpose, uint64_t round,
                      const uint64_t *clients, const uint64_t *draws, const int64_t *steps,
                      const int64_t *sizes, const int64_t *places, const int64_t *batches,
                      int64_t most, int64_t rows, int64_t width, int64_t *index) {
    Streams s = {{seed, purpose}, round, clients, draws, steps, sizes, most, width};
    Shuffled r = {s, places, batches, rows, index};
    run_in_threads(k, shuffle_rows, &r);
}
