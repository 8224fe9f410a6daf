/* What has to run at the speed of memory and of the system, not of Python; native.py compiles and
   calls it.

   Sums are made a block at a time, which is twice read while it is in the first cache: the
   compiler then has two short loops that it can vectorise. It is never allowed to take NaN for
   granted, nor to set the processor's modes, so no -ffast-math. */

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { BLOCK = 1 << 12, STRIPE = 64, STRIPES = 16 };

/* Below this share of the sum of squares, rounding has taken too much of the variance. */
static const double CANCELLED = 1e-6;

/* The entries of `Part` in statistics.py, but for the hash. */
typedef struct {
    double minimum, maximum, mean, squares, spread;
    int64_t finite, zeros, subnormals, nans, positive, negative;
} Part;

typedef struct {
    double minimum, maximum, total, squares;
    int64_t zeros, small, nonfinite;
} Sums;

/* Add a block of finite values to a part. The means of both are brought together as Chan, Golub
   and LeVeque do it (Updating Formulae and a Pairwise Algorithm for Computing Sample Variances). */
static void join(Part *part, const Sums *sums, double spread, int64_t count) {
    double mean = sums->total / count, apart = part->finite ? mean - part->mean : 0;
    double share = (double)count / (part->finite + count);
    part->minimum = fmin(part->minimum, sums->minimum);
    part->maximum = fmax(part->maximum, sums->maximum);
    part->mean = part->finite ? part->mean + apart * share : mean;
    part->squares += sums->squares;
    part->spread += spread + apart * apart * part->finite * share;
    part->finite += count;
    part->zeros += sums->zeros;
    part->subnormals += sums->small - sums->zeros;
}

static inline float of_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Its exponent is put in the place of a float's; the multiplication corrects by what both differ.
   What is subnormal would be so on the way, and processors can be told to take that for zero. */
static inline float of_float16(uint16_t bits) {
    uint32_t magnitude = (uint32_t)(bits & 0x7fff) << 13, sign = (uint32_t)(bits & 0x8000) << 16;
    float value;
    memcpy(&value, &magnitude, sizeof value);
    value = bits & 0x7c00 ? value * 0x1p112f : (bits & 0x3ff) * 0x1p-24f;
    value = (bits & 0x7c00) != 0x7c00 ? value : bits & 0x3ff ? NAN : INFINITY;
    memcpy(&magnitude, &value, sizeof value);
    magnitude |= sign;
    memcpy(&value, &magnitude, sizeof value);
    return value;
}

#define SAME(x) (x)

/* REAL holds each value, of int64 the nearest it has; COUNTER is an integer of its size, so that both have equally many
   lanes. Below `tiny` in magnitude, a value is zero or subnormal; 0 if the type has no such. */
#define DEFINE(NAME, TYPE, REAL, COUNTER, VALUE)                                                  \
    static Sums sums_##NAME(const TYPE *data, size_t count, REAL tiny) {                          \
        REAL minimum = INFINITY, maximum = -INFINITY;                                             \
        COUNTER zeros = 0, small = 0, nonfinite = 0;                                              \
        _Pragma("omp simd reduction(min : minimum) reduction(max : maximum)                       \
                 reduction(+ : zeros, small, nonfinite)")                                         \
        for (size_t i = 0; i < count; i++) {                                                      \
            REAL x = (REAL)VALUE(data[i]), magnitude = x < 0 ? -x : x;                            \
            minimum = x < minimum ? x : minimum;                                                  \
            maximum = x > maximum ? x : maximum;                                                  \
            zeros += x == 0;                                                                      \
            small += magnitude < tiny;                                                            \
            nonfinite += x - x != 0;                                                              \
        }                                                                                         \
        double total = 0, squares = 0;                                                            \
        _Pragma("omp simd reduction(+ : total, squares)")                                         \
        for (size_t i = 0; i < count; i++) {                                                      \
            double x = (double)VALUE(data[i]);                                                    \
            total += x;                                                                           \
            squares += x * x;                                                                     \
        }                                                                                         \
        return (Sums){minimum, maximum, total, squares, zeros, tiny ? small : zeros, nonfinite};  \
    }                                                                                             \
                                                                                                  \
    static double spread_##NAME(const TYPE *data, size_t count, const Sums *sums) {               \
        double mean = sums->total / count, spread = sums->squares - sums->total * mean;           \
        if (spread > CANCELLED * sums->squares) return spread;                                    \
        spread = 0;                                                                               \
        _Pragma("omp simd reduction(+ : spread)")                                                 \
        for (size_t i = 0; i < count; i++) {                                                      \
            double apart = (double)VALUE(data[i]) - mean;                                         \
            spread += apart * apart;                                                              \
        }                                                                                         \
        return spread;                                                                            \
    }                                                                                             \
                                                                                                  \
    static size_t finite_##NAME(const TYPE *data, size_t count, TYPE *finite, Part *part) {       \
        size_t kept = 0;                                                                          \
        for (size_t i = 0; i < count; i++) {                                                      \
            double x = (double)VALUE(data[i]);                                                    \
            part->nans += x != x;                                                                 \
            part->positive += x == INFINITY;                                                      \
            part->negative += x == -INFINITY;                                                     \
            finite[kept] = data[i];                                                               \
            kept += x - x == 0;                                                                   \
        }                                                                                         \
        return kept;                                                                              \
    }                                                                                             \
                                                                                                  \
    void part_##NAME(const TYPE *data, size_t size, double tiny, Part *part) {                    \
        *part = (Part){.minimum = INFINITY, .maximum = -INFINITY};                                \
        for (size_t count; size; size -= count) {                                                 \
            count = size < BLOCK ? size : BLOCK;                                                  \
            size_t kept = count;                                                                  \
            const TYPE *block = data;                                                             \
            TYPE finite[BLOCK];                                                                   \
            Sums sums = sums_##NAME(block, count, tiny);                                          \
            if (sums.nonfinite) {                                                                 \
                kept = finite_##NAME(data, count, finite, part);                                  \
                sums = sums_##NAME(block = finite, kept, tiny);                                   \
            }                                                                                     \
            if (kept) join(part, &sums, spread_##NAME(block, kept, &sums), kept);                 \
            data += count;                                                                        \
        }                                                                                         \
    }

DEFINE(float64, double, double, int64_t, SAME)
DEFINE(float32, float, float, int32_t, SAME)
DEFINE(bfloat16, uint16_t, float, int32_t, of_bfloat16)
DEFINE(float16, uint16_t, float, int32_t, of_float16)
DEFINE(int64, int64_t, double, int64_t, SAME)
DEFINE(int32, int32_t, double, int64_t, SAME)
DEFINE(int16, int16_t, float, int32_t, SAME)
DEFINE(int8, int8_t, float, int32_t, SAME)
DEFINE(uint8, uint8_t, float, int32_t, SAME)

/* The generator splitmix64. */
static uint64_t scrambled(uint64_t state) {
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
    state = (state ^ state >> 27) * 0x94D049BB133111EBu;
    return state ^ state >> 31;
}

static uint64_t word_at(const uint8_t *data) {
    uint64_t word;
    memcpy(&word, data, sizeof word);
    return word;
}

/* The hash of docs/statistics.md: `weights` are those of a period of words, and each byte is mixed
   with the one `distance` places after it. */
uint64_t bits_hash(const uint8_t *data, size_t size, const uint64_t *weights, size_t period,
                   size_t distance) {
    uint64_t hash = 0, paired = size > distance ? size - distance : 0, whole = paired / 8;
    for (size_t first = 0, block = 0; 8 * first < size; first += period, block++) {
        size_t count = first >= whole ? 0 : whole - first < period ? whole - first : period;
        uint64_t sum = 0;
        for (size_t i = 0; i < count; i++) {
            const uint8_t *word = data + 8 * (first + i);
            sum += (word_at(word) ^ word_at(word + distance)) * weights[i];
        }
        for (size_t i = count; i < period && 8 * (first + i) < size; i++) {
            uint8_t last[8] = {0};
            for (size_t byte = 0, at = 8 * (first + i); byte < 8 && at < size; byte++, at++)
                last[byte] = data[at] ^ (at < paired ? data[at + distance] : 0);
            sum += word_at(last) * weights[i];
        }
        hash += sum * (scrambled(((1ull << 32) + block + 1) * 0x9E3779B97F4A7C15u) | 1);
    }
    return hash;
}

static void accumulate(uint64_t *sums, const uint8_t *stripe, const uint64_t *keys) {
    for (int lane = 0; lane < 8; lane++) {
        uint64_t word = word_at(stripe + 8 * lane), mixed = word ^ keys[lane];
        sums[lane ^ 1] += word;
        sums[lane] += (mixed & 0xffffffff) * (mixed >> 32);
    }
}

/* A number that most surely differs if the bytes do. The inner loop is that of XXH3 (Yann Collet,
   https://github.com/Cyan4973/xxHash): a sum of products in each of eight lanes, scrambled after
   each sixteen stripes. `keys` are 32 random words. */
uint64_t checksum(const uint8_t *data, size_t size, const uint64_t *keys) {
    uint64_t sums[8], all = size;
    size_t left = size;
    memcpy(sums, keys + 24, sizeof sums);
    for (; left >= STRIPES * STRIPE; left -= STRIPES * STRIPE) {
        for (int stripe = 0; stripe < STRIPES; stripe++, data += STRIPE)
            accumulate(sums, data, keys + stripe);
        for (int lane = 0; lane < 8; lane++)
            sums[lane] = (sums[lane] ^ sums[lane] >> 47 ^ keys[16 + lane]) * 0x9E3779B1u;
    }
    for (int stripe = 0; left; stripe++) {
        uint8_t last[STRIPE] = {0};
        size_t count = left < STRIPE ? left : STRIPE;
        memcpy(last, data, count);
        accumulate(sums, last, keys + stripe);
        data += count, left -= count;
    }
    for (int lane = 0; lane < 8; lane++) all = scrambled(all ^ sums[lane]) + lane + 1;
    return all;
}

/* Whether a file has these bytes at a place in it: 1 or 0, and -1 if it cannot be read. */
int file_has(int descriptor, size_t offset, const char *data, size_t size) {
    char block[1 << 16];
    while (size) {
        ssize_t count = pread(descriptor, block, size < sizeof block ? size : sizeof block, offset);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return count ? -1 : 0;
        if (memcmp(block, data, count)) return 0;
        offset += count, data += count, size -= count;
    }
    return 1;
}

static int write_all(int descriptor, const char *data, size_t size) {
    while (size) {
        ssize_t count = write(descriptor, data, size);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return count ? errno : EIO;
        data += count, size -= count;
    }
    return 0;
}

/* Make a file in a folder that is whole or not there; 0 or the number of the error. */
int make_file(int folder, int mode, const char *temporary, const char *name, const char *header,
              size_t header_size, const char *data, size_t size) {
    int descriptor = openat(folder, temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (descriptor < 0) return errno;
    int error = write_all(descriptor, header, header_size);
    if (!error) error = write_all(descriptor, data, size);
    if (close(descriptor) && !error) error = errno;
    if (!error && renameat(folder, temporary, folder, name)) error = errno;
    if (error) unlinkat(folder, temporary, 0);
    return error;
}

/* Make small files in a folder, each whole or not at all: in one go, so that the interpreter's lock
   is given up once and not with each call of the system. Names and sources follow each other in
   `text`; a file of no size is a link to its source. `errors` has the number of each one's error. */
void make_files(int folder, int mode, size_t count, const char *text,
                const char *contents, const uint64_t *sizes, const char *temporary, int *errors) {
    for (size_t i = 0; i < count; i++) {
        const char *name = text, *source = name + strlen(name) + 1;
        text = source + strlen(source) + 1;
        if (sizes[i])
            errors[i] = make_file(folder, mode, temporary, name, contents, sizes[i], NULL, 0);
        else
            errors[i] = linkat(AT_FDCWD, source, folder, name, 0) ? errno : 0;
        contents += sizes[i];
    }
}
