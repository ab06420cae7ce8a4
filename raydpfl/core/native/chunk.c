/* Training of the clients of a chunk in threads, and the sum of their updates. */

/* What is added up as it is trained; raydpfl/training/backends/compiled.py fills it. Of each
client its update times its factor and its weight, and normals of this std, on the grid, are added
to a vector of the thread. An update of norm n has the factor 1 up to `most`, else above (1 /
(offset + n)), or 0 where that divides by 0; one that is not finite counts as 0. */
typedef struct {
    double most, above, offset;
    Grid grid;
    double std;                     /* 0: no normals */
    uint64_t seed, purpose, round;  /* of the normals */
    const uint64_t *clients, *draws; /* [C], likewise */
    const double *weights;          /* [C] */
    double *factors;                /* [C] */
    double *result;                  /* [threads][padded(d)] */
    int64_t threads;
    atomic_llong fits;              /* whether all were small enough for the grid */
} Sum;

static double factor_of(const Sum *sum, double norm) {
    if (norm <= sum->most) return 1;
    double by = sum->offset + norm;
    return by > 0 ? sum->above * (1 / by) : 0;
}

/* Clients of a chunk in training. Of all C: `x` [C, n, p], `y` [C, n], int64, or float32 [C, n,
outputs] for squares; `sizes` [C], `index` [C, steps, batch], `batches`, `steps` and `gammas` [C];
of noise `stds`, `clients` and `draws` [C]; `corrections` [C, d] and `clipped` [C], inputs, or NULL.
Of those to train: `slots` [count], and where to write their `updates` [count][d], `losses`, `norms`
and whether they are `done` [count]; with `sum`, their updates are added to it in place of that. */
typedef struct {
    const Job *job;
    int64_t count;
    const int64_t *slots;
    const float *x;
    const char *y;
    const int64_t *sizes, *index, *batches, *steps;
    const float *gammas, *stds;
    const uint64_t *clients, *draws;
    const float *corrections;
    double *clipped;
    float **updates;
    double *losses, *norms;
    atomic_uchar *done;
    Sum *sum;    /* or NULL */
    Workspace *workspaces; /* of each thread */
    Layer *layers;
    float *memory;
    int64_t trained; /* the first so many */
    int shared;      /* with the thread pool */
    float *updates_here; /* of a sum: of each thread one, padded(d), and as many normals */
} Chunk;

static Client client_at(const Chunk *chunk, int64_t place) {
    const Job *job = chunk->job;
    int64_t slot = chunk->slots[place];
    int64_t width = job->squares ? 4 * job->outputs[job->layers - 1] : 8; /* bytes of a target */
    Client client = {
        .x = chunk->x + slot * job->n * job->p,
        .y = chunk->y + slot * job->n * width,
        .index = chunk->index + slot * job->steps * job->batch,
        .n = chunk->sizes[slot],
        .b = chunk->batches[slot],
        .steps = chunk->steps[slot],
        .gamma = chunk->gammas[slot],
        .correction = chunk->corrections ? chunk->corrections + slot * job->d : NULL,
    };
    if (job->noisy) {
        client.std = chunk->stds[slot];
        client.id = chunk->clients[slot];
        client.draw = chunk->draws[slot];
    }
    return client;
}

static const double FARTHEST = 8; /* no normal is as large */

/* Adds the update of a client that is trained; its normals are written after it. Where its norm
says that all of it fits, it is not looked at. */
static void add_client(const Chunk *chunk, int64_t place, float *update, double *total) {
    Sum *sum = chunk->sum;
    int64_t d = chunk->job->d, slot = chunk->slots[place];
    double norm = chunk->norms[place];
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
        add_small_noisy(d, update, 0, factor, noise, std, grid, total);
    else if (fit)
        add_small(d, update, 0, factor, NULL, 0, grid, total);
    else if (std > 0)
        fit = add_any_noisy(d, update, 0, factor, noise, std, grid, total);
    else
        fit = add_any(d, update, 0, factor, NULL, 0, grid, total);
    if (!fit) atomic_store(&sum->fits, 0);
}

static void train_slot(void *what, int64_t place, int64_t thread) {
    Chunk *chunk = what;
    const Job *job = chunk->job;
    Client client = client_at(chunk, place);
    int64_t d = job->d;
    float *update = chunk->updates_here + 2 * padded(d) * thread;
    if (!chunk->sum) update = chunk->updates[place];
    double *clipped = chunk->clipped ? chunk->clipped + chunk->slots[place] : NULL;
    chunk->losses[place] = train_one(job, chunk->workspaces + thread, &client, update, clipped);
    chunk->norms[place] = norm32(d, update);
    if (chunk->sum) add_client(chunk, place, update, chunk->sum->result + padded(d) * thread);
    atomic_store(chunk->done + place, 1);
}

/* The most rows of a client that is to be trained in the span of its rows; 0: none is. */
static int64_t most_spanned(const Chunk *chunk) {
    int64_t most = 0;
    for (int64_t i = 0; i < chunk->count; i++) {
        const Client client = client_at(chunk, i);
        if (client.n > most && span_pays(chunk->job, &client)) most = client.n;
    }
    return most;
}

/* Ends the training of a chunk, and frees what it has taken. */
void raydpfl_end(Chunk *chunk) {
    if (chunk->shared) end_work();
    free(chunk->memory);
    free(chunk->workspaces);
    free(chunk->layers);
    free(chunk);
}

/* Starts to train the clients of a chunk; NULL: no memory. All arguments must stay. */
Chunk *raydpfl_begin(const Job *job, int64_t count, const int64_t *slots, const float *x,
                    const char *y, const int64_t *sizes, const int64_t *index,
                    const int64_t *batches, const int64_t *steps, const float *gammas,
                    const float *stds, const uint64_t *clients, const uint64_t *draws,
                    const float *corrections, double *clipped, float **updates, double *losses,
                    double *norms, atomic_uchar *done, Sum *sum) {
    Chunk *chunk = job->layers > MOST ? NULL : malloc(sizeof(Chunk));
    if (!chunk) return NULL;
    *chunk = (Chunk){job,    count,   slots,   x,     y,           sizes,   index,
                     batches, steps,  gammas,  stds,  clients,     draws,   corrections,
                     clipped, updates, losses, norms, done,        sum};
    chunk->shared = claim_threads(train_slot, chunk);
    if (chunk->shared && sum && sum->threads < thread_pool.members)
        atomic_store(&thread_pool.members, sum->threads);
    int64_t threads = chunk->shared ? thread_pool.members : 1;
    Workspace ws = {.most = most_spanned(chunk)};
    int64_t floats = padded(lay_out(job, &ws, NULL));
    int64_t here = sum ? 2 * padded(job->d) : 0;
    chunk->memory = aligned_alloc(64, threads * (floats + here) * sizeof(float));
    chunk->workspaces = calloc(threads, sizeof(Workspace));
    chunk->layers = calloc(threads * job->layers, sizeof(Layer));
    if (!chunk->memory || !chunk->workspaces || !chunk->layers) {
        raydpfl_end(chunk);
        return NULL;
    }
    chunk->updates_here = chunk->memory + threads * floats;
    for (int64_t i = 0; i < threads; i++) {
        chunk->workspaces[i].layer = chunk->layers + i * job->layers;
        chunk->workspaces[i].most = ws.most;
        lay_out(job, chunk->workspaces + i, chunk->memory + i * floats);
    }
    return chunk;
}

/* Comes back when the first `end` of a chunk's clients are trained. Those below `limit`, whose
`updates` are known, may be. */
void raydpfl_train(Chunk *chunk, int64_t end, int64_t limit) {
    if (!chunk->shared) {
        for (; chunk->trained < end; chunk->trained++) train_slot(chunk, chunk->trained, 0);
        return;
    }
    set_limit(limit);
    for (; chunk->trained < end; chunk->trained++)
        while (!atomic_load(chunk->done + chunk->trained))
            if (!run_piece(0)) wait_for(chunk->done + chunk->trained);
}
