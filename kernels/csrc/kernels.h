/* The kernels of one instruction set, as dispatch.c calls them. */
#ifndef ROSE_KERNELS_H
#define ROSE_KERNELS_H

#include "rose_delta.h"

typedef struct {
    int64_t (*scan)(const rose_map *map, const void *base, const void *target, const uint8_t *history, int64_t n,
                    uint8_t *scratch, uint32_t *counts, uint8_t *gap_symbols, uint8_t *value_symbols,
                    uint8_t *value_contexts, uint32_t *gap_histogram, uint32_t *value_histogram, uint8_t *raw,
                    int64_t *raw_bytes);
    int64_t (*symbolise)(const rose_map *map, const uint32_t *places, const uint16_t *steps, int64_t changed,
                         uint8_t *scratch, uint32_t *counts, uint8_t *gap_symbols, uint8_t *value_symbols,
                         uint8_t *value_contexts, uint32_t *gap_histogram, uint32_t *value_histogram, uint8_t *raw);
    int64_t (*pack)(const uint32_t *counts, const uint32_t *expected, int contexts, const uint8_t *gap_symbols,
                    const uint8_t *value_symbols, const uint8_t *value_contexts, int64_t changed, const uint8_t *raw,
                    int64_t raw_bytes, const rose_encoder_symbol *gap_tables,
                    const rose_encoder_symbol *value_tables, uint8_t *out, int64_t out_capacity);
    int64_t (*unpack)(const rose_map *map, const uint8_t *payload, int64_t payload_bytes, const void *base,
                      const uint8_t *history, int64_t n, int64_t first, const uint32_t *expected,
                      const uint32_t *gap_tables, const uint32_t *value_tables, uint32_t *ranks, int64_t *indices,
                      void *values);
    int64_t (*bytes_pack)(const uint8_t *plane, int64_t n, const rose_encoder_symbol *table, uint8_t *out,
                          int64_t out_capacity);
    int64_t (*bytes_unpack)(const uint8_t *coded, int64_t coded_bytes, const uint32_t *table, uint8_t *plane,
                            int64_t n);
} rose_kernels;

extern const rose_kernels rose_kernels_portable;
#if defined(__x86_64__)
extern const rose_kernels rose_kernels_avx2;
#endif

#endif
