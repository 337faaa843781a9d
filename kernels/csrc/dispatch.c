/* The exported functions: check the arguments, then call the kernels of the instruction set in use. */
#include <stdatomic.h>

#include "common.h"
#include "kernels.h"

static int fastest_supported(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("popcnt") && __builtin_cpu_supports("lzcnt");
#else
    return 0;
#endif
}

/* -1 until first asked; threads that ask at once store the same answer. */
static _Atomic int chosen = -1;

static const rose_kernels *kernels(void) {
    int choice = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (choice < 0) atomic_store_explicit(&chosen, choice = fastest_supported(), memory_order_relaxed);
#if defined(__x86_64__)
    if (choice) return &rose_kernels_avx2;
#endif
    return &rose_kernels_portable;
}

int32_t rose_delta_abi(void) { return ROSE_DELTA_ABI; }

int32_t rose_delta_use(int32_t fastest) {
    int choice = fastest ? fastest_supported() : 0;
    atomic_store_explicit(&chosen, choice, memory_order_relaxed);
    return choice;
}

static int elements_in_range(int64_t n) { return n >= 0 && n <= ROSE_CHUNK_ELEMENTS_MAX; }

static int map_in_range(const rose_map *map, int stateful) {
    if ((map->width != 1 && map->width != 2) || map->exponent_shift > 15) return 0;
    if (map->classes < 1 || map->classes > ROSE_CLASSES_MAX) return 0;
    if (map->value_classes < 1 || map->value_classes > ROSE_CLASSES_MAX) return 0;
    if (map->groups < 1 || map->groups > ROSE_GROUPS_MAX || (map->groups > 1) != stateful) return 0;
    for (int j = 0; j < map->classes - 1; j++)
        if (map->thresholds[j] <= (j ? map->thresholds[j - 1] : 0)) return 0;
    for (int e = 0; e < 256; e++) {
        int at_least = 0;
        for (int j = 0; j < map->classes - 1; j++) at_least += e >= map->thresholds[j];
        if (map->class_of[e] != at_least || map->value_class_of[e] >= map->value_classes) return 0;
    }
    for (int s = 0; s < 16; s++)
        if (map->group_of[s] >= map->groups) return 0;
    return 1;
}

int64_t rose_encoder_tables(const uint16_t *frequencies, int64_t tables, int64_t symbols, rose_encoder_symbol *out) {
    if (tables < 0 || symbols < 1 || symbols > ROSE_BYTE_SYMBOLS) return ROSE_MISUSE;
    for (int64_t t = 0; t < tables; t++) {
        uint32_t start = 0;
        for (int64_t s = 0; s < symbols; s++, out++) {
            uint32_t f = *frequencies++;
            memset(out, 0, sizeof *out);
            if (f > ROSE_SLOTS - start) return ROSE_MISUSE;
            if (!f) continue;
            out->x_max = ((STATE_LOW >> SLOT_BITS) << 16) * f;
            out->complement = (uint16_t)(ROSE_SLOTS - f);
            if (f == 1) { /* quotient = x - 1, made right by the bias */
                out->reciprocal = UINT32_MAX;
                out->bias = start + ROSE_SLOTS - 1;
            } else {
                uint32_t shift = 32 - (uint32_t)__builtin_clz(f - 1); /* 2^shift >= f */
                out->reciprocal = (uint32_t)(((1ull << (shift + 31)) + f - 1) / f);
                out->shift = (uint16_t)(shift - 1);
                out->bias = start;
            }
            start += f;
        }
        if (start != 0 && start != ROSE_SLOTS) return ROSE_MISUSE;
    }
    return 0;
}

int64_t rose_decoder_tables(const uint16_t *frequencies, int64_t tables, int64_t symbols, uint32_t *out) {
    if (tables < 0 || symbols < 1 || symbols > ROSE_BYTE_SYMBOLS) return ROSE_MISUSE;
    for (int64_t t = 0; t < tables; t++, out += ROSE_SLOTS, frequencies += symbols) {
        uint32_t slot = 0;
        for (int64_t s = 0; s < symbols; s++) {
            uint32_t f = frequencies[s];
            if (f > ROSE_SLOTS - slot) return ROSE_MISUSE;
            for (uint32_t offset = 0; offset < f; offset++) out[slot++] = (f - 1) | offset << 12 | (uint32_t)s << 24;
        }
        if (slot != 0 && slot != ROSE_SLOTS) return ROSE_MISUSE;
        for (; slot < ROSE_SLOTS; slot++) out[slot] = 255u << 24; /* no symbol: whoever meets it is refused */
    }
    return 0;
}

/* ---- spans ---- */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static const void *element_at(const void *words, int64_t i, int width) {
    return (const uint8_t *)words + i * width;
}

/* Chunks of a span, or ROSE_MISUSE. */
static int64_t chunks_of(int64_t n, int64_t chunk_elements) {
    if (n < 0 || chunk_elements < 1 || !elements_in_range(chunk_elements)) return ROSE_MISUSE;
    return n / chunk_elements + (n % chunk_elements != 0);
}

/* Sorted gaps and gaps (4 bytes each), steps (2), contexts (1). */
int64_t rose_scan_scratch_bytes(int64_t chunk_elements) {
    return elements_in_range(chunk_elements) ? 11 * chunk_elements : ROSE_MISUSE;
}

int64_t rose_scan(const rose_map *map, const void *base, const void *target, const uint8_t *history, int64_t n,
                  int64_t chunk_elements, uint8_t *scratch, int64_t scratch_bytes, uint32_t *counts,
                  uint8_t *gap_symbols, uint8_t *value_symbols, uint8_t *value_contexts, uint32_t *gap_histogram,
                  uint32_t *value_histogram, uint8_t *raw, int64_t raw_capacity, int64_t *raw_ends) {
    const int64_t chunks = chunks_of(n, chunk_elements);
    if (chunks < 0 || !map_in_range(map, history != 0)) return ROSE_MISUSE;
    /* At most 15 + 13 raw bits a change. */
    if (scratch_bytes < rose_scan_scratch_bytes(chunk_elements) || raw_capacity < 4 * n + 16 * chunks)
        return ROSE_MISUSE;
    const int contexts = map->classes * map->groups;
    int64_t changed = 0, raw_end = 0;
    for (int64_t i = 0; i < chunks; i++) {
        const int64_t at = i * chunk_elements;
        int64_t raw_bytes;
        changed += kernels()->scan(map, element_at(base, at, map->width), element_at(target, at, map->width),
                                   history ? history + at : 0, least(chunk_elements, n - at), scratch,
                                   counts + i * contexts, gap_symbols + changed, value_symbols + changed,
                                   value_contexts + changed, gap_histogram, value_histogram, raw + raw_end,
                                   &raw_bytes);
        raw_ends[i] = raw_end += raw_bytes;
    }
    return changed;
}

int64_t rose_symbolise(const rose_map *map, const uint32_t *places, const uint16_t *steps, const int64_t *ends,
                       int64_t chunks, uint8_t *scratch, int64_t scratch_bytes, uint32_t *counts,
                       uint8_t *gap_symbols, uint8_t *value_symbols, uint8_t *value_contexts,
                       uint32_t *gap_histogram, uint32_t *value_histogram, uint8_t *raw, int64_t raw_capacity,
                       int64_t *raw_ends) {
    if (chunks < 0 || !map_in_range(map, map->groups > 1)) return ROSE_MISUSE;
    const int contexts = map->classes * map->groups;
    int64_t k = 0, raw_end = 0;
    for (int64_t i = 0; i < chunks; i++) {
        const int64_t changed = ends[i] - k;
        if (!elements_in_range(changed) || scratch_bytes < rose_scan_scratch_bytes(changed)) return ROSE_MISUSE;
        if (raw_capacity - raw_end < 4 * changed + 16) return ROSE_MISUSE;
        const int64_t raw_bytes =
            kernels()->symbolise(map, places + k, steps + k, changed, scratch, counts + i * contexts, gap_symbols + k,
                                 value_symbols + k, value_contexts + k, gap_histogram, value_histogram, raw + raw_end);
        if (raw_bytes < 0) return raw_bytes;
        raw_ends[i] = raw_end += raw_bytes;
        k = ends[i];
    }
    return k;
}

/* Varints of 32 bits have at most 5 bytes; every symbol emits at most one word of 2. */
int64_t rose_pack_bound(int64_t changed, int64_t raw_bytes, int64_t contexts, int64_t chunks) {
    return (5 * (contexts + 1) + 8) * chunks + 4 * changed + raw_bytes;
}

static int described_in_range(const uint32_t *counts, const uint32_t *expected, int64_t contexts, int64_t chunks,
                              const uint8_t *gap_symbols, const uint8_t *value_symbols,
                              const uint8_t *value_contexts, int64_t changed, int64_t value_contexts_count) {
    int64_t sum = 0;
    for (int64_t c = 0; c < contexts; c++)
        if (expected[c] > ROSE_CHUNK_ELEMENTS_MAX) return 0;
    for (int64_t i = 0; i < contexts * chunks; i++) {
        if (counts[i] > ROSE_CHUNK_ELEMENTS_MAX) return 0;
        sum += counts[i];
    }
    for (int64_t k = 0; k < changed; k++)
        if (gap_symbols[k] >= ROSE_GAP_SYMBOLS || value_symbols[k] >= ROSE_VALUE_SYMBOLS ||
            value_contexts[k] >= value_contexts_count)
            return 0;
    return sum == changed;
}

int64_t rose_pack(const uint32_t *counts, const uint32_t *expected, int64_t contexts, int64_t chunks,
                  const uint8_t *gap_symbols, const uint8_t *value_symbols, const uint8_t *value_contexts,
                  int64_t changed, const uint8_t *raw, const int64_t *raw_ends,
                  const rose_encoder_symbol *gap_tables, const rose_encoder_symbol *value_tables,
                  int64_t value_contexts_count, uint8_t *out, int64_t out_capacity, int64_t *out_ends) {
    if (contexts < 1 || contexts > CONTEXTS_MAX || chunks < 0 || changed < 0) return ROSE_MISUSE;
    if (out_capacity < rose_pack_bound(changed, chunks ? raw_ends[chunks - 1] : 0, contexts, chunks))
        return ROSE_MISUSE;
    if (!described_in_range(counts, expected, contexts, chunks, gap_symbols, value_symbols, value_contexts, changed,
                            value_contexts_count))
        return ROSE_MISUSE;
    int64_t length = 0, k = 0, raw_start = 0;
    for (int64_t i = 0; i < chunks; i++, counts += contexts) {
        int64_t here = 0;
        for (int64_t c = 0; c < contexts; c++) here += counts[c];
        if (here)
            length += kernels()->pack(counts, expected, (int)contexts, gap_symbols + k, value_symbols + k,
                                      value_contexts + k, here, raw + raw_start, raw_ends[i] - raw_start, gap_tables,
                                      value_tables, out + length, out_capacity - length);
        k += here;
        raw_start = raw_ends[i];
        out_ends[i] = length;
    }
    return length;
}

/* Ranks, 4 bytes each. */
int64_t rose_unpack_scratch_bytes(int64_t chunk_elements) {
    return elements_in_range(chunk_elements) ? 4 * chunk_elements : ROSE_MISUSE;
}

int64_t rose_unpack(const rose_map *map, const uint8_t *payloads, const int64_t *payload_ends, const void *base,
                    const uint8_t *history, int64_t n, int64_t chunk_elements, int64_t first,
                    const uint32_t *expected, const uint32_t *gap_tables, const uint32_t *value_tables,
                    uint8_t *scratch, int64_t scratch_bytes, int64_t *indices, void *values, int64_t *found_ends) {
    const int64_t chunks = chunks_of(n, chunk_elements);
    if (chunks < 0 || !map_in_range(map, history != 0)) return ROSE_MISUSE;
    if (scratch_bytes < rose_unpack_scratch_bytes(chunk_elements)) return ROSE_MISUSE;
    int64_t start = 0, total = 0;
    for (int64_t i = 0; i < chunks; i++) {
        const int64_t at = i * chunk_elements, bytes = payload_ends[i] - start;
        if (bytes < 0) return ROSE_MISUSE;
        if (bytes) {
            int64_t found = kernels()->unpack(
                map, payloads + start, bytes, element_at(base, at, map->width), history ? history + at : 0,
                least(chunk_elements, n - at), first + at, expected, gap_tables, value_tables,
                (uint32_t *)(void *)scratch, indices + total, (uint8_t *)values + total * map->width);
            if (found < 0) return found;
            total += found;
        }
        start = payload_ends[i];
        found_ends[i] = total;
    }
    return total;
}

/* Indices (8 bytes each), ranks (4), values (2). */
int64_t rose_apply_scratch_bytes(int64_t chunk_elements) {
    return elements_in_range(chunk_elements) ? 14 * chunk_elements : ROSE_MISUSE;
}

int64_t rose_apply(const rose_map *map, const uint8_t *payloads, const int64_t *payload_ends, void *base,
                   const uint8_t *history, int64_t n, int64_t chunk_elements, const uint32_t *expected,
                   const uint32_t *gap_tables, const uint32_t *value_tables, uint8_t *scratch,
                   int64_t scratch_bytes) {
    const int64_t chunks = chunks_of(n, chunk_elements);
    if (chunks < 0 || scratch_bytes < rose_apply_scratch_bytes(chunk_elements)) return ROSE_MISUSE;
    int64_t *indices = (int64_t *)(void *)scratch;
    uint8_t *ranks = (uint8_t *)(indices + chunk_elements), *values = ranks + 4 * chunk_elements;
    int64_t start = 0, total = 0;
    for (int64_t i = 0; i < chunks; i++) {
        const int64_t at = i * chunk_elements, here = least(chunk_elements, n - at);
        const int64_t bytes = payload_ends[i] - start;
        uint8_t *chunk = (uint8_t *)base + at * map->width;
        int64_t found = rose_unpack(map, payloads + start, &bytes, chunk, history ? history + at : 0, here,
                                    chunk_elements, 0, expected, gap_tables, value_tables, ranks,
                                    4 * chunk_elements, indices, values, &(int64_t){0});
        if (found < 0 || (found = rose_scatter(chunk, here, map->width, indices, values, found)) < 0) return found;
        total += found;
        start = payload_ends[i];
    }
    return total;
}

static int out_of_range(const int64_t *indices, int64_t count, int64_t n) {
    uint64_t largest = 0; /* a negative index is a large one */
    for (int64_t k = 0; k < count; k++) largest = (uint64_t)indices[k] > largest ? (uint64_t)indices[k] : largest;
    return count && largest >= (uint64_t)n;
}

int64_t rose_scatter(void *target, int64_t n, int32_t width, const int64_t *indices, const void *values,
                     int64_t count) {
    if (n < 0 || count < 0) return ROSE_MISUSE;
    if (out_of_range(indices, count, n)) return ROSE_MISUSE;
    if (width == 1)
        for (int64_t k = 0; k < count; k++) ((uint8_t *)target)[indices[k]] = ((const uint8_t *)values)[k];
    else if (width == 2)
        for (int64_t k = 0; k < count; k++) ((uint16_t *)target)[indices[k]] = ((const uint16_t *)values)[k];
    else
        return ROSE_MISUSE;
    return count;
}

enum {
    EXCHANGE_BLOCK = 1024, /* words that are read back while they are in the cache */
    EXCHANGE_AHEAD = 64,   /* words asked for before they are needed: the wait for memory is most of the work */
};

#define EXCHANGE(bits)                                                                                            \
    static int64_t exchange_##bits(uint##bits##_t *target, int64_t n, const int64_t *indices,                     \
                                   const uint##bits##_t *values, uint##bits##_t *before, int64_t count) {         \
        int64_t wrong = 0;                                                                                        \
        for (int64_t first = 0; first < count; first += EXCHANGE_BLOCK) {                                         \
            const int64_t last = first + least(EXCHANGE_BLOCK, count - first);                                    \
            if (out_of_range(indices + first, last - first, n)) {                                                 \
                while (first-- > 0) target[indices[first]] = before[first]; /* all or nothing */                  \
                return ROSE_MISUSE;                                                                               \
            }                                                                                                     \
            for (int64_t k = first; k < last; k++) {                                                              \
                if (k + EXCHANGE_AHEAD < count) __builtin_prefetch(&target[indices[k + EXCHANGE_AHEAD]], 1);      \
                before[k] = target[indices[k]];                                                                   \
                target[indices[k]] = values[k];                                                                   \
            }                                                                                                     \
            for (int64_t k = first; k < last; k++)                                                                \
                wrong += *(volatile uint##bits##_t *)&target[indices[k]] != values[k];                            \
        }                                                                                                         \
        return wrong;                                                                                             \
    }
EXCHANGE(8)
EXCHANGE(16)
EXCHANGE(32)
EXCHANGE(64)

int64_t rose_exchange(void *target, int64_t n, int32_t width, const int64_t *indices, const void *values,
                      void *before, int64_t count) {
    if (n < 0 || count < 0) return ROSE_MISUSE;
    switch (width) {
    case 1: return exchange_8(target, n, indices, values, before, count);
    case 2: return exchange_16(target, n, indices, values, before, count);
    case 4: return exchange_32(target, n, indices, values, before, count);
    case 8: return exchange_64(target, n, indices, values, before, count);
    default: return ROSE_MISUSE;
    }
}

int64_t rose_bytes_pack_bound(int64_t n) { return 8 + 2 * n; }

int64_t rose_bytes_pack(const uint8_t *plane, int64_t n, const rose_encoder_symbol *table, uint8_t *out,
                        int64_t out_capacity) {
    if (!elements_in_range(n) || out_capacity < rose_bytes_pack_bound(n)) return ROSE_MISUSE;
    return kernels()->bytes_pack(plane, n, table, out, out_capacity);
}

int64_t rose_bytes_unpack(const uint8_t *coded, int64_t coded_bytes, const uint32_t *table, uint8_t *plane,
                          int64_t n) {
    if (!elements_in_range(n) || coded_bytes < 0) return ROSE_MISUSE;
    return kernels()->bytes_unpack(coded, coded_bytes, table, plane, n);
}
