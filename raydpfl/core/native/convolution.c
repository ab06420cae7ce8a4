/* Convolutions that are max-pooled, and their gradients sample by sample. */

/* raydpfl/training/layers/pooled_convolution.py fills it. Images have their channels last; they
are padded in here. A cell is an output of the pooling. A sample's gradient by a channel's filter
is the sum, over its cells, of g times the patch of the image at the output that the cell takes its
maximum from. */
typedef struct {
    int64_t samples, channels;
    int64_t input[2];      /* of an image that is not padded: rows, and numbers of one */
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
                float result[LANES];
                store(result, most);
                memcpy(to, result, left * sizeof(float));
                memcpy(at, places, left * sizeof(int32_t));
            }
        }
    }
}

/* Of `input` [samples][input]: to `images` [samples][image] the padded ones, and the maxima of the
outputs, and where the patches of these begin in their image, both [samples][cells][channels];
`weights` [channels][rows][run], `bias` [channels] or NULL. 0: done; 1: no memory. */
int raydpfl_maxima(const Filters *f, const float *input, float *images, const float *weights,
                   const float *bias, float *maxima, int32_t *where) {
    int64_t wide = padded(f->channels);
    int64_t numbers = f->rows * f->run;
    int64_t outputs = f->outputs[0] * f->outputs[1];
    float *buffer = aligned_alloc(64, (numbers + 1 + outputs) * wide * sizeof(float));
    if (!buffer) return 1;
    float *last = buffer + numbers * wide;
    float *z = last + wide;
    memset(buffer, 0, (numbers + 1) * wide * sizeof(float));
    for (int64_t c = 0; c < f->channels; c++)
        for (int64_t j = 0; j < numbers; j++) buffer[j * wide + c] = weights[c * numbers + j];
    if (bias) memcpy(last, bias, f->channels * sizeof(float));
    for (int64_t s = 0; s < f->samples; s++) {
        int64_t at = s * cells_of(f) * f->channels;
        float *image = images + s * f->image;
        memset(image, 0, f->image * sizeof(float));
        for (int64_t r = 0; r < f->input[0]; r++, input += f->input[1])
            memcpy(image + f->inside + r * f->row, input, f->input[1] * sizeof(float));
        convolve(f, image, buffer, last, wide, z);
        for (int64_t c = 0; c < wide; c += LANES) pool(f, z, wide, c, maxima + at, where + at);
    }
    free(buffer);
    return 0;
}

INLINE int64_t cells_size(const Filters *f) { return padded(f->channels * (cells_of(f) + 1)) * 4; }

/* `memory` has `cells_size` floats. */
INLINE Cells cells_in(const Filters *f, float *memory) {
    int64_t numbers = padded(f->channels * cells_of(f));
    return (Cells){(int64_t *)(memory + 2 * numbers), memory, (int32_t *)(memory + numbers)};
}

/* Those of a sample, from `g` and `where` [cells][channels]. */
static void collect_cells(const Filters *f, const float *g, const int32_t *where, Cells *result) {
    int64_t cells = cells_of(f);
    memset(result->counts, 0, f->channels * sizeof(int64_t));
    for (int64_t i = 0; i < cells; i++, g += f->channels, where += f->channels)
        for (int64_t c = 0; c < f->channels; c++) {
            int64_t at = c * cells + result->counts[c];
            result->values[at] = g[c];
            result->places[at] = where[c];
            result->counts[c] += g[c] != 0;
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
    float *sums = aligned_alloc(64, (floats + cells_size(f)) * sizeof(float));
    if (!sums) return 1;
    Cells cells = cells_in(f, sums + floats);
    memset(sums, 0, floats * sizeof(float));
    for (int64_t s = 0; s < f->samples; s++) {
        double square = 0;
        collect_cells(f, g + s * step, where + s * step, &cells);
        for (int64_t c = 0; c < f->channels; c++) {
            float *buffer = squares ? sums : sums + c * size;
            add_filter(f, &cells, c, images + s * f->image, factors ? factors[s] : 1, buffer);
            if (!squares) continue;
            for (int64_t r = 0; r < f->rows; r++) {
                memset(buffer + r * width + f->run, 0, (width - f->run) * sizeof(float));
                square += squares_of(buffer + r * width, width);
            }
            memset(buffer, 0, size * sizeof(float));
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
    v16 buffer[25];
    UNROLL for (int i = 0; i < R * V; i++) buffer[i] = load(weight + i / V * width + i % V * LANES);
    for (int64_t i = 0; i < count; i++) {
        v16 value = all(values[i]);
        float *to = image + places[i];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) {
                float *part = to + r * row + v * LANES;
                store(part, fma16(buffer[r * V + v], value, load(part)));
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

/* The gradient by the images, `result` [samples][input], from `weights` [channels][rows][run]. 0:
done; 1: no memory. */
int raydpfl_by_images(const Filters *f, const float *g, const int32_t *where, const float *weights,
                      float *result) {
    int64_t size = f->rows * padded(f->run);
    int64_t step = f->channels * cells_of(f);
    int64_t floats = f->channels * size + padded(f->image);
    float *buffer = aligned_alloc(64, (floats + cells_size(f)) * sizeof(float));
    if (!buffer) return 1;
    float *image = buffer + f->channels * size;
    Cells cells = cells_in(f, buffer + floats);
    copy_rows(weights, f->channels * f->rows, f->run, buffer);
    for (int64_t s = 0; s < f->samples; s++) {
        memset(image, 0, f->image * sizeof(float));
        collect_cells(f, g + s * step, where + s * step, &cells);
        for (int64_t c = 0; c < f->channels; c++) add_image(f, &cells, c, buffer + c * size, image);
        for (int64_t r = 0; r < f->input[0]; r++, result += f->input[1])
            memcpy(result, image + f->inside + r * f->row, f->input[1] * sizeof(float));
    }
    free(buffer);
    return 0;
}
