/* 16-bit elements in blocks of 64 with AVX2 and BMI2: one bit mask per class instead of one step per element.
 *
 * Within a block, rank = changes of class counted before it + population count of the class's mask below the
 * element; and the element of a rank is a bit deposit into that mask.  Included by kernels_avx2.c after the types
 * of chunk_impl.h are known.
 */

/* Exponents of 32 elements, offset so that signed byte compares order them. */
ROSE_INLINE ROSE_TARGET __m256i exponents32(const uint16_t *p, __m128i shift, __m256i mask) {
    __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)p);
    __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)(p + 16));
    low = _mm256_and_si256(_mm256_srl_epi16(low, shift), mask);
    high = _mm256_and_si256(_mm256_srl_epi16(high, shift), mask);
    __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xD8);
    return _mm256_xor_si256(bytes, _mm256_set1_epi8((char)0x80));
}

ROSE_INLINE ROSE_TARGET uint32_t equal32(const uint16_t *a, const uint16_t *b) {
    __m256i low = _mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i *)(const void *)a),
                                     _mm256_loadu_si256((const __m256i *)(const void *)b));
    __m256i high = _mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i *)(const void *)(a + 16)),
                                      _mm256_loadu_si256((const __m256i *)(const void *)(b + 16)));
    return (uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8));
}
ROSE_INLINE ROSE_TARGET uint64_t changed64(const uint16_t *a, const uint16_t *b) {
    return ~((uint64_t)equal32(a, b) | (uint64_t)equal32(a + 32, b + 32) << 32);
}

typedef struct {
    __m128i shift;
    __m256i mask;
    __m256i below[ROSE_CLASSES_MAX - 1]; /* threshold - 1, offset; the largest byte where there is none */
} class_compare;

ROSE_INLINE ROSE_TARGET class_compare class_compare_of(const rose_map *map) {
    class_compare compare;
    compare.shift = _mm_cvtsi32_si128(map->exponent_shift);
    compare.mask = _mm256_set1_epi16(map->exponent_mask);
    for (int j = 0; j < ROSE_CLASSES_MAX - 1; j++) {
        int bound = j < map->classes - 1 ? map->thresholds[j] - 1 : 255;
        compare.below[j] = _mm256_set1_epi8((char)(bound ^ 0x80));
    }
    return compare;
}

/* A tile of blocks.  Elements of class c in block b are those at least at its lower threshold and not at the next
 * one: at_least[b][c] & ~at_least[b][c + 1]; at_least[b][0] are all, at_least[b][classes] none.  Likewise
 * before_least counts from the tile's start to each block, and `before` by class. */
#define TILE_BLOCKS 64
#define TILE (TILE_BLOCKS * BLOCK)
#define LINE 32 /* elements in a cache line */

typedef struct {
    uint64_t at_least[TILE_BLOCKS][ROSE_CLASSES_MAX + 1];
    uint16_t before_least[ROSE_CLASSES_MAX + 1][TILE_BLOCKS];
    uint16_t before[ROSE_CLASSES_MAX][TILE_BLOCKS];
    uint32_t counts[ROSE_CLASSES_MAX];     /* in this tile, by class */
    uint32_t first_rank[ROSE_CLASSES_MAX]; /* in the chunk before it */
    uint16_t positions[TILE + 8];          /* of changes, from the tile's start; some room for guesses */
    int changes;
    uint16_t late_positions[TILE + 8];     /* of the tile before it, whose values are still to be read */
    int late, late_read;
    const uint16_t *late_base;
    int64_t late_first;
    int64_t ahead, ahead_end; /* what to fetch before the next tile wants it, from this one's start */
} tile_view;

/* K is 1, 4 or 8: classes that the map lacks have no elements. */
ROSE_INLINE ROSE_TARGET void open_view(tile_view *tile, const int K) {
    tile->late = tile->late_read = 0;
    memset(tile->first_rank, 0, sizeof tile->first_rank);
    memset(tile->before_least[K], 0, sizeof tile->before_least[K]);
    for (int b = 0; b < TILE_BLOCKS; b++) tile->at_least[b][K] = 0;
}

ROSE_INLINE ROSE_TARGET uint64_t class_mask(const tile_view *tile, uint32_t b, uint32_t c) {
    return tile->at_least[b][c] & ~tile->at_least[b][c + 1];
}

/* The words of a block, made whole with zeros if it is the last: their exponent is below every threshold. */
ROSE_INLINE ROSE_TARGET const uint16_t *whole_block(const uint16_t *words, int64_t count, uint16_t *block) {
    if (LIKELY(count >= BLOCK)) return words;
    memset(block, 0, BLOCK * sizeof *block);
    memcpy(block, words, (size_t)count * sizeof *block);
    return block;
}

/* Fetch a line of the next tile's base, and of its target if there is one, into the second-level cache.  Called all
 * along a tile, a little each time: memory would stand still in the phases that read nothing new, and be waited for
 * afterwards. */
ROSE_INLINE ROSE_TARGET void fetch_ahead(tile_view *tile, const uint16_t *base, const uint16_t *target) {
    _mm_prefetch((const char *)(base + tile->ahead), _MM_HINT_T1);
    if (target) _mm_prefetch((const char *)(target + tile->ahead), _MM_HINT_T1);
    tile->ahead += tile->ahead < tile->ahead_end ? LINE : 0;
}
ROSE_INLINE void plan_ahead(tile_view *tile, int64_t left) {
    tile->ahead = left < TILE ? left - 1 : TILE;
    tile->ahead_end = left < 2 * TILE ? left - LINE : 2 * TILE - LINE;
}

/* Append the positions of set bits.  Four are written whether they exist or not (a missing one as 64), as most
 * blocks have fewer and a loop over them would be mispredicted at nearly every block. */
ROSE_INLINE ROSE_TARGET void list_bits(uint64_t bits, int b, tile_view *tile) {
    uint16_t *positions = tile->positions + tile->changes;
    const uint64_t second = _blsr_u64(bits), third = _blsr_u64(second), fourth = _blsr_u64(third);
    const uint64_t lower = _tzcnt_u64(bits) | _tzcnt_u64(second) << 16;
    const uint64_t upper = _tzcnt_u64(third) | _tzcnt_u64(fourth) << 16;
    const uint64_t placed = (lower | upper << 32) + (uint64_t)(b * BLOCK) * 0x0001000100010001u;
    tile->changes += __builtin_popcountll(bits);
    memcpy(positions, &placed, sizeof placed);
    positions += 4;
    for (bits = _blsr_u64(fourth); UNLIKELY(bits != 0); bits = _blsr_u64(bits))
        *positions++ = (uint16_t)(b * BLOCK + (int)_tzcnt_u64(bits));
}

/* Read the next value of the tile before. */
ROSE_INLINE ROSE_TARGET void read_late(tile_view *tile, chunk_reader *r, const rose_map *map) {
    const uint32_t at = tile->late_positions[tile->late_read++];
    ROSE_NAME(read_value)(r, map, 2, tile->late_base[at], tile->late_first + at, 0, 0);
}

/* Masks and counts of all the tile's blocks; and either the positions of its changes from a target, or, with a
 * reader, the values of the tile before: each waits for the one before it, which the work on a block hides. */
ROSE_INLINE ROSE_TARGET void view_tile(const rose_map *map, const class_compare *compare, const int K,
                                       const uint16_t *base, const uint16_t *target, int64_t left, tile_view *tile,
                                       chunk_reader *r) {
    uint32_t count[ROSE_CLASSES_MAX] = {0};
    uint16_t base_block[BLOCK], target_block[BLOCK];
    const int elements = left < TILE ? (int)left : TILE, blocks = (elements + BLOCK - 1) / BLOCK;
    tile->changes = 0;
    for (int b = 0; b < blocks; b++) {
        const int rest = elements - b * BLOCK;
        fetch_ahead(tile, base, target);
        const uint16_t *old = whole_block(base + b * BLOCK, rest, base_block);
        if (target) list_bits(changed64(old, whole_block(target + b * BLOCK, rest, target_block)), b, tile);
        if (r && tile->late_read < tile->late) read_late(tile, r, map);
        tile->at_least[b][0] = rest >= BLOCK ? ~0ull : (1ull << rest) - 1;
        tile->before_least[0][b] = (uint16_t)(b * BLOCK);
        if (K == 1) continue;
        const __m256i low = exponents32(old, compare->shift, compare->mask);
        const __m256i high = exponents32(old + 32, compare->shift, compare->mask);
#pragma GCC unroll 8
        for (int c = 1; c < K; c++) {
            const uint32_t first = (uint32_t)_mm256_movemask_epi8(_mm256_cmpgt_epi8(low, compare->below[c - 1]));
            const uint32_t second = (uint32_t)_mm256_movemask_epi8(_mm256_cmpgt_epi8(high, compare->below[c - 1]));
            const uint64_t at_least = (uint64_t)second << 32 | first;
            tile->at_least[b][c] = at_least;
            tile->before_least[c][b] = (uint16_t)count[c];
            count[c] += (uint32_t)__builtin_popcountll(at_least);
        }
    }
    count[0] = (uint32_t)elements;
    for (int c = 0; c < K; c++) {
        for (int b = blocks; b < TILE_BLOCKS; b++) tile->before_least[c][b] = (uint16_t)count[c];
        tile->counts[c] = count[c] - (c + 1 < K ? count[c + 1] : 0);
    }
    while (r && tile->late_read < tile->late) read_late(tile, r, map);
}
ROSE_INLINE void next_tile(tile_view *tile, const int K) {
    for (int c = 0; c < K; c++) tile->first_rank[c] += tile->counts[c];
}

/* ---- encode ---- */

ROSE_INLINE ROSE_TARGET void scan_tile(const rose_map *map, const class_compare *compare, const int K,
                                       const uint16_t *base, const uint16_t *target, int64_t left, tile_view *tile,
                                       change_log *log) {
    view_tile(map, compare, K, base, target, left, tile, 0);
    for (int k = 0; k < tile->changes; k++) {
        const uint32_t at = tile->positions[k], b = at / BLOCK, old = base[at];
        const uint32_t c = K == 1 ? 0 : map->class_of[(old >> map->exponent_shift) & map->exponent_mask];
        const uint64_t below = _bzhi_u64(class_mask(tile, b, c), at % BLOCK);
        const uint32_t before = (uint32_t)tile->before_least[c][b] - tile->before_least[c + 1][b];
        const uint32_t rank = tile->first_rank[c] + before + (uint32_t)__builtin_popcountll(below);
        ROSE_NAME(note_change)(log, map, 2, old, target[at], c, rank, 0, 0);
        fetch_ahead(tile, base, target);
        fetch_ahead(tile, base, target);
    }
    next_tile(tile, K);
}

ROSE_INLINE ROSE_TARGET void scan_tiles(const rose_map *map, const int K, const uint16_t *base,
                                        const uint16_t *target, int64_t n, change_log *out) {
    const class_compare compare = class_compare_of(map);
    change_log log = *out;
    tile_view tile;
    open_view(&tile, K);
    for (int64_t i = 0; i < n; i += TILE) {
        plan_ahead(&tile, n - i);
        scan_tile(map, &compare, K, base + i, target + i, n - i, &tile, &log);
    }
    *out = log;
}

ROSE_TARGET static void ROSE_NAME(scan_masks)(const rose_map *map, const void *base, const void *target, int64_t n,
                                              change_log *log) {
    if (map->classes == 1)
        scan_tiles(map, 1, base, target, n, log);
    else if (map->classes <= 4)
        scan_tiles(map, 4, base, target, n, log);
    else
        scan_tiles(map, 8, base, target, n, log);
}

/* ---- decode ---- */

/* The block that holds the element of this rank in the tile: the last one with no more of its class before it. */
ROSE_INLINE ROSE_TARGET uint32_t block_of(const uint16_t *before, uint32_t rank) {
    const __m256i wanted = _mm256_set1_epi16((short)rank), *rows = (const __m256i *)(const void *)before;
    __m256i a = _mm256_cmpgt_epi16(_mm256_loadu_si256(rows), wanted);
    __m256i b = _mm256_cmpgt_epi16(_mm256_loadu_si256(rows + 1), wanted);
    __m256i c = _mm256_cmpgt_epi16(_mm256_loadu_si256(rows + 2), wanted);
    __m256i d = _mm256_cmpgt_epi16(_mm256_loadu_si256(rows + 3), wanted);
    uint32_t first = (uint32_t)_mm256_movemask_epi8(_mm256_packs_epi16(a, b));
    uint32_t second = (uint32_t)_mm256_movemask_epi8(_mm256_packs_epi16(c, d));
    return TILE_BLOCKS - 1 - (uint32_t)__builtin_popcountll((uint64_t)second << 32 | first);
}

ROSE_INLINE ROSE_TARGET void resolve_tile(chunk_reader *r, const rose_map *map, const class_compare *compare,
                                          const int K, const uint16_t *base, int64_t first, int64_t left,
                                          rank_cursors *cursors, tile_view *tile) {
    uint64_t hits[TILE_BLOCKS] = {0};
    view_tile(map, compare, K, base, 0, left, tile, r);
#pragma GCC unroll 8
    for (int c = 0; c < K; c++) {
        const uint32_t *at = cursors->at[c];
        for (int b = 0; b < TILE_BLOCKS; b++)
            tile->before[c][b] = (uint16_t)(tile->before_least[c][b] - tile->before_least[c + 1][b]);
        for (; at < cursors->end[c] && *at - tile->first_rank[c] < tile->counts[c]; at++) {
            const uint32_t rank = *at - tile->first_rank[c];
            const uint32_t b = K == 1 ? rank / BLOCK : block_of(tile->before[c], rank);
            hits[b] |= _pdep_u64(1ull << ((rank - tile->before[c][b]) & 63), class_mask(tile, b, (uint32_t)c));
            fetch_ahead(tile, base, 0);
        }
        cursors->at[c] = at;
    }
    for (int b = 0; b < TILE_BLOCKS; b++) list_bits(hits[b], b, tile);
    memcpy(tile->late_positions, tile->positions, (size_t)tile->changes * sizeof tile->positions[0]);
    tile->late = tile->changes;
    tile->late_read = 0;
    tile->late_base = base;
    tile->late_first = first;
    next_tile(tile, K);
}

ROSE_INLINE ROSE_TARGET void resolve_tiles(chunk_reader *reader, const rose_map *map, const int K,
                                           const uint16_t *base, int64_t n, const uint32_t *ranks) {
    const class_compare compare = class_compare_of(map);
    chunk_reader r = *reader;
    rank_cursors cursors;
    tile_view tile;
    ROSE_NAME(open_cursors)(&cursors, &r, ranks, map->classes);
    open_view(&tile, K);
    for (int64_t i = 0; i < n; i += TILE) {
        plan_ahead(&tile, n - i);
        resolve_tile(&r, map, &compare, K, base + i, i, n - i, &cursors, &tile);
    }
    while (tile.late_read < tile.late) read_late(&tile, &r, map);
    *reader = r;
}

ROSE_TARGET static void ROSE_NAME(resolve_masks)(chunk_reader *r, const rose_map *map, const void *base, int64_t n,
                                                 const uint32_t *ranks) {
    if (map->classes == 1)
        resolve_tiles(r, map, 1, base, n, ranks);
    else if (map->classes <= 4)
        resolve_tiles(r, map, 4, base, n, ranks);
    else
        resolve_tiles(r, map, 8, base, n, ranks);
}
