/* Threads. One piece of work at a time is done by several threads, the caller's among them, piece
by piece. All others wait for the next. */

/* Does a piece in thread `thread`, below `thread_pool.wanted`. */
typedef void (*Work)(void *what, int64_t piece, int64_t thread);

enum { MOST_THREADS = 256, SPINS = 1000 };

static struct {
    pthread_mutex_t lock;
    pthread_cond_t called, done;
    Work work;
    void *what;
    int64_t started, inside, asleep;  /* threads: in all, at work, and waiting for a call */
    atomic_int_fast64_t members;      /* how many of them this work is for */
    pid_t process;                    /* whose they are: a fork has none of them */
    atomic_int_fast64_t wanted;       /* how many there are to be, the caller's among them */
    atomic_int_fast64_t next, limit;  /* the next piece, and the first that may not be done yet */
    atomic_int busy, waiting;         /* with some work, and its caller for a piece */
} thread_pool = {.lock = PTHREAD_MUTEX_INITIALIZER,
          .called = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER,
          .wanted = 1};

/* Does the next piece, if there is one. */
static int run_piece(int64_t thread) {
    int64_t piece = atomic_load(&thread_pool.next);
    do
        if (piece >= atomic_load(&thread_pool.limit)) return 0;
    while (!atomic_compare_exchange_weak(&thread_pool.next, &piece, piece + 1));
    thread_pool.work(thread_pool.what, piece, thread);
    return 1;
}

static int has_piece(int64_t thread) {
    return atomic_load(&thread_pool.next) < atomic_load(&thread_pool.limit) &&
           thread < thread_pool.members;
}

static void *thread_loop(void *number) {
    int64_t thread = (intptr_t)number;
    for (;;) {
        for (int i = 0; i < SPINS && !has_piece(thread); i++) RELAX;
        pthread_mutex_lock(&thread_pool.lock);
        thread_pool.asleep++;
        while (!has_piece(thread)) pthread_cond_wait(&thread_pool.called, &thread_pool.lock);
        thread_pool.asleep--;
        thread_pool.inside++;
        pthread_mutex_unlock(&thread_pool.lock);
        while (run_piece(thread))
            if (atomic_load(&thread_pool.waiting)) {
                pthread_mutex_lock(&thread_pool.lock);
                pthread_cond_signal(&thread_pool.done);
                pthread_mutex_unlock(&thread_pool.lock);
            }
        pthread_mutex_lock(&thread_pool.lock);
        thread_pool.inside--;
        pthread_cond_signal(&thread_pool.done);
        pthread_mutex_unlock(&thread_pool.lock);
    }
    return NULL;
}

/* Starts the threads that are missing; the caller has the lock. Signals are not for them. */
static void start_threads(void) {
    pthread_attr_t detached;
    pthread_t thread;
    sigset_t every, before;
    sigfillset(&every);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    for (; thread_pool.started < thread_pool.members; thread_pool.started++) {
        void *number = (void *)(intptr_t)thread_pool.started;
        if (pthread_create(&thread, &detached, thread_loop, number)) break;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
}

/* Whether the thread_pool is the caller's now, for this work: not where it is another thread's. */
static int claim_threads(Work work, void *what) {
    int idle = 0;
    if (thread_pool.wanted < 2) return 0;
    if (!atomic_compare_exchange_strong(&thread_pool.busy, &idle, 1)) return 0;
    if (thread_pool.process != getpid()) {
        pthread_mutex_init(&thread_pool.lock, NULL);
        pthread_cond_init(&thread_pool.called, NULL);
        pthread_cond_init(&thread_pool.done, NULL);
        thread_pool.process = getpid();
        thread_pool.started = 1;
        thread_pool.inside = thread_pool.asleep = 0;
    }
    atomic_store(&thread_pool.members, thread_pool.wanted);
    thread_pool.work = work;
    thread_pool.what = what;
    return 1;
}

/* Has pieces below `limit` done, from now on. */
static void set_limit(int64_t limit) {
    pthread_mutex_lock(&thread_pool.lock);
    start_threads();
    atomic_store(&thread_pool.limit, limit);
    if (thread_pool.asleep) pthread_cond_broadcast(&thread_pool.called);
    pthread_mutex_unlock(&thread_pool.lock);
}

/* Waits until `*done`, which a piece that is being done sets. */
static void wait_for(const atomic_uchar *done) {
    for (int i = 0; i < SPINS && !atomic_load(done); i++) RELAX;
    if (atomic_load(done)) return;
    pthread_mutex_lock(&thread_pool.lock);
    atomic_store(&thread_pool.waiting, 1);
    while (!atomic_load(done)) pthread_cond_wait(&thread_pool.done, &thread_pool.lock);
    atomic_store(&thread_pool.waiting, 0);
    pthread_mutex_unlock(&thread_pool.lock);
}

/* Ends the work: pieces that have not started are not done. */
static void end_work(void) {
    pthread_mutex_lock(&thread_pool.lock);
    atomic_store(&thread_pool.limit, 0);
    while (thread_pool.inside) pthread_cond_wait(&thread_pool.done, &thread_pool.lock);
    atomic_store(&thread_pool.next, 0);
    pthread_mutex_unlock(&thread_pool.lock);
    atomic_store(&thread_pool.busy, 0);
}

/* Does all `count` pieces. */
static void run_in_threads(int64_t count, Work work, void *what) {
    if (count < 2 || !claim_threads(work, what)) {
        for (int64_t piece = 0; piece < count; piece++) work(what, piece, 0);
        return;
    }
    set_limit(count);
    while (run_piece(0)) continue;
    end_work();
}

/* How many threads there are to be from now on, the caller's among them. */
void raydpfl_threads(int64_t count) {
    thread_pool.wanted = count < 1 ? 1 : count < MOST_THREADS ? count : MOST_THREADS;
}

int raydpfl_wanted(void) { return thread_pool.wanted; }
