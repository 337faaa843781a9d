/* Kernels of the ROSE weight delta codec: the interface of the shared library.
 *
 * The format is specified in docs/delta-format.md and its oracle is rose_kernels.delta.reference; these kernels
 * give the same bytes.  Every function is pure: no globals written, no allocation, no locale, no errno.  The
 * caller passes every buffer with its size, and sizes are checked before the first access, so that neither a
 * dense chunk nor a hostile payload can reach past them.  Safe to call from several threads at once.
 */
#ifndef ROSE_DELTA_H
#define ROSE_DELTA_H

#include <stdint.h>

#define ROSE_DELTA_ABI 1

#define ROSE_CHUNK_ELEMENTS_MAX (1 << 18)
#define ROSE_CLASSES_MAX 8         /* of positions, and of values, by exponent */
#define ROSE_GROUPS_MAX 4          /* of the history: never changed, or how long ago */
#define ROSE_GAP_SYMBOLS 68
#define ROSE_VALUE_SYMBOLS 64
#define ROSE_BYTE_SYMBOLS 256
#define ROSE_SLOTS 4096            /* 12-bit frequencies */

/* Results below zero. */
#define ROSE_CORRUPT (-1)          /* the payload is not one that an encoder writes */
#define ROSE_MISUSE (-2)           /* a buffer is too small or an argument out of range */

/* How an element is looked at; built from the group's tables, see docs/delta-format.md. */
typedef struct {
    uint8_t width;                 /* bytes per element: 1 or 2 */
    uint8_t exponent_shift;        /* exponent = (bits >> shift) & mask */
    uint8_t exponent_mask;
    uint8_t classes;               /* 1 .. ROSE_CLASSES_MAX */
    uint8_t groups;                /* 1 without history, else 2 .. ROSE_GROUPS_MAX */
    uint8_t value_classes;         /* 1 .. ROSE_CLASSES_MAX */
    uint8_t reserved[2];
    uint8_t thresholds[8];         /* classes - 1 of them, rising, none 0; then 0 */
    uint8_t class_of[256];         /* exponent -> class */
    uint8_t value_class_of[256];   /* exponent -> value class */
    uint8_t group_of[16];          /* history -> group */
} rose_map;

/* One symbol of an encoder's table: division by its frequency done as a multiplication. */
typedef struct {
    uint32_t x_max;                /* renormalise at or above; 0 for a symbol with frequency 0 */
    uint32_t reciprocal;
    uint32_t bias;
    uint16_t complement;
    uint16_t shift;
} rose_encoder_symbol;

#if defined(_WIN32)
#define ROSE_API
#else
#define ROSE_API __attribute__((visibility("default")))
#endif

ROSE_API int32_t rose_delta_abi(void);

/* Choose the kernels: 0 portable, 1 the fastest this CPU runs.  Returns the one now used (0 or 1). */
ROSE_API int32_t rose_delta_use(int32_t fastest);

/* Tables from `tables` x `symbols` frequencies; each row sums to ROSE_SLOTS or is all 0.
 * Decoder entry: frequency - 1 (12 bits), slot - start (12 bits), symbol (8 bits; 255 where the row is empty). */
ROSE_API int64_t rose_encoder_tables(const uint16_t *frequencies, int64_t tables, int64_t symbols,
                                     rose_encoder_symbol *out);
ROSE_API int64_t rose_decoder_tables(const uint16_t *frequencies, int64_t tables, int64_t symbols, uint32_t *out);

/* A span is `n` elements in chunks of `chunk_elements`, the last one shorter; `chunks` of them.  Bases and targets
 * are aligned to their element.  `history` has one byte per element, and is NULL exactly if map->groups is 1.
 * `..._ends[chunk]` is where a chunk's part of an outcome ends, in elements or bytes from the span's start. */

/* Encode, first pass: find and describe the changed elements.
 * counts[chunks][classes * groups]; gap_symbols, value_symbols, value_contexts: n each; raw: 4 * n + 16 * chunks.
 * Histograms ([context][symbol]) are added to.  Returns the number of changed elements. */
ROSE_API int64_t rose_scan(const rose_map *map, const void *base, const void *target, const uint8_t *history,
                           int64_t n, int64_t chunk_elements, uint8_t *scratch, int64_t scratch_bytes,
                           uint32_t *counts, uint8_t *gap_symbols, uint8_t *value_symbols, uint8_t *value_contexts,
                           uint32_t *gap_histogram, uint32_t *value_histogram, uint8_t *raw, int64_t raw_capacity,
                           int64_t *raw_ends);
ROSE_API int64_t rose_scan_scratch_bytes(int64_t chunk_elements);

/* The same from changes that were listed elsewhere, by chunk and in order of position: places[k] is the rank, the
 * context << 18 and the value context << 23; steps[k] the number that is coded for the step, 2 * (|step| - 1) +
 * (step < 0) with flips made.  `ends[chunk]` counts changes.  Histograms are of no use after ROSE_MISUSE, which
 * also stands for a list that no elements have. */
ROSE_API int64_t rose_symbolise(const rose_map *map, const uint32_t *places, const uint16_t *steps,
                                const int64_t *ends, int64_t chunks, uint8_t *scratch, int64_t scratch_bytes,
                                uint32_t *counts, uint8_t *gap_symbols, uint8_t *value_symbols,
                                uint8_t *value_contexts, uint32_t *gap_histogram, uint32_t *value_histogram,
                                uint8_t *raw, int64_t raw_capacity, int64_t *raw_ends);

/* Encode, second pass: the payloads of a span, one after the other.  Returns their length together.
 * `changed` elements are described, by tables of as many contexts as given. */
ROSE_API int64_t rose_pack(const uint32_t *counts, const uint32_t *expected, int64_t contexts, int64_t chunks,
                           const uint8_t *gap_symbols, const uint8_t *value_symbols, const uint8_t *value_contexts,
                           int64_t changed, const uint8_t *raw, const int64_t *raw_ends,
                           const rose_encoder_symbol *gap_tables, const rose_encoder_symbol *value_tables,
                           int64_t value_contexts_count, uint8_t *out, int64_t out_capacity, int64_t *out_ends);
ROSE_API int64_t rose_pack_bound(int64_t changed, int64_t raw_bytes, int64_t contexts, int64_t chunks);

/* Decode the payloads of a span against its base, of which nothing is written.  indices and values: n each;
 * indices rise and count from `first`.  Returns the number of changed elements, or ROSE_CORRUPT. */
ROSE_API int64_t rose_unpack(const rose_map *map, const uint8_t *payloads, const int64_t *payload_ends,
                             const void *base, const uint8_t *history, int64_t n, int64_t chunk_elements,
                             int64_t first, const uint32_t *expected, const uint32_t *gap_tables,
                             const uint32_t *value_tables, uint8_t *scratch, int64_t scratch_bytes,
                             int64_t *indices, void *values, int64_t *found_ends);
ROSE_API int64_t rose_unpack_scratch_bytes(int64_t chunk_elements);

/* Decode into the base itself, chunk by chunk: each is decoded whole before it is written.  After ROSE_CORRUPT the
 * chunks before the damaged one have been written, so the caller checks the payloads' digests first. */
ROSE_API int64_t rose_apply(const rose_map *map, const uint8_t *payloads, const int64_t *payload_ends, void *base,
                            const uint8_t *history, int64_t n, int64_t chunk_elements, const uint32_t *expected,
                            const uint32_t *gap_tables, const uint32_t *value_tables, uint8_t *scratch,
                            int64_t scratch_bytes);
ROSE_API int64_t rose_apply_scratch_bytes(int64_t chunk_elements);

/* Write values at indices; all indices are checked against n before the first write. */
ROSE_API int64_t rose_scatter(void *target, int64_t n, int32_t width, const int64_t *indices, const void *values,
                              int64_t count);

/* The same, for words of 1, 2, 4 or 8 bytes: what was there goes to `before`, and every word is read back once it
 * was written, while it is in the cache.  Returns how many words read back other than written. */
ROSE_API int64_t rose_exchange(void *target, int64_t n, int32_t width, const int64_t *indices, const void *values,
                               void *before, int64_t count);

/* Order-0 coding of one byte plane.  Returns the length of the coded bytes, or ROSE_CORRUPT. */
ROSE_API int64_t rose_bytes_pack(const uint8_t *plane, int64_t n, const rose_encoder_symbol *table, uint8_t *out,
                                 int64_t out_capacity);
ROSE_API int64_t rose_bytes_pack_bound(int64_t n);
ROSE_API int64_t rose_bytes_unpack(const uint8_t *coded, int64_t coded_bytes, const uint32_t *table, uint8_t *plane,
                                   int64_t n);

#endif
