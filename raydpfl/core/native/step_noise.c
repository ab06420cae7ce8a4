/* Noise on steps; raydpfl/training/span_noise.py says what is drawn, and why. */

/* products that take as long as a normal, one in double, reading and writing a weight, and summing
the numbers of a vector */
enum { NORMAL = 50, EXACT = 3, MEMORY = 8, ACROSS = 56 };
static const double NEAR = 1e-6;  /* squared: the part of a row outside of the span of others */

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
next to one another than where its inputs do, whose products are summed across a vector. */
INLINE int lies_across(const Job *job) {
    int64_t o = job->outputs[0];
    return 2 * job->p * padded(o) < o * (2 * padded(job->p) + ACROSS);
}

/* Whether a client's first layer takes less time in the span of its rows, with the noise on its
steps, than by its weights. A correction of its gradients is not in that span. */
static int span_pays(const Job *job, const Client *client) {
    if (client->correction) return 0;
    int64_t n = client->n;
    int64_t o = job->outputs[0];
    int64_t steps = client->steps;
    int64_t numbers = first_numbers(job);
    int64_t products = n * n * (numbers / o) / 2;
    int64_t weights = steps * numbers * (2 * client->b + MEMORY);
    int64_t span = 2 * n * numbers + products + steps * n * client->b * o;
    if (job->noisy && client->std > 0) {
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
static void exact_kernel(const Job *job, Workspace *ws, const float *x, int64_t n) {
    int64_t width = padded(job->p);
    int64_t down = across(n);
    int64_t wide = padded(ws->most);
    double one = job->biases[0] < 0 ? 0 : 1;
    double *left = ws->left;
    int64_t r = 0;
#define EXACT_DOTS(R, S, same)                                                                  \
    exact_dots(left, x + s * width, width, ws->exact + r * down + s, down, R, S, same)
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
        double *k = ws->exact + r * down;
        float *rounded = ws->kernel + r * wide;
        memset(k, 0, r * sizeof(double));
        memset(k + n, 0, (down - n) * sizeof(double));
        for (int64_t s = r; s < n; s++) rounded[s] = k[s] += one;
    }
    mirror(ws->kernel, wide, n);
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
static int triangle(const Job *job, Workspace *ws, const float *x, int64_t n) {
    int64_t wide = padded(ws->most);
    int64_t down = across(n);
    for (int64_t s = 0; s < n; s++) {
        double *row = ws->exact + s * down;
        double left = row[s];
        if (!(left >= NEAR * ws->kernel[s * wide + s])) {
            if (!has_twin(x, padded(job->p), s)) return 0;
            left = 0;
        }
        scale(row + s, n - s, left == 0 ? 0 : 1 / sqrt(left));
        for (int64_t r = s + 1; r < n; r++)
            subtract(ws->exact + r * down + r, n - r, row[r], row + r);
        for (int64_t r = 0; r < n; r++) ws->upper[s * wide + r] = row[r];
    }
    return 1;
}

/* Whether the first layer is trained in the span of the rows `x`; their products, if it is. */
static int span_products(const Job *job, Workspace *ws, int64_t n, const float *x) {
    if (!ws->noisy) {
        row_products(job, ws, x, n);
        return 1;
    }
    exact_kernel(job, ws, x, n);
    return triangle(job, ws, x, n);
}

/* Puts down where the noise of a step is, for the layers that are trained by their weights;
`later`: that of those after the first. */
static void place_noise(const Job *job, Workspace *ws, const float *later) {
    for (int64_t l = ws->spanned; l < job->layers; l++) {
        Layer *layer = &ws->layer[l];
        layer->w_noise = ws->spanned ? later : ws->drawn + job->weights[l];
        later += job->outputs[l] * job->inputs[l];
        if (job->biases[l] < 0) continue;
        layer->b_noise = ws->spanned ? later : ws->drawn + job->biases[l];
        later += job->outputs[l];
    }
}

/* What the noise `weights` and `biases` on the first layer does to its outputs on the rows. */
static void noise_of_outputs(const Job *job, Workspace *ws, const float *x, int64_t n,
                             const float *weights, const float *biases) {
    int64_t o = padded(job->outputs[0]);
    int64_t width = padded(job->p);
    if (job->p % LANES) copy_rows(weights, job->outputs[0], job->p, ws->field);
    const float *field = job->p % LANES ? ws->field : weights;
    memset(ws->rest, 0, n * o * sizeof(float));
    multiply_rows(x, width, field, width, n, job->outputs[0], width, ws->rest, o, 0);
    for (int64_t r = 0; r < n && job->biases[0] >= 0; r++)
        add_scaled(ws->rest + r * o, job->outputs[0], biases, 1);
}

/* Draws B, the sum of c_t z_t over all steps, to where the first layer's update is to be, and finds
what it does to the outputs on the rows. */
static void draw_whole(const Job *job, Workspace *ws, const Client *client, const float *x,
                       double length, float *update) {
    int64_t weights = job->outputs[0] * job->p;
    int64_t bias = job->biases[0];
    int whole = bias < 0 || bias == job->weights[0] + weights; /* one run of parameters */
    float *to = whole ? update + job->weights[0] : ws->drawn;
    draw(job, client, client->steps, first_numbers(job), client->std * length, to);
    if (!whole) {
        memcpy(update + job->weights[0], to, weights * sizeof(float));
        memcpy(update + bias, to + weights, job->outputs[0] * sizeof(float));
    }
    noise_of_outputs(job, ws, x, client->n, to, to + weights);
}

static void begin_noise(const Job *job, Workspace *ws, const Client *client, const float *x,
                        const double *lengths, float *update) {
    for (int64_t l = 0; l < job->layers; l++)
        ws->layer[l].w_noise = ws->layer[l].b_noise = NULL;
    if (ws->spanned && ws->noisy) draw_whole(job, ws, client, x, *lengths, update);
}

/* Draws the a_t of `along` steps from the k-th on, [n][along][outputs], and what the layers after
the first have of each of `count`; finds L a_t. */
static void draw_along(const Job *job, Workspace *ws, const Client *client, int64_t k,
                       int64_t along, int64_t count) {
    int64_t n = client->n;
    int64_t later = job->d - first_numbers(job);
    int64_t wide = padded(ws->most);
    int64_t run = along * job->outputs[0];
    int64_t width = padded(run);
    draw(job, client, k, n * run + count * later, client->std, ws->drawn);
    for (int64_t r = 0; r < n; r += 5) {
        int64_t end = r + 5 < n ? r + 5 : n;
        multiply(ws->upper + r, 1, wide, ws->drawn, run, end - r, end, width, 0, 1,
                 ws->seen + r * width, width);
    }
}

/* Adds to the outputs on the rows `step` times what a step's noise does to them, X z_t: of what the
rest of the noise does, the part `share`, and `scale` L a_t. Takes `response` times it from the
rest. */
static void add_step_noise(const Workspace *ws, float *moved, int64_t n, int64_t outputs,
                           float step, float response) {
    int64_t o = padded(outputs);
    for (int64_t c = 0; c < o; c += LANES) {
        const float *seen = ws->step_seen + c;
        float *left = ws->rest + c;
        float *to = moved + c;
        int64_t width = ws->step_width;
        v16 share = all(ws->share), scale = all(ws->scale);
        v16 steps = all(step), taken = all(-response);
        bits mask[PARTS];
        EACH mask[i] = places(i, outputs - c) < 0;
        for (int64_t r = 0; r < n; r++, seen += width, left += o, to += o) {
            v16 noise = load(seen), rest = load(left);
            EACH noise.p[i] = (part)((bits)noise.p[i] & mask[i]);
            EACH noise.p[i] *= scale.p[i];
            noise = fma16(rest, share, noise);
            store(left, fma16(noise, taken, rest));
            store(to, fma16(noise, steps, load(to)));
        }
    }
}

/* Draws step k's noise; in the span that of several steps together, but of the last one, for which
the others leave what they leave. */
static void noise_step(const Job *job, Workspace *ws, const Client *client, int64_t k,
                       const float *responses, const double *lengths) {
    if (!ws->spanned) {
        draw(job, client, k, job->d, client->std, ws->drawn);
        place_noise(job, ws, NULL);
        return;
    }
    int64_t outputs = job->outputs[0];
    int64_t later = job->d - first_numbers(job);
    int64_t most = TOGETHER / (client->n * outputs + later);
    int64_t nth = most > 1 ? k % most : 0;
    int64_t count = client->steps - k + nth;
    if (most < count) count = most > 1 ? most : 1;
    int64_t along = k - nth + count < client->steps ? count : count - 1;
    if (nth == 0) draw_along(job, ws, client, k, along, count);
    double length = lengths[k];
    ws->share = length > 0 ? responses[k] / (length * length) : 0;
    ws->scale = length > 0 ? lengths[k + 1] / length : 0;
    ws->step_seen = nth < along ? ws->seen + nth * outputs : ws->rest; /* `scale` is 0 */
    ws->step_width = nth < along ? padded(along * outputs) : padded(outputs);
    place_noise(job, ws, ws->drawn + client->n * along * outputs + nth * later);
}
