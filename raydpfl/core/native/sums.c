/* Norms and exact sums of updates. */

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

/* The multiples of `step`, a power of two, to which what clients send is rounded, to even halfway,
and the largest size of a coordinate of theirs, of at most 2^51 steps. */
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
ADD_ROW(add_small_noisy, 0, 1, floats_anywhere, float)
ADD_ROW(add_any, 1, 0, floats_anywhere, float)
ADD_ROW(add_any_noisy, 1, 1, floats_anywhere, float)
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

/* Rows [k, d], and what is made of them. */
typedef struct {
    int64_t k, d;
    const void *rows;
    const double *factors, *noise;
    double *result;
    Grid grid;
    atomic_int *fits;
} Rows;

static void norm_piece32(void *what, int64_t place, int64_t thread) {
    const Rows *r = what;
    r->result[place] = norm32(r->d, (const float *)r->rows + place * r->d);
}

static void norm_piece64(void *what, int64_t place, int64_t thread) {
    const Rows *r = what;
    r->result[place] = norm64(r->d, (const double *)r->rows + place * r->d);
}

/* The L2 norms of rows [k, d]. */
void raydpfl_norms32(int64_t k, int64_t d, const float *rows, double *norms) {
    Rows r = {.d = d, .rows = rows, .result = norms};
    run_in_threads(k, norm_piece32, &r);
}

void raydpfl_norms64(int64_t k, int64_t d, const double *rows, double *norms) {
    Rows r = {.d = d, .rows = rows, .result = norms};
    run_in_threads(k, norm_piece64, &r);
}

static void add_piece(void *what, int64_t place, int64_t thread) {
    const Rows *r = what;
    int64_t last = (place + 1) * PIECE < r->d ? (place + 1) * PIECE : r->d;
    int fit = 1;
    for (int64_t from = place * PIECE; from < last; from += COLUMNS) {
        int64_t count = from + COLUMNS < last ? COLUMNS : last - from;
        double *total = r->result + from;
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
    run_in_threads((d + PIECE - 1) / PIECE, add_piece, &r);
    return fits;
}
