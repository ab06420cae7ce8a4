/* Reading of stretches of a file into their places. */

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
`done` [count]: how many bytes of each are read, 0 at first, so that a call that was interrupted
goes on. Returns 0, an error's number, or -1 where the file ends before. */
int raydpfl_read(int file, int64_t count, const int64_t *at, const int64_t *lengths, char *to,
                 const int64_t *places, int64_t most, int64_t *done) {
    Reading r = {file, at, lengths, places, to, most, done, 0};
    int64_t whole = 0;
    run_in_threads(count, read_present, &r);
    while (whole < count && done[whole] == lengths[whole]) whole++;
    if (whole < count) run_in_threads(count, read_rest, &r);
    return r.failed;
}
