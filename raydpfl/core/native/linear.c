/* A client of a stack of linear layers: its memory, forward and backward pass, clipping. */

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
    int64_t noisy;  /* 1: steps are noisy, by normals of this key and round */
    uint64_t seed, purpose, round;
    float keep, step, decay, proximal, momentum, lr; /* raydpfl.training.backends.fused */
    float clip; /* the bound on a sample's gradient; 0: none */
} Job;

/* The state of a client. */
typedef struct {
    const float *x;       /* [n][p] */
    const void *y;        /* [n], or [n][outputs] for squares */
    const int64_t *index; /* [steps][batch] */
    int64_t n, b, steps;
    float gamma, std; /* of the noise on a step; 0: none */
    uint64_t id, draw;
    const float *correction; /* [d], added to every gradient; NULL: none */
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
    int noisy, spanned;                 /* of the client in training */
    const float *correction;            /* likewise */
    int across; /* its first layer's weight and velocity are [inputs][padded outputs] */
} Workspace;

enum { MOST = 64, TOGETHER = 1 << 13 }; /* layers; normals of steps that are drawn together */

INLINE int64_t first_numbers(const Job *job) {
    return job->outputs[0] * (job->p + (job->biases[0] < 0 ? 0 : 1));
}

/* Floats of a layer's weight, whichever way it lies. */
INLINE int64_t weight_size(const Job *job, int64_t l) {
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

/* Cuts memory, if there is some, into a ws; returns how many floats that takes. */
static int64_t lay_out(const Job *job, Workspace *ws, float *memory) {
    int64_t used = 0;
    int64_t n = ws->most;
    int64_t o = padded(job->outputs[0]);
    int64_t later = job->d - first_numbers(job);
#define PART(place, count)                                                                      \
    {                                                                                           \
        int64_t size = padded(count);                                                           \
        if (memory) (place) = (void *)(memory + used);                                          \
        used += size;                                                                           \
    }
    PART(ws->rows, job->p % LANES ? n * padded(job->p) : 0);
    PART(ws->taken, job->batch * padded(job->p));
    PART(ws->z, n * o);
    PART(ws->z_first, job->proximal != 0 ? n * o : 0);
    PART(ws->z_speed, job->momentum != 0 ? n * o : 0);
    PART(ws->coef, n * o);
    PART(ws->kernel, n * padded(n));
    PART(ws->some, job->batch * padded(n));
    PART(ws->turned, LANES * padded(n));
    PART(ws->scratch, widest(job));
    if (job->noisy) {
        int64_t most = n * job->outputs[0] + later;
        if (most < TOGETHER) most = TOGETHER;
        PART(ws->drawn, (most > job->d ? most : job->d) + 1 + LANES);
        PART(ws->field, job->p % LANES ? job->outputs[0] * padded(job->p) : 0);
        PART(ws->seen, most + n * o + LANES);
        PART(ws->rest, n * o);
        PART(ws->upper, n * padded(n));
        PART(ws->exact, 2 * n * across(n));
        PART(ws->left, n ? 2 * SIDE * padded(job->p) : 0);
    }
    for (int64_t l = 0; l < job->layers; l++) {
        Layer *layer = &ws->layer[l];
        int64_t out = padded(job->outputs[l]);
        int64_t weights = weight_size(job, l);
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
    float result = sum_of(total);
    float scale = share / result;
    for (int64_t c = 0; c < width; c += LANES)
        store(g + c, fma16(load(g + c), all(scale), only(y - c, -share)));
    *sum = result;
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

/* Blocks are added up in float64: float32 would lose what is small beside the sum. */
INLINE float squares_of(const float *a, int64_t width) {
    double total = 0;
    for (int64_t c = 0; c < width;) {
        int64_t end = c + 16 * LANES < width ? c + 16 * LANES : width;
        v16 block = all(0);
        for (; c < end; c += LANES) {
            v16 v = load(a + c);
            block = fma16(v, v, block);
        }
        total += sum_of(block);
    }
    return total;
}

/* The products of the rows with one another, with those of their ones. */
static void row_products(const Job *job, Workspace *ws, const float *x, int64_t rows) {
    int64_t width = padded(job->p);
    int64_t wide = padded(ws->most);
    float one = job->biases[0] < 0 ? 0 : 1;
    multiply_rows(x, width, x, width, rows, rows, width, ws->kernel, wide, 1);
    for (int64_t r = 0; r < rows; r++) {
        if (job->clip > 0) ws->kernel[r * wide + r] = squares_of(x + r * width, width);
        for (int64_t s = r; s < rows; s++) ws->kernel[r * wide + s] += one;
    }
    mirror(ws->kernel, wide, rows);
}

static void begin_span(const Job *job, Workspace *ws, const float *x, int64_t rows) {
    int64_t width = padded(job->p);
    int64_t o = padded(job->outputs[0]);
    multiply(x, width, 1, job->columns, o, rows, job->p, o, 0, 1, ws->z, o);
    for (int64_t r = 0; r < rows; r++)
        scale_add(ws->z + r * o, o, 1, job->columns + job->p * o, 1);
    memset(ws->coef, 0, rows * o * sizeof(float));
    if (job->proximal != 0) memcpy(ws->z_first, ws->z, rows * o * sizeof(float));
    if (job->momentum != 0) memset(ws->z_speed, 0, rows * o * sizeof(float));
}

/* The weights of the layers that are trained by them. */
static void begin_layers(const Job *job, Workspace *ws) {
    for (int64_t l = ws->spanned; l < job->layers; l++) {
        Layer *layer = &ws->layer[l];
        int64_t out = job->outputs[l];
        int64_t weights = weight_size(job, l);
        if (l == 0 && ws->across)
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
static void copy_batch(const Job *job, Workspace *ws, const Client *client, int64_t k) {
    const int64_t *rows = client->index + k * job->batch;
    if (k && in_order(rows, client->b) && in_order(rows - job->batch, client->b)) return;
    for (int64_t j = 0; j < client->b; j++) {
        copy_rows(client->x + rows[j] * job->p, 1, job->p, ws->taken + j * padded(job->p));
        if (k + 1 == client->steps) continue;
        const float *next = client->x + rows[job->batch + j] * job->p;
        for (int64_t i = 0; i < job->p; i += LANES) __builtin_prefetch(next + i, 0, 2);
    }
}

/* The input of a layer: [b][padded inputs]. */
INLINE const float *inputs_of(const Workspace *ws, int64_t l) {
    return l ? ws->layer[l - 1].a : ws->taken;
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
static void forward(const Job *job, Workspace *ws, const int64_t *rows, int64_t b) {
    for (int64_t l = 0; l < job->layers; l++) {
        Layer *layer = &ws->layer[l];
        int64_t o = padded(job->outputs[l]);
        if (l == 0 && ws->spanned) {
            for (int64_t j = 0; j < b; j++)
                copy(ws->z + rows[j] * o, o, layer->a + j * o);
        } else {
            int64_t width = padded(job->inputs[l]);
            if (l == 0 && ws->across) {
                multiply(ws->taken, width, 1, layer->weight, o, b, job->p, o, 0, 1, layer->a, o);
            } else {
                memset(layer->a, 0, b * o * sizeof(float));
                multiply_rows(inputs_of(ws, l), width, layer->weight, width, b, job->outputs[l],
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
static double backward(const Job *job, Workspace *ws, const int64_t *rows, int64_t b,
                       const void *y) {
    int64_t last = job->layers - 1;
    Layer *top = &ws->layer[last];
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
        Layer *layer = &ws->layer[l];
        int64_t width = padded(job->outputs[l]);
        if (l < last) {
            Layer *next = &ws->layer[l + 1];
            multiply(next->g, padded(job->outputs[l + 1]), 1, next->weight, width, b,
                     job->outputs[l + 1], width, 0, 1, layer->g, width);
        }
#define DERIVE(kind) derive_by(layer->a, layer->g, b * width, kind)
        BY_KIND(job->activations[l], DERIVE)
    }
    return job->clip > 0 ? loss / b : loss;
}

static const float LOST = 0x1p-126f; /* at most, by the square of a float that underflows */

/* Scales the gradients of each sample to the bound, and by its share of the mean; how many were
longer. The squared norm of a sample's is the sum over the layers of (|a|^2 + 1) |g|^2, both with
what underflow may have taken: the other may be large. */
static int64_t clip_samples(const Job *job, Workspace *ws, const int64_t *rows, int64_t b) {
    int64_t wide = padded(ws->most);
    int64_t longer = 0;
    for (int64_t j = 0; j < b; j++) {
        float square = 0;
        for (int64_t l = 0; l < job->layers; l++) {
            int64_t o = padded(job->outputs[l]);
            float inputs = job->biases[l] < 0 ? 0 : 1;
            int64_t width = padded(job->inputs[l]);
            if (l == 0 && ws->spanned)
                inputs = ws->kernel[rows[j] * wide + rows[j]];
            else
                inputs += squares_of(inputs_of(ws, l) + j * width, width);
            inputs += LOST * width;
            square += inputs * (squares_of(ws->layer[l].g + j * o, o) + LOST * o);
        }
        float norm = sqrtf(square);
        float factor = job->clip / norm;
        factor = (factor > 1 ? 1 : factor) + norm * 0; /* NaN for a norm that is not finite */
        longer += factor < 1;
        factor *= 1.0f / b;
        for (int64_t l = 0; l < job->layers; l++) {
            int64_t o = padded(job->outputs[l]);
            float *g = ws->layer[l].g + j * o;
            for (int64_t c = 0; c < o; c += LANES) store(g + c, times(load(g + c), factor));
        }
    }
    return longer;
}
