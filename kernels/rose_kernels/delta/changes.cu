/* The changed elements of a tensor, listed on the GPU that holds it: the scan of docs/delta-format.md, of which
 * entropy coding stays on the host.
 *
 * A tensor is cut into chunks and those into strips of 512 elements; a warp takes a strip, 32 elements at a time.
 * Two passes: the first counts elements by context, and changes, in every strip; from the sums of the strips
 * before it in its chunk the second knows each element's rank, and each change's place in the list.
 *
 * Compiled by NVRTC where it runs, so without headers; by nvcc in `make check`; and by a C++ compiler in the tests.
 */

#define STRIP_ELEMENTS 512
#define WARP 32
#define ROWS (STRIP_ELEMENTS / WARP)
#define WARPS_MAX 8
#define CONTEXTS_MAX 32
#define OUTSIDE CONTEXTS_MAX /* the context of what lies after the end */
#define EVERY_LANE 0xffffffffu

/* MAP_DTYPE of plan.py, and rose_map of rose_delta.h. */
struct rose_map {
    unsigned char width, exponent_shift, exponent_mask, classes, groups, value_classes, reserved[2];
    unsigned char thresholds[8];
    unsigned char class_of[256], value_class_of[256], group_of[16];
};

/* One lane's part of a strip. */
struct strip {
    const unsigned char *history; /* null without */
    long long number;             /* of the strip in the tensor */
    long long first, end;         /* this lane's first element, and the end of the strip */
    unsigned bits[ROWS];          /* old, and new << 16: all loads under way before the first is needed */
};

struct element {
    unsigned old_bits, new_bits, past, context;
    bool changed;
};

template <typename Word>
__device__ strip load_strip(const Word *base, const Word *target, const unsigned char *history, long long n,
                            long long chunk_elements, long long strips_per_chunk) {
    strip s;
    s.history = history;
    s.number = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    const long long chunk = s.number / strips_per_chunk, chunk_first = chunk * chunk_elements;
    const long long start = chunk_first + s.number % strips_per_chunk * STRIP_ELEMENTS;
    s.first = start + threadIdx.x % WARP;
    s.end = start + STRIP_ELEMENTS;
    if (s.end > chunk_first + chunk_elements) s.end = chunk_first + chunk_elements;
    if (s.end > n) s.end = n;
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        const long long i = s.first + row * WARP;
        s.bits[row] = i < s.end ? base[i] | (unsigned)target[i] << 16 : 0;
    }
    return s;
}

__device__ element element_of(const strip &s, int row, const rose_map &map) {
    element e = {s.bits[row] & 0xffff, s.bits[row] >> 16, 0, OUTSIDE, false};
    const long long i = s.first + row * WARP;
    if (i >= s.end) return e;
    if (s.history) e.past = s.history[i] & 15;
    e.context = map.class_of[e.old_bits >> map.exponent_shift & map.exponent_mask] * map.groups;
    if (s.history) e.context += map.group_of[e.past];
    e.changed = e.old_bits != e.new_bits;
    return e;
}

/* 2 * (|step| - 1) + (step < 0), for different bits; in two's complement -s - 1 is ~s. */
template <typename Word> __device__ unsigned step_code(unsigned old_bits, unsigned new_bits) {
    const unsigned top = 8 * sizeof(Word) - 1, mask = (2u << top) - 1;
    const unsigned from = old_bits ^ (old_bits >> top) * (mask >> 1), to = new_bits ^ (new_bits >> top) * (mask >> 1);
    const unsigned distance = (to - from) & mask;
    return distance >> top ? 2 * (~distance & mask) + 1 : 2 * (distance - 1);
}

/* A copy for the block: looked up for every element. */
__device__ void share_map(rose_map *shared, const rose_map *map) {
    for (unsigned k = threadIdx.x; k < sizeof(rose_map); k += blockDim.x)
        ((unsigned char *)shared)[k] = ((const unsigned char *)map)[k];
    __syncthreads();
}

/* counts[strip][contexts + 1]: its elements by context, and last its changes. */
__device__ void count_strip(const rose_map *plan, const strip &s, long long strips, unsigned *counts) {
    __shared__ rose_map map;
    __shared__ unsigned elements[WARPS_MAX][CONTEXTS_MAX + 1];
    share_map(&map, plan);
    unsigned *mine = elements[threadIdx.x / WARP];
    const unsigned lane = threadIdx.x % WARP, contexts = map.classes * map.groups;
    mine[lane] = 0;
    if (lane == 0) mine[OUTSIDE] = 0;
    __syncwarp();
    unsigned changes = 0;
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        const element e = element_of(s, row, map);
        const unsigned alike = __match_any_sync(EVERY_LANE, e.context);
        if (!(alike & ((1u << lane) - 1))) mine[e.context] += __popc(alike); /* the first of them */
        changes += __popc(__ballot_sync(EVERY_LANE, e.changed));
        __syncwarp();
    }
    if (s.number >= strips) return;
    unsigned *row = counts + s.number * (contexts + 1);
    if (lane < contexts) row[lane] = mine[lane];
    if (lane == 0) row[contexts] = changes;
}

/* `before` is like counts, of the strips before in the chunk; starts[chunk]: changes in the chunks before.
 * places[change]: rank, context << 18, value context << 23.  steps[change]: coded as in the format, flips made. */
template <typename Word>
__device__ void list_strip(const rose_map *plan, const strip &s, long long strips, long long strips_per_chunk,
                           const unsigned *before, const long long *starts, unsigned *places,
                           unsigned short *steps) {
    __shared__ rose_map map;
    __shared__ unsigned ranks[WARPS_MAX][CONTEXTS_MAX + 1];
    share_map(&map, plan);
    if (s.number >= strips) return; /* a whole warp: those that stay do without the block */
    unsigned *mine = ranks[threadIdx.x / WARP];
    const unsigned lane = threadIdx.x % WARP, lower = (1u << lane) - 1, contexts = map.classes * map.groups;
    const unsigned *row_before = before + s.number * (contexts + 1);
    mine[lane] = lane < contexts ? row_before[lane] : 0;
    if (lane == 0) mine[OUTSIDE] = 0;
    long long at = starts[s.number / strips_per_chunk] + row_before[contexts];
    __syncwarp();
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        const element e = element_of(s, row, map);
        const unsigned alike = __match_any_sync(EVERY_LANE, e.context);
        const unsigned rank = mine[e.context] + __popc(alike & lower);
        __syncwarp();
        if (!(alike & lower)) mine[e.context] += __popc(alike);
        const unsigned changed = __ballot_sync(EVERY_LANE, e.changed);
        if (e.changed) {
            const unsigned group = e.context % map.groups;
            const unsigned exponent = e.old_bits >> map.exponent_shift & map.exponent_mask;
            const unsigned value_context = map.value_class_of[exponent] * map.groups + group;
            const long long k = at + __popc(changed & lower);
            places[k] = rank | e.context << 18 | value_context << 23;
            steps[k] = (unsigned short)(step_code<Word>(e.old_bits, e.new_bits) ^ (group ? e.past & 1 : 0));
        }
        at += __popc(changed);
        __syncwarp();
    }
}

#define KERNELS(Word, suffix)                                                                                         \
    extern "C" __global__ void rose_count_##suffix(const rose_map *map, const Word *base, const Word *target,         \
                                                   const unsigned char *history, long long n,                         \
                                                   long long chunk_elements, long long strips_per_chunk,              \
                                                   long long strips, unsigned *counts) {                              \
        count_strip(map, load_strip(base, target, history, n, chunk_elements, strips_per_chunk), strips, counts);       \
    }                                                                                                                 \
    extern "C" __global__ void rose_list_##suffix(                                                                    \
        const rose_map *map, const Word *base, const Word *target, const unsigned char *history, long long n,         \
        long long chunk_elements, long long strips_per_chunk, long long strips, const unsigned *before,               \
        const long long *starts, unsigned *places, unsigned short *steps) {                                           \
        list_strip<Word>(map, load_strip(base, target, history, n, chunk_elements, strips_per_chunk), strips,                 \
                   strips_per_chunk, before, starts, places, steps);                                                  \
    }

KERNELS(unsigned char, u8)
KERNELS(unsigned short, u16)
