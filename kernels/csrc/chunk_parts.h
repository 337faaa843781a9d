/* The parts of coding a chunk that look at elements one by one, and what they keep.  Included once per
 * instruction set, with
 *   ROSE_NAME(f)    the name of f in this instruction set
 *   ROSE_TARGET     the function attribute that allows its instructions
 */

#define BLOCK 64 /* elements looked at together */

/* The changed elements of a chunk in order of position. */
typedef struct {
    uint32_t *gaps;     /* rank distance to the previous change of the same context, minus 1 */
    uint16_t *steps;    /* 2 * (|step| - 1) + (step < 0) */
    uint8_t *contexts;  /* context of the position */
    uint8_t *value_contexts;
    int64_t count;
    uint32_t next[CONTEXTS_MAX]; /* rank after the last change, by context */
} change_log;

ROSE_INLINE ROSE_TARGET uint32_t ROSE_NAME(element)(const void *words, int64_t i, int width) {
    return width == 2 ? ((const uint16_t *)words)[i] : ((const uint8_t *)words)[i];
}

ROSE_INLINE ROSE_TARGET void ROSE_NAME(note_change)(change_log *log, const rose_map *map, int width, uint32_t base,
                                                    uint32_t target, uint32_t context, uint32_t rank, uint32_t group,
                                                    uint32_t flip) {
    int64_t k = log->count++;
    uint32_t exponent = (base >> map->exponent_shift) & map->exponent_mask;
    uint32_t step = width == 2 ? step16(base, target) : step8(base, target);
    log->gaps[k] = rank - log->next[context];
    log->next[context] = rank + 1;
    log->steps[k] = (uint16_t)(step ^ flip);
    log->contexts[k] = (uint8_t)context;
    log->value_contexts[k] = (uint8_t)(map->value_class_of[exponent] * map->groups + group);
}

/* Any width, with or without history: one element after the other. */
ROSE_INLINE ROSE_TARGET void ROSE_NAME(scan_each)(const rose_map *map, int width, const void *base, const void *target,
                                                  const uint8_t *history, int64_t n, change_log *log) {
    uint32_t rank[CONTEXTS_MAX] = {0};
    const uint32_t groups = map->groups;
    for (int64_t i = 0; i < n; i++) {
        uint32_t old = ROSE_NAME(element)(base, i, width), new = ROSE_NAME(element)(target, i, width);
        uint32_t past = history ? history[i] & 15 : 0, group = history ? map->group_of[past] : 0;
        uint32_t context = map->class_of[(old >> map->exponent_shift) & map->exponent_mask] * groups + group;
        uint32_t r = rank[context]++;
        /* A step is coded relative to the last one: odd history is a step down. */
        if (UNLIKELY(old != new)) ROSE_NAME(note_change)(log, map, width, old, new, context, r, group, group ? past & 1 : 0);
    }
}

/* An empty log for `most` changes, in scratch of which the first `most` words stay free. */
ROSE_INLINE ROSE_TARGET change_log ROSE_NAME(open_log)(uint8_t *scratch, int64_t most, uint8_t *value_contexts) {
    change_log log = {0};
    log.gaps = (uint32_t *)(void *)scratch + most;
    log.steps = (uint16_t *)(void *)(log.gaps + most);
    log.contexts = (uint8_t *)(log.steps + most);
    log.value_contexts = value_contexts;
    return log;
}

/* Log changes that were listed elsewhere; 0 if no chunk has them. */
ROSE_INLINE ROSE_TARGET int ROSE_NAME(read_list)(change_log *log, const rose_map *map, const uint32_t *places,
                                                 const uint16_t *steps, int64_t changed) {
    const uint32_t contexts = (uint32_t)map->classes * map->groups;
    const uint32_t value_contexts = (uint32_t)map->value_classes * map->groups;
    const uint32_t step_max = (1u << 8 * map->width) - 1;
    for (int64_t k = 0; k < changed; k++) {
        uint32_t rank = places[k] & (ROSE_CHUNK_ELEMENTS_MAX - 1), context = places[k] >> 18 & 31;
        uint32_t value_context = places[k] >> 23;
        if (UNLIKELY(context >= contexts || value_context >= value_contexts || steps[k] > step_max)) return 0;
        if (UNLIKELY(rank < log->next[context])) return 0;
        log->gaps[k] = rank - log->next[context];
        log->next[context] = rank + 1;
        log->steps[k] = steps[k];
        log->contexts[k] = (uint8_t)context;
        log->value_contexts[k] = (uint8_t)value_context;
    }
    log->count = changed;
    return 1;
}

/* Put gaps in order of context, turn both into symbols, and collect raw bits and histograms. */
ROSE_INLINE ROSE_TARGET int64_t ROSE_NAME(write_symbols)(const change_log *log, int contexts, uint32_t *sorted,
                                                     uint32_t *counts, uint8_t *gap_symbols, uint8_t *value_symbols,
                                                     uint32_t *gap_histogram, uint32_t *value_histogram,
                                                     uint8_t *raw) {
    const int64_t changed = log->count;
    uint32_t at[CONTEXTS_MAX], sum = 0;
    memset(counts, 0, (size_t)contexts * sizeof *counts);
    for (int64_t k = 0; k < changed; k++) counts[log->contexts[k]]++;
    for (int c = 0; c < contexts; c++) at[c] = sum, sum += counts[c];
    for (int64_t k = 0; k < changed; k++) sorted[at[log->contexts[k]]++] = log->gaps[k];
    bit_writer bits = {raw, 0, 0};
    int64_t k = 0;
    for (int c = 0; c < contexts; c++) {
        uint32_t *histogram = gap_histogram + (size_t)c * ROSE_GAP_SYMBOLS;
        for (int64_t end = k + counts[c]; k < end; k++) {
            int width;
            uint32_t gap = sorted[k], symbol = gap_symbol(gap, &width);
            gap_symbols[k] = (uint8_t)symbol;
            histogram[symbol]++;
            put_bits(&bits, gap & ((1u << width) - 1), width);
        }
    }
    for (k = 0; k < changed; k++) {
        int width;
        uint32_t magnitude = log->steps[k] >> 1, symbol = 2 * magnitude_symbol(magnitude, &width) + (log->steps[k] & 1);
        value_symbols[k] = (uint8_t)symbol;
        value_histogram[(size_t)log->value_contexts[k] * ROSE_VALUE_SYMBOLS + symbol]++;
        if (width) put_bits(&bits, magnitude & ((1u << width) - 1), width);
    }
    flush_bits(&bits);
    return bits.p - raw;
}

/* ---- decode ---- */

/* Everything that decoding a payload moves along. */
typedef struct {
    symbol_reader symbols;
    bit_reader bits;
    const uint32_t *value_tables;
    uint32_t counts[CONTEXTS_MAX];
    int64_t changed;
    uint32_t damaged;   /* a symbol or number that no encoder writes was met */
    int64_t first;      /* index of the chunk's first element */
    int64_t *indices;   /* outcome */
    void *values;
    int64_t found;
} chunk_reader;

static const uint8_t *ROSE_NAME(read_counts)(chunk_reader *r, const uint8_t *p, const uint8_t *end,
                                             const uint32_t *expected, int contexts, int64_t n) {
    for (int c = 0; c < contexts; c++) {
        uint32_t delta;
        p = get_varint(p, end, &delta);
        if (!p) return 0;
        int64_t count = (int64_t)expected[c] + unzigzag(delta);
        if (count < 0 || count > n - r->changed) return 0;
        r->counts[c] = (uint32_t)count;
        r->changed += count;
    }
    return p;
}

/* The ranks of all changes, by context; 0 if they are not rising below n. */
ROSE_INLINE ROSE_TARGET int ROSE_NAME(read_ranks)(chunk_reader *r, const uint32_t *gap_tables, int contexts, int64_t n,
                                                  uint32_t *ranks) {
    /* Per symbol: the smallest gap it stands for, and how many raw bits follow. */
    uint32_t smallest[256];
    uint8_t width[256];
    memset(smallest, 0xff, sizeof smallest);
    memset(width, 0, sizeof width);
    for (uint32_t s = 0; s < ROSE_GAP_SYMBOLS; s++) {
        uint32_t e = s < 8 ? 0 : 3 + ((s - 8) >> 2);
        smallest[s] = s < 8 ? s : (4u + ((s - 8) & 3u)) << (e - 2);
        width[s] = (uint8_t)(s < 8 ? 0 : e - 2);
    }
    symbol_reader symbols = r->symbols;
    bit_reader bits = r->bits;
    for (int c = 0; c < contexts; c++) {
        const uint32_t *table = gap_tables + (size_t)c * ROSE_SLOTS;
        uint64_t next = 0;
        for (uint32_t k = 0; k < r->counts[c]; k++) {
            uint32_t symbol = decode_symbol(&symbols, table);
            next += (uint64_t)smallest[symbol] + get_bits(&bits, width[symbol]);
            if (UNLIKELY(next >= (uint64_t)n)) return 0;
            *ranks++ = (uint32_t)next++;
        }
    }
    r->symbols = symbols;
    r->bits = bits;
    return 1;
}

ROSE_INLINE ROSE_TARGET void ROSE_NAME(read_value)(chunk_reader *r, const rose_map *map, int width, uint32_t base,
                                                   int64_t position, uint32_t group, uint32_t flip) {
    uint32_t exponent = (base >> map->exponent_shift) & map->exponent_mask;
    uint32_t context = (uint32_t)map->value_class_of[exponent] * map->groups + group;
    uint32_t symbol = decode_symbol(&r->symbols, r->value_tables + (size_t)context * ROSE_SLOTS);
    uint32_t magnitude = symbol >> 1;
    if (UNLIKELY(magnitude >= 8)) {
        uint32_t e = 3 + ((magnitude - 8) >> 1);
        if (UNLIKELY(symbol >= ROSE_VALUE_SYMBOLS)) r->damaged = 1, e = 3;
        magnitude = (2u + ((magnitude - 8) & 1u)) << (e - 1);
        magnitude |= get_bits(&r->bits, (int)e - 1);
        r->damaged |= magnitude >= 1u << (8 * width - 1);
    }
    uint32_t step = 2 * magnitude + ((symbol & 1) ^ flip);
    int64_t k = r->found++;
    r->indices[k] = r->first + position;
    if (width == 2)
        ((uint16_t *)r->values)[k] = (uint16_t)stepped16(base, step);
    else
        ((uint8_t *)r->values)[k] = (uint8_t)stepped8(base, step);
}

/* Where the next change of each context is. */
typedef struct {
    const uint32_t *at[CONTEXTS_MAX], *end[CONTEXTS_MAX];
    uint32_t next[CONTEXTS_MAX]; /* its rank, UINT32_MAX after the last */
} rank_cursors;

ROSE_INLINE ROSE_TARGET void ROSE_NAME(open_cursors)(rank_cursors *cursors, const chunk_reader *r,
                                                     const uint32_t *ranks, int contexts) {
    for (int c = 0; c < CONTEXTS_MAX; c++) {
        uint32_t count = c < contexts ? r->counts[c] : 0;
        cursors->at[c] = ranks;
        cursors->end[c] = ranks += count;
        cursors->next[c] = count ? *cursors->at[c] : UINT32_MAX;
    }
}
ROSE_INLINE ROSE_TARGET void ROSE_NAME(advance)(rank_cursors *cursors, uint32_t c) {
    cursors->next[c] = ++cursors->at[c] < cursors->end[c] ? *cursors->at[c] : UINT32_MAX;
}

ROSE_INLINE ROSE_TARGET void ROSE_NAME(resolve_each)(chunk_reader *r, const rose_map *map, int width, const void *base,
                                                     const uint8_t *history, int64_t n, const uint32_t *ranks) {
    uint32_t rank[CONTEXTS_MAX] = {0};
    const uint32_t groups = map->groups;
    rank_cursors cursors;
    ROSE_NAME(open_cursors)(&cursors, r, ranks, (int)(map->classes * groups));
    for (int64_t i = 0; i < n; i++) {
        uint32_t old = ROSE_NAME(element)(base, i, width), past = history ? history[i] & 15 : 0;
        uint32_t group = history ? map->group_of[past] : 0;
        uint32_t context = map->class_of[(old >> map->exponent_shift) & map->exponent_mask] * groups + group;
        if (UNLIKELY(rank[context]++ == cursors.next[context])) {
            ROSE_NAME(advance)(&cursors, context);
            ROSE_NAME(read_value)(r, map, width, old, i, group, group ? past & 1 : 0);
        }
    }
}
