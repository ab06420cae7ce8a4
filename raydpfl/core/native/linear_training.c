/* The steps of a client of a stack of linear layers, and its update. */

/* moved [n][LANES] = keep moved + step `some`^T g, as `multiply` has it, but along the rows: where
outputs are fewer than lanes, that takes fewer products. */
static void step_across(const Job *job, Workspace *ws, const float *some, int64_t b, int64_t n,
                        float *moved) {
    int64_t width = padded(n);
    multiply(ws->layer[0].g, 1, LANES, some, padded(ws->most), job->outputs[0], b, width, 0,
             job->step, ws->turned, width);
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < job->outputs[0]; c++) {
            float *to = moved + r * LANES + c;
            float step = ws->turned[c * width + r];
            *to = job->keep == 0 ? step : fmaf(*to, job->keep, step);
        }
}

static void step_span(const Job *job, Workspace *ws, const int64_t *rows, int64_t b, int64_t n,
                      float response) {
    int64_t o = padded(job->outputs[0]);
    const float *g = ws->layer[0].g;
    float *moved = job->momentum != 0 ? ws->z_speed : ws->z;
    int64_t wide = padded(ws->most);
    const float *some = ws->kernel; /* of all rows in their order */
    int ordered = in_order(rows, b);
    if (!ordered) {
        for (int64_t j = 0; j < b; j++)
            copy(ws->kernel + rows[j] * wide, padded(n), ws->some + j * wide);
        some = ws->some;
    }
    if (o == LANES && 4 * padded(n) * job->outputs[0] < 3 * n * LANES)
        step_across(job, ws, some, b, n, moved);
    else /* equal to its transpose where all rows are in their order */
        multiply(some, ordered ? wide : 1, ordered ? 1 : wide, g, o, n, b, o, job->keep, job->step,
                 moved, o);
    if (ws->noisy)
        add_step_noise(ws, moved, n, job->outputs[0], job->step, response);
    finish_step(job, ws->z, ws->z_speed, ws->z_first, n * o);
    for (int64_t j = 0; j < b; j++)
        scale_add(ws->coef + rows[j] * o, o, 1, g + j * o, response);
}

/* The step of a first layer whose weight lies across. */
static void step_weight_across(const Job *job, Workspace *ws, int64_t b) {
    Layer *layer = ws->layer;
    int64_t o = padded(job->outputs[0]);
    float *moved = job->momentum != 0 ? layer->w_speed : layer->weight;
    multiply(ws->taken, 1, padded(job->p), layer->g, o, job->p, b, o, job->keep, job->step, moved,
             o);
    finish_step(job, layer->weight, layer->w_speed, job->columns, job->p * o);
}

static void step_weight(const Job *job, Workspace *ws, int64_t l, int64_t b) {
    Layer *layer = &ws->layer[l];
    int64_t width = padded(job->inputs[l]);
    int64_t o = padded(job->outputs[l]);
    int64_t out = job->outputs[l];
    float *moved = job->momentum != 0 ? layer->w_speed : layer->weight;
    multiply(layer->g, 1, o, inputs_of(ws, l), width, out, b, width, job->keep, job->step, moved,
             width);
    for (int64_t c = 0; c < out; c++) {
        const float *first = job->model + job->weights[l] + c * job->inputs[l];
        if (job->proximal != 0) {
            copy_rows(first, 1, job->inputs[l], ws->scratch);
            first = ws->scratch;
        }
        if (layer->w_noise)
            add_scaled(moved + c * width, job->inputs[l], layer->w_noise + c * job->inputs[l],
                       job->step);
        if (ws->correction)
            add_scaled(moved + c * width, job->inputs[l],
                       ws->correction + job->weights[l] + c * job->inputs[l], job->step);
        finish_step(job, layer->weight + c * width, layer->w_speed + c * width, first, width);
    }
}

static void step_layer(const Job *job, Workspace *ws, int64_t l, int64_t b) {
    Layer *layer = &ws->layer[l];
    int64_t o = padded(job->outputs[l]);
    int64_t out = job->outputs[l];
    if (l == 0 && ws->across)
        step_weight_across(job, ws, b);
    else
        step_weight(job, ws, l, b);
    if (job->biases[l] < 0) return;
    float *bias = job->momentum != 0 ? layer->b_speed : layer->bias;
    memset(ws->scratch, 0, o * sizeof(float));
    for (int64_t j = 0; j < b; j++) scale_add(ws->scratch, o, 1, layer->g + j * o, 1);
    scale_add(bias, o, job->keep, ws->scratch, job->step);
    if (layer->b_noise) add_scaled(bias, out, layer->b_noise, job->step);
    if (ws->correction) add_scaled(bias, out, ws->correction + job->biases[l], job->step);
    if (job->proximal != 0) copy_rows(job->model + job->biases[l], 1, out, ws->scratch);
    finish_step(job, layer->bias, layer->b_speed, ws->scratch, o);
}

/* The first layer's update, which begins with the noise where there is some. */
static void write_span(const Job *job, Workspace *ws, const float *x, int64_t n, float gamma,
                       float *update) {
    int64_t width = padded(job->p);
    int64_t o = padded(job->outputs[0]);
    int64_t whole = job->p / LANES * LANES;
    int64_t numbers = job->outputs[0] * job->p;
    float shrunk = gamma - 1;
    float *to = update + job->weights[0];
    const float *model = job->model + job->weights[0];
    multiply(ws->coef, 1, o, x, width, job->outputs[0], n, whole, ws->noisy, 1, to, job->p);
    for (int64_t c = 0; c < job->outputs[0] && whole < job->p; c++) {
        float *end = to + c * job->p + whole;
        v16 tail = all(0);
        for (int64_t r = 0; r < n; r++)
            tail = fma16(load(x + r * width + whole), all(ws->coef[r * o + c]), tail);
        float last[LANES];
        store(last, tail);
        for (int64_t i = 0; i < job->p - whole; i++)
            end[i] = ws->noisy ? end[i] + last[i] : last[i];
    }
    if (shrunk != 0) add_scaled(to, numbers, model, shrunk);
    if (job->biases[0] < 0) return;
    for (int64_t c = 0; c < job->outputs[0]; c++) {
        float sum = ws->noisy ? update[job->biases[0] + c] : 0;
        for (int64_t r = 0; r < n; r++) sum += ws->coef[r * o + c];
        update[job->biases[0] + c] = fmaf(job->model[job->biases[0] + c], shrunk, sum);
    }
}

/* The update of a first layer's weight that lies across. */
static void write_across(const Job *job, const Workspace *ws, float *update) {
    const float *weight = ws->layer[0].weight;
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

static void write_weight(const Job *job, const Workspace *ws, int64_t l, float *update) {
    int64_t width = padded(job->inputs[l]);
    for (int64_t c = 0; c < job->outputs[l]; c++) {
        int64_t at = job->weights[l] + c * job->inputs[l];
        subtract_floats(ws->layer[l].weight + c * width, job->model + at, job->inputs[l],
                        update + at);
    }
}

static void write_layers(const Job *job, const Workspace *ws, float *update) {
    for (int64_t l = ws->spanned; l < job->layers; l++) {
        const Layer *layer = &ws->layer[l];
        if (l == 0 && ws->across)
            write_across(job, ws, update);
        else
            write_weight(job, ws, l, update);
        if (job->biases[l] >= 0)
            subtract_floats(layer->bias, job->model + job->biases[l], job->outputs[l],
                            update + job->biases[l]);
    }
}

/* The mean over the steps of the batches' losses; to `clipped` the share of its samples and steps
with a gradient longer than the bound. */
static double train_one(const Job *job, Workspace *ws, const Client *client, float *update,
                        double *clipped) {
    const float *x = client->x;
    ws->noisy = job->noisy && client->std > 0;
    ws->spanned = span_pays(job, client);
    if (ws->spanned && job->p % LANES) {
        copy_rows(x, client->n, job->p, ws->rows);
        x = ws->rows;
    }
    if (ws->spanned) begin_span(job, ws, x, client->n);
    ws->spanned = ws->spanned && span_products(job, ws, client->n, x);
    ws->correction = client->correction;
    ws->across = !ws->spanned && !ws->noisy && !ws->correction && lies_across(job);
    begin_layers(job, ws);
    const float *responses = job->responses + job->steps - client->steps;
    const double *lengths = job->lengths + job->steps - client->steps;
    begin_noise(job, ws, client, x, lengths, update);
    double loss = 0;
    int64_t longer = 0;
    for (int64_t k = 0; k < client->steps; k++) {
        const int64_t *rows = client->index + k * job->batch;
        if (!ws->spanned) copy_batch(job, ws, client, k);
        forward(job, ws, rows, client->b);
        loss += backward(job, ws, rows, client->b, client->y);
        if (job->clip > 0) longer += clip_samples(job, ws, rows, client->b);
        if (ws->noisy) noise_step(job, ws, client, k, responses, lengths);
        for (int64_t l = job->layers - 1; l >= ws->spanned; l--)
            step_layer(job, ws, l, client->b);
        if (ws->spanned) step_span(job, ws, rows, client->b, client->n, responses[k]);
    }
    if (ws->spanned) write_span(job, ws, x, client->n, client->gamma, update);
    write_layers(job, ws, update);
    if (clipped) *clipped = (double)longer / (client->steps * client->b);
    return loss / client->steps;
}
