/* One chunk, encoded and decoded, from chunk_parts.h.  Included once per instruction set, with ROSE_MASKS 1 where
 * scan_masks and resolve_masks exist for it.
 */

ROSE_TARGET static int64_t ROSE_NAME(scan)(const rose_map *map, const void *base, const void *target,
                                           const uint8_t *history, int64_t n, uint8_t *scratch, uint32_t *counts,
                                           uint8_t *gap_symbols, uint8_t *value_symbols, uint8_t *value_contexts,
                                           uint32_t *gap_histogram, uint32_t *value_histogram, uint8_t *raw,
                                           int64_t *raw_bytes) {
    uint32_t *sorted = (uint32_t *)(void *)scratch;
    change_log log = ROSE_NAME(open_log)(scratch, n, value_contexts);
#if ROSE_MASKS
    if (map->width == 2 && !history)
        ROSE_NAME(scan_masks)(map, base, target, n, &log);
    else
#endif
    if (map->width == 2)
        ROSE_NAME(scan_each)(map, 2, base, target, history, n, &log);
    else
        ROSE_NAME(scan_each)(map, 1, base, target, history, n, &log);
    *raw_bytes = ROSE_NAME(write_symbols)(&log, map->classes * map->groups, sorted, counts, gap_symbols,
                                          value_symbols, gap_histogram, value_histogram, raw);
    return log.count;
}

ROSE_TARGET static int64_t ROSE_NAME(symbolise)(const rose_map *map, const uint32_t *places, const uint16_t *steps,
                                                int64_t changed, uint8_t *scratch, uint32_t *counts,
                                                uint8_t *gap_symbols, uint8_t *value_symbols,
                                                uint8_t *value_contexts, uint32_t *gap_histogram,
                                                uint32_t *value_histogram, uint8_t *raw) {
    change_log log = ROSE_NAME(open_log)(scratch, changed, value_contexts);
    if (!ROSE_NAME(read_list)(&log, map, places, steps, changed)) return ROSE_MISUSE;
    return ROSE_NAME(write_symbols)(&log, map->classes * map->groups, (uint32_t *)(void *)scratch, counts,
                                    gap_symbols, value_symbols, gap_histogram, value_histogram, raw);
}

ROSE_TARGET static int64_t ROSE_NAME(pack)(const uint32_t *counts, const uint32_t *expected, int contexts,
                                           const uint8_t *gap_symbols, const uint8_t *value_symbols,
                                           const uint8_t *value_contexts, int64_t changed, const uint8_t *raw,
                                           int64_t raw_bytes, const rose_encoder_symbol *gap_tables,
                                           const rose_encoder_symbol *value_tables, uint8_t *out,
                                           int64_t out_capacity) {
    uint8_t *const words_end = out + out_capacity, *words = words_end;
    /* Symbol j belongs to state j % 2; they are encoded last to first. */
    uint32_t x = STATE_LOW, other = STATE_LOW, swap; /* x: of the symbol at hand */
    for (int64_t k = changed - 1; k >= 0; k--) {
        x = encode_symbol(x, value_tables + (size_t)value_contexts[k] * ROSE_VALUE_SYMBOLS + value_symbols[k], &words);
        swap = x, x = other, other = swap;
    }
    int64_t k = changed - 1;
    for (int c = contexts - 1; c >= 0; c--) {
        const rose_encoder_symbol *table = gap_tables + (size_t)c * ROSE_GAP_SYMBOLS;
        for (int64_t first = k - (int64_t)counts[c]; k > first; k--) {
            x = encode_symbol(x, table + gap_symbols[k], &words);
            swap = x, x = other, other = swap;
        }
    }
    /* 2 * changed symbols, an even number: `other` encoded symbol 0. */
    uint32_t first_state = other, second_state = x;
    uint8_t *p = out;
    for (int c = 0; c < contexts; c++) p = put_varint(p, zigzag((int32_t)(counts[c] - expected[c])));
    int64_t words_bytes = words_end - words;
    p = put_varint(p, (uint32_t)(words_bytes / 2));
    memcpy(p, &first_state, 4);
    memcpy(p + 4, &second_state, 4);
    p += 8;
    memmove(p, words, (size_t)words_bytes);
    p += words_bytes;
    memcpy(p, raw, (size_t)raw_bytes);
    return p + raw_bytes - out;
}

ROSE_TARGET static int64_t ROSE_NAME(unpack)(const rose_map *map, const uint8_t *payload, int64_t payload_bytes,
                                             const void *base, const uint8_t *history, int64_t n, int64_t first,
                                             const uint32_t *expected, const uint32_t *gap_tables,
                                             const uint32_t *value_tables, uint32_t *ranks, int64_t *indices,
                                             void *values) {
    chunk_reader r = {.value_tables = value_tables, .first = first, .indices = indices, .values = values};
    const uint8_t *const end = payload + payload_bytes;
    const int contexts = map->classes * map->groups;
    uint32_t words;
    const uint8_t *p = ROSE_NAME(read_counts)(&r, payload, end, expected, contexts, n);
    if (!p || !(p = get_varint(p, end, &words))) return ROSE_CORRUPT;
    if (end - p < 8 || (uint64_t)words * 2 > (uint64_t)(end - p - 8)) return ROSE_CORRUPT;
    r.symbols = (symbol_reader){p + 8, p + 8 + 2 * (size_t)words, load32(p), load32(p + 4), 0};
    if (r.symbols.x - STATE_LOW >= STATE_HIGH - STATE_LOW || r.symbols.other - STATE_LOW >= STATE_HIGH - STATE_LOW)
        return ROSE_CORRUPT;
    r.bits = (bit_reader){r.symbols.end, (uint64_t)(end - r.symbols.end), 0};
    if (!ROSE_NAME(read_ranks)(&r, gap_tables, contexts, n, ranks)) return ROSE_CORRUPT;
#if ROSE_MASKS
    if (map->width == 2 && !history)
        ROSE_NAME(resolve_masks)(&r, map, base, n, ranks);
    else
#endif
    if (map->width == 2)
        ROSE_NAME(resolve_each)(&r, map, 2, base, history, n, ranks);
    else
        ROSE_NAME(resolve_each)(&r, map, 1, base, history, n, ranks);
    /* Fewer elements of a context than its ranks promise leave changes unfound. */
    int whole = r.found == r.changed && !r.damaged && !r.symbols.starved && r.symbols.words == r.symbols.end &&
                r.symbols.x == STATE_LOW && r.symbols.other == STATE_LOW && bits_finished(&r.bits);
    return whole ? r.found : ROSE_CORRUPT;
}

/* ---- byte planes ---- */

ROSE_TARGET static int64_t ROSE_NAME(bytes_pack)(const uint8_t *plane, int64_t n, const rose_encoder_symbol *table,
                                                 uint8_t *out, int64_t out_capacity) {
    uint8_t *const words_end = out + out_capacity, *words = words_end;
    uint32_t states[2] = {STATE_LOW, STATE_LOW};
    for (int64_t k = n - 1; k >= 0; k--) states[k & 1] = encode_symbol(states[k & 1], table + plane[k], &words);
    memcpy(out, states, sizeof states);
    memmove(out + sizeof states, words, (size_t)(words_end - words));
    return (int64_t)sizeof states + (words_end - words);
}

ROSE_TARGET static int64_t ROSE_NAME(bytes_unpack)(const uint8_t *coded, int64_t coded_bytes, const uint32_t *table,
                                                   uint8_t *plane, int64_t n) {
    if (coded_bytes < 8 || coded_bytes & 1) return ROSE_CORRUPT;
    symbol_reader r = {coded + 8, coded + coded_bytes, load32(coded), load32(coded + 4), 0};
    if (r.x - STATE_LOW >= STATE_HIGH - STATE_LOW || r.other - STATE_LOW >= STATE_HIGH - STATE_LOW)
        return ROSE_CORRUPT;
    for (int64_t i = 0; i < n; i++) plane[i] = (uint8_t)decode_symbol(&r, table);
    return r.starved || r.words != r.end || r.x != STATE_LOW || r.other != STATE_LOW ? ROSE_CORRUPT : n;
}
