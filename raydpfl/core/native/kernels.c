/* The compiled parts of the engine, as one translation unit; a file a subject.

raydpfl/core/native/__init__.py says what is computed; the files say how. A client is trained
alone, and every sum is taken in an order that depends on its shapes only: the same bits in any
chunk, on any number of threads, with vectors of any length. Products are accumulated by fused
multiply-adds, 16 columns at once (v16), so rows are padded to a multiple of 16 floats. Nothing
here keeps state but the threads, which take up clients, or parts of sums, one after another.
*/

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX _mm_pause()
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#define RELAX __asm__ volatile("yield")
#else
#define RELAX (void)0
#endif

#include "threads.c"
#include "vectors.h"
#include "random_words.c"
#include "normals.c"
#include "products.c"
#include "linear.c"
#include "step_noise.c"
#include "linear_training.c"
#include "sums.c"
#include "chunk.c"
#include "convolution.c"
#include "file_reading.c"
