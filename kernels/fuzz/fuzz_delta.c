/* Checks that valid inputs give the expected bytes both ways, then damages payloads, tables and bases in seeded ways
 * and decodes those; built with sanitizers, or for another machine, by run.py.
 *
 *   fuzz_delta SEEDS COUNT SEED
 *
 * Every buffer is allocated at its exact size, so that the address sanitizer sees the first byte read or written
 * outside.  Whatever decodes must be in order and in range, and decoding must not write into the base.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../csrc/rose_delta.h"

#define EXPECT(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "fuzz_delta: input %lld: %s\n", (long long)input_number, #condition); \
            abort(); \
        } \
    } while (0)

static int64_t input_number;

/* A valid input, as run.py wrote it. */
typedef struct {
    rose_map map;
    int64_t n, chunk_elements, chunks, payload_bytes;
    int has_history;
    void *base, *target;
    uint8_t *history, *payloads;
    int64_t *ends;
    uint32_t *expected;
    uint16_t *gap_frequencies, *value_frequencies;
} seed;

static uint64_t random_state;
static uint64_t random64(void) { /* splitmix64 */
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
static int64_t below(int64_t limit) { return limit > 0 ? (int64_t)(random64() % (uint64_t)limit) : 0; }

static void *taken(FILE *file, size_t bytes) {
    void *data = malloc(bytes ? bytes : 1);
    if (!data || fread(data, 1, bytes, file) != bytes) {
        fprintf(stderr, "fuzz_delta: the seeds end too early\n");
        exit(2);
    }
    return data;
}
static void *copied(const void *data, size_t bytes) {
    void *copy = malloc(bytes ? bytes : 1);
    memcpy(copy, data, bytes);
    return copy;
}

static int contexts_of(const seed *s) { return s->map.classes * s->map.groups; }
static int value_contexts_of(const seed *s) { return s->map.value_classes * s->map.groups; }
static size_t gaps_bytes(const seed *s) { return (size_t)contexts_of(s) * ROSE_GAP_SYMBOLS * 2; }
static size_t values_bytes(const seed *s) { return (size_t)value_contexts_of(s) * ROSE_VALUE_SYMBOLS * 2; }

static int read_seed(FILE *file, seed *s) {
    int64_t sizes[5];
    if (fread(sizes, 1, sizeof sizes, file) != sizeof sizes) return 0;
    s->n = sizes[0], s->chunk_elements = sizes[1], s->chunks = sizes[2], s->payload_bytes = sizes[3];
    s->has_history = sizes[4] != 0;
    void *map = taken(file, sizeof s->map);
    memcpy(&s->map, map, sizeof s->map);
    free(map);
    s->base = taken(file, (size_t)s->n * s->map.width);
    s->target = taken(file, (size_t)s->n * s->map.width);
    s->history = s->has_history ? taken(file, (size_t)s->n) : 0;
    s->expected = taken(file, (size_t)contexts_of(s) * 4);
    s->gap_frequencies = taken(file, gaps_bytes(s));
    s->value_frequencies = taken(file, values_bytes(s));
    s->ends = taken(file, (size_t)s->chunks * 8);
    s->payloads = taken(file, (size_t)s->payload_bytes);
    return 1;
}

/* Damage to bytes: flips, extremes, copies of other parts, runs of one value. */
static void damage(uint8_t *data, int64_t bytes) {
    static const uint8_t extremes[] = {0, 1, 0x7f, 0x80, 0xff};
    if (bytes <= 0) return;
    for (int64_t times = 1 + below(4); times; times--) {
        int64_t at = below(bytes), from = below(bytes), length = 1 + below(8);
        if (length > bytes - at) length = bytes - at;
        if (length > bytes - from) length = bytes - from;
        switch (below(5)) {
        case 0: data[at] ^= (uint8_t)(1u << below(8)); break;
        case 1: data[at] = extremes[below(5)]; break;
        case 2: memmove(data + at, data + from, (size_t)length); break;
        case 3: memset(data + at, extremes[below(5)], (size_t)length); break;
        default: data[at] = (uint8_t)random64();
        }
    }
}

/* Move frequency from one symbol to another: still a table, but another one. */
static void shift_frequencies(uint16_t *row, int symbols) {
    int from = (int)below(symbols), to = (int)below(symbols);
    uint16_t part = (uint16_t)below((int64_t)row[from] + 1);
    row[from] = (uint16_t)(row[from] - part);
    row[to] = (uint16_t)(row[to] + part);
}

static void check_found(const seed *s, int64_t found, const int64_t *indices, int64_t first) {
    EXPECT(found >= ROSE_MISUSE && found <= s->n);
    for (int64_t k = 0; k < found; k++) {
        EXPECT(indices[k] >= first && indices[k] < first + s->n);
        EXPECT(k == 0 || indices[k] > indices[k - 1]);
    }
}

/* Decode one damaged input both ways; the number of changes, or below 0 where it was refused. */
static int64_t decode(const seed *s, const uint8_t *payloads, const int64_t *ends, const uint32_t *gaps,
                      const uint32_t *values, const void *base, const uint8_t *history, const uint32_t *expected) {
    const size_t base_bytes = (size_t)s->n * s->map.width;
    const int64_t scratch_bytes = rose_unpack_scratch_bytes(s->chunk_elements);
    const int64_t apply_bytes = rose_apply_scratch_bytes(s->chunk_elements), first = below(2) * (1ll << 40);
    uint8_t *scratch = malloc((size_t)scratch_bytes), *apply_scratch = malloc((size_t)apply_bytes);
    int64_t *indices = malloc((size_t)s->n * 8 + 1), *found_ends = malloc((size_t)s->chunks * 8 + 1);
    void *new_values = malloc(base_bytes + 1), *held = copied(base, base_bytes);
    int64_t found = rose_unpack(&s->map, payloads, ends, base, history, s->n, s->chunk_elements, first, expected,
                                gaps, values, scratch, scratch_bytes, indices, new_values, found_ends);
    check_found(s, found, indices, first);
    EXPECT(memcmp(held, base, base_bytes) == 0);
    int64_t applied = rose_apply(&s->map, payloads, ends, held, history, s->n, s->chunk_elements, expected, gaps,
                                 values, apply_scratch, apply_bytes);
    EXPECT(applied == found);
    free(scratch), free(apply_scratch), free(indices), free(found_ends), free(new_values), free(held);
    return found;
}

/* The seed was encoded by other kernels: these must write the same bytes, and decode to the target. */
static void check_seed(const seed *s) {
    const int64_t n = s->n, contexts = contexts_of(s), value_contexts = value_contexts_of(s);
    const int64_t scratch_bytes = rose_scan_scratch_bytes(s->chunk_elements), raw_capacity = 4 * n + 16 * s->chunks;
    const size_t base_bytes = (size_t)n * s->map.width;
    uint8_t *scratch = malloc((size_t)scratch_bytes), *raw = malloc((size_t)raw_capacity);
    uint8_t *gap_symbols = malloc((size_t)n), *value_symbols = malloc((size_t)n), *value_of = malloc((size_t)n);
    uint32_t *counts = malloc((size_t)(s->chunks * contexts) * 4);
    uint32_t *gap_histogram = calloc((size_t)contexts * ROSE_GAP_SYMBOLS, 4);
    uint32_t *value_histogram = calloc((size_t)value_contexts * ROSE_VALUE_SYMBOLS, 4);
    int64_t *raw_ends = malloc((size_t)s->chunks * 8), *ends = malloc((size_t)s->chunks * 8);
    int64_t changed = rose_scan(&s->map, s->base, s->target, s->history, n, s->chunk_elements, scratch, scratch_bytes,
                                counts, gap_symbols, value_symbols, value_of, gap_histogram, value_histogram, raw,
                                raw_capacity, raw_ends);
    EXPECT(changed >= 0);
    rose_encoder_symbol *gap_tables = malloc((size_t)contexts * ROSE_GAP_SYMBOLS * sizeof *gap_tables);
    rose_encoder_symbol *value_tables = malloc((size_t)value_contexts * ROSE_VALUE_SYMBOLS * sizeof *value_tables);
    EXPECT(rose_encoder_tables(s->gap_frequencies, contexts, ROSE_GAP_SYMBOLS, gap_tables) == 0);
    EXPECT(rose_encoder_tables(s->value_frequencies, value_contexts, ROSE_VALUE_SYMBOLS, value_tables) == 0);
    const int64_t bound = rose_pack_bound(changed, raw_ends[s->chunks - 1], contexts, s->chunks);
    uint8_t *packed = malloc((size_t)bound);
    int64_t length = rose_pack(counts, s->expected, contexts, s->chunks, gap_symbols, value_symbols, value_of, changed,
                               raw, raw_ends, gap_tables, value_tables, value_contexts, packed, bound, ends);
    EXPECT(length == s->payload_bytes && memcmp(packed, s->payloads, (size_t)length) == 0);
    EXPECT(memcmp(ends, s->ends, (size_t)s->chunks * 8) == 0);
    uint32_t *gaps = malloc((size_t)contexts * ROSE_SLOTS * 4), *values = malloc((size_t)value_contexts * ROSE_SLOTS * 4);
    EXPECT(rose_decoder_tables(s->gap_frequencies, contexts, ROSE_GAP_SYMBOLS, gaps) == 0);
    EXPECT(rose_decoder_tables(s->value_frequencies, value_contexts, ROSE_VALUE_SYMBOLS, values) == 0);
    const int64_t apply_bytes = rose_apply_scratch_bytes(s->chunk_elements);
    uint8_t *apply_scratch = malloc((size_t)apply_bytes);
    void *applied = copied(s->base, base_bytes);
    EXPECT(rose_apply(&s->map, s->payloads, s->ends, applied, s->history, n, s->chunk_elements, s->expected, gaps,
                      values, apply_scratch, apply_bytes) == changed);
    EXPECT(memcmp(applied, s->target, base_bytes) == 0);
    free(scratch), free(raw), free(gap_symbols), free(value_symbols), free(value_of), free(counts);
    free(gap_histogram), free(value_histogram), free(raw_ends), free(ends), free(gap_tables), free(value_tables);
    free(packed), free(gaps), free(values), free(apply_scratch), free(applied);
}

static int64_t try_damaged(const seed *s) {
    const int what = (int)below(8); /* mostly payloads; also bases, histories, tables, counts, lengths */
    const size_t base_bytes = (size_t)s->n * s->map.width;
    int64_t bytes = s->payload_bytes;
    int64_t *ends = copied(s->ends, (size_t)s->chunks * 8);
    void *base = copied(s->base, base_bytes);
    uint8_t *history = s->history ? copied(s->history, (size_t)s->n) : 0;
    uint32_t *expected = copied(s->expected, (size_t)contexts_of(s) * 4);
    uint16_t *gap_rows = copied(s->gap_frequencies, gaps_bytes(s));
    uint16_t *value_rows = copied(s->value_frequencies, values_bytes(s));
    if (what == 4) damage(base, (int64_t)base_bytes);
    if (what == 5 && history) damage(history, s->n);
    if (what == 6) {
        for (int64_t times = 1 + below(20); times; times--) {
            shift_frequencies(gap_rows + below(contexts_of(s)) * ROSE_GAP_SYMBOLS, ROSE_GAP_SYMBOLS);
            shift_frequencies(value_rows + below(value_contexts_of(s)) * ROSE_VALUE_SYMBOLS, ROSE_VALUE_SYMBOLS);
        }
        if (!below(8)) memset(value_rows, 0, ROSE_VALUE_SYMBOLS * 2);
    }
    if (what == 7 && s->chunks) { /* cut the last payload, or move a border */
        int64_t chunk = below(s->chunks), start = chunk ? ends[chunk - 1] : 0;
        ends[chunk] = start + below(ends[chunk] - start + 1);
        for (int64_t later = chunk + 1; later < s->chunks; later++)
            if (ends[later] < ends[chunk]) ends[later] = ends[chunk];
        bytes = ends[s->chunks - 1];
    }
    if (what == 3) expected[below(contexts_of(s))] = (uint32_t)below(ROSE_CHUNK_ELEMENTS_MAX + 1);
    uint8_t *payloads = copied(s->payloads, (size_t)bytes);
    if (what < 3) damage(payloads, bytes);
    uint32_t *gaps = malloc((size_t)contexts_of(s) * ROSE_SLOTS * 4);
    uint32_t *values = malloc((size_t)value_contexts_of(s) * ROSE_SLOTS * 4);
    int64_t result = ROSE_CORRUPT;
    if (rose_decoder_tables(gap_rows, contexts_of(s), ROSE_GAP_SYMBOLS, gaps) == 0 &&
        rose_decoder_tables(value_rows, value_contexts_of(s), ROSE_VALUE_SYMBOLS, values) == 0)
        result = decode(s, payloads, ends, gaps, values, base, history, expected);
    free(ends), free(base), free(history), free(expected), free(gap_rows), free(value_rows);
    free(payloads), free(gaps), free(values);
    return result;
}

/* Byte planes: damaged words of any length against a valid table. */
static void try_plane(void) {
    uint16_t row[ROSE_BYTE_SYMBOLS] = {0};
    int left = ROSE_SLOTS;
    for (int s = 0; s < ROSE_BYTE_SYMBOLS - 1 && left; s++) {
        row[s] = (uint16_t)below(below(left + 1) + 1);
        left -= row[s];
    }
    row[ROSE_BYTE_SYMBOLS - 1] = (uint16_t)left;
    uint32_t *table = malloc(ROSE_SLOTS * 4);
    EXPECT(rose_decoder_tables(row, 1, ROSE_BYTE_SYMBOLS, table) == 0);
    const int64_t bytes = below(64), count = below(200);
    uint8_t *coded = malloc((size_t)bytes + !bytes), *plane = malloc((size_t)count + !count);
    for (int64_t i = 0; i < bytes; i++) coded[i] = (uint8_t)random64();
    if (bytes >= 8) coded[3] &= 0x7f, coded[7] &= 0x7f;
    int64_t result = rose_bytes_unpack(coded, bytes, table, plane, count);
    EXPECT(result == ROSE_CORRUPT || result == count);
    free(table), free(coded), free(plane);
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    FILE *file = fopen(argv[1], "rb");
    if (!file) return 2;
    static seed seeds[256];
    int count = 0;
    while (count < 256 && read_seed(file, &seeds[count])) count++;
    fclose(file);
    if (!count) return 2;
    for (int32_t fastest = 0; fastest < 2; fastest++) {
        rose_delta_use(fastest);
        for (int i = 0; i < count; i++) check_seed(&seeds[i]);
    }
    printf("fuzz_delta: %d valid inputs encode and decode as expected\n", count);
    const int64_t inputs = atoll(argv[2]);
    random_state = (uint64_t)atoll(argv[3]);
    int64_t accepted = 0;
    for (input_number = 0; input_number < inputs; input_number++) {
        rose_delta_use((int32_t)below(2));
        if (below(10) == 0)
            try_plane();
        else
            accepted += try_damaged(&seeds[below(count)]) >= 0;
    }
    printf("fuzz_delta: %lld damaged inputs, %lld of them decoded to something in range, no fault\n",
           (long long)inputs, (long long)accepted);
    return 0;
}
