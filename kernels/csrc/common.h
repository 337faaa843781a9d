/* What every kernel shares: the integer rules of docs/delta-format.md, and bounded readers and writers. */
#ifndef ROSE_COMMON_H
#define ROSE_COMMON_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "rose_delta.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernels are for little-endian machines; ROSE uses its NumPy reference on others"
#endif

#define ROSE_INLINE static inline __attribute__((always_inline, unused))
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

#define SLOT_BITS 12
#define STATE_LOW (1u << 15) /* a coder's state lies in [2^15, 2^31) */
#define STATE_HIGH (1u << 31)
#define CONTEXTS_MAX (ROSE_CLASSES_MAX * ROSE_GROUPS_MAX)

ROSE_INLINE uint16_t load16(const uint8_t *p) {
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}
ROSE_INLINE uint32_t load32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}
ROSE_INLINE uint64_t load64(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Bits of an element as an integer that grows with its value: sign and magnitude made two's complement, and back. */
ROSE_INLINE uint32_t order16(uint32_t bits) { return bits ^ (0x7fffu & (0u - (bits >> 15))); }
ROSE_INLINE uint32_t order8(uint32_t bits) { return bits ^ (0x7fu & (0u - (bits >> 7))); }

/* A step other than 0, as 2 * (|step| - 1) + (step < 0). */
ROSE_INLINE uint32_t step_code(int32_t step) {
    int32_t sign = step >> 31;
    return (uint32_t)(2 * (((step ^ sign) - sign) - 1) - sign);
}
ROSE_INLINE uint32_t step16(uint32_t base, uint32_t target) {
    return step_code((int16_t)(uint16_t)(order16(target) - order16(base)));
}
ROSE_INLINE uint32_t step8(uint32_t base, uint32_t target) {
    return step_code((int8_t)(uint8_t)(order8(target) - order8(base)));
}
ROSE_INLINE uint32_t stepped16(uint32_t base, uint32_t step) {
    uint32_t size = (step >> 1) + 1, negative = 0u - (step & 1);
    return order16((order16(base) + ((size ^ negative) - negative)) & 0xffff);
}
ROSE_INLINE uint32_t stepped8(uint32_t base, uint32_t step) {
    uint32_t size = (step >> 1) + 1, negative = 0u - (step & 1);
    return order8((order8(base) + ((size ^ negative) - negative)) & 0xff);
}

ROSE_INLINE int log2_floor(uint32_t v) { return 31 - __builtin_clz(v); }

/* Symbols: small numbers stand for themselves, larger ones for a power of two and its next 2 (or 1) bits. */
ROSE_INLINE uint32_t gap_symbol(uint32_t gap, int *raw_bits) {
    int shift = log2_floor(gap | 4) - 2;
    *raw_bits = shift;
    return 4u * (uint32_t)shift + (gap >> shift);
}
ROSE_INLINE uint32_t magnitude_symbol(uint32_t magnitude, int *raw_bits) {
    if (magnitude < 8) {
        *raw_bits = 0;
        return magnitude;
    }
    int e = log2_floor(magnitude);
    *raw_bits = e - 1;
    return 8u + 2u * (uint32_t)(e - 3) + ((magnitude >> (e - 1)) & 1u);
}

/* ---- raw bits, least significant first ---- */

typedef struct {
    uint8_t *p;
    uint64_t held;
    int count;
} bit_writer;

ROSE_INLINE void put_bits(bit_writer *w, uint32_t bits, int count) {
    w->held |= (uint64_t)bits << w->count;
    w->count += count;
    if (w->count >= 32) {
        uint32_t low = (uint32_t)w->held;
        memcpy(w->p, &low, 4);
        w->p += 4;
        w->held >>= 32;
        w->count -= 32;
    }
}
ROSE_INLINE void flush_bits(bit_writer *w) {
    for (; w->count > 0; w->count -= 8, w->held >>= 8) *w->p++ = (uint8_t)w->held;
    w->count = 0;
}

typedef struct {
    const uint8_t *p;
    uint64_t bytes;
    uint64_t position; /* in bits; may run past the end, which the caller checks once at the end */
} bit_reader;

ROSE_INLINE uint32_t get_bits(bit_reader *r, int count) {
    uint64_t at = r->position >> 3, word;
    if (LIKELY(at + 8 <= r->bytes)) {
        word = load64(r->p + at);
    } else {
        word = 0;
        for (uint64_t i = 0; at + i < r->bytes; i++) word |= (uint64_t)r->p[at + i] << (8 * i);
    }
    word >>= r->position & 7;
    r->position += (uint64_t)count;
    return (uint32_t)(word & ((1ull << count) - 1));
}

/* Whether exactly all bits were read, apart from less than a byte of zeros. */
ROSE_INLINE int bits_finished(const bit_reader *r) {
    if ((r->position + 7) >> 3 != r->bytes) return 0;
    return (r->position & 7) == 0 || r->p[r->bytes - 1] >> (r->position & 7) == 0;
}

/* ---- variable-length integers: 7 bits a byte, least significant first ---- */

ROSE_INLINE uint8_t *put_varint(uint8_t *p, uint32_t v) {
    for (; v >= 128; v >>= 7) *p++ = (uint8_t)(v | 128);
    *p++ = (uint8_t)v;
    return p;
}
/* NULL where the bytes end too early or the number has more than 32 bits. */
ROSE_INLINE const uint8_t *get_varint(const uint8_t *p, const uint8_t *end, uint32_t *value) {
    uint64_t v = 0;
    for (int shift = 0; shift < 35; shift += 7) {
        if (p == end) return 0;
        v |= (uint64_t)(*p & 127) << shift;
        if (!(*p++ & 128)) {
            if (v > UINT32_MAX) return 0;
            *value = (uint32_t)v;
            return p;
        }
    }
    return 0;
}
ROSE_INLINE uint32_t zigzag(int32_t v) { return ((uint32_t)v << 1) ^ (v < 0 ? UINT32_MAX : 0); }
ROSE_INLINE int64_t unzigzag(uint32_t v) { return (int64_t)(v >> 1) ^ -(int64_t)(v & 1); }

/* ---- static rANS with 12-bit frequencies, 16-bit words and two alternating states ---- */

/* Encode one symbol; words are written downwards.  The caller gave room for one word per symbol. */
ROSE_INLINE uint32_t encode_symbol(uint32_t x, const rose_encoder_symbol *s, uint8_t **words) {
    if (x >= s->x_max) {
        uint16_t word = (uint16_t)x;
        *words -= 2;
        memcpy(*words, &word, 2);
        x >>= 16;
    }
    uint32_t quotient = (uint32_t)(((uint64_t)x * s->reciprocal) >> 32) >> s->shift;
    return x + s->bias + quotient * s->complement;
}

typedef struct {
    const uint8_t *words, *end; /* end - words is even */
    uint32_t x, other;          /* the state of the next symbol, and of the one after it */
    uint32_t starved;           /* a word was wanted after the last one */
} symbol_reader;

/* Decode one symbol.  Without branches, as whether a word is due cannot be predicted.  Two bytes lie before
 * `words`: where none is left, they are read and not used. */
ROSE_INLINE uint32_t decode_symbol(symbol_reader *r, const uint32_t *table) {
    uint32_t entry = table[r->x & (ROSE_SLOTS - 1)];
    uint32_t x = ((entry & 4095) + 1) * (r->x >> SLOT_BITS) + ((entry >> 12) & 4095);
    uint32_t wanted = (x - STATE_LOW) >> 31, none = r->words == r->end; /* x is below 2^31 */
    uint32_t refilled = (x << 16) | load16(r->words - 2 * (size_t)none);
    r->words += 2 * (size_t)(wanted & ~none);
    r->starved |= wanted & none;
    r->x = r->other;
    r->other = x ^ ((x ^ refilled) & (0u - wanted));
    return entry >> 24;
}

#endif
