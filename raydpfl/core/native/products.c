/* Matrix products; the last arguments of a tile are constants. */

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
        float result[(R) * (S)];                                                                 \
        dots(a + r * a_width, b + s * b_width, a_width, b_width, k, result, R, S);               \
        UNROLL for (int i = 0; i < (R); i++)                                                    \
            memcpy(out + (r + i) * out_width + s, result + i * (S), (S) * sizeof(float));        \
    }

enum { FIVES = WIDE == 16, HELD = 1 << 17 }; /* HELD: floats that stay while others pass */

/* R rows of a with those of b from row `from` on, before `end`. Where the registers hold them,
fives come first if fours leave some. */
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
