/* Boards in shared memory, see boards.h. */
#define _GNU_SOURCE
#include "boards.h"

#include <limits.h>
#include <linux/futex.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__GNUC__)
#define EXPORT __attribute__((visibility("default")))
#else
#define EXPORT
#endif

#define MAGIC UINT64_C(0x3144524245534F52) /* "ROSEBRD1" */
#define MAGIC_AT 0                         /* in words of 64 bits */
#define LAYOUT_AT 1
#define NUMBER_AT 4
#define SLOT_AT(number) ((number) & 1 ? 128 : 8)
#define ATTEMPTS 3

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "a lock would not reach other processes");

/* The CRC-32 of zlib, eight bytes at a time: folds[k] takes a byte that k more bytes follow. */
static uint32_t folds[8][256];

__attribute__((constructor)) static void make_folds(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
        folds[0][byte] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (int byte = 0; byte < 256; byte++)
            folds[k][byte] = folds[k - 1][byte] >> 8 ^ folds[0][folds[k - 1][byte] & 0xFF];
}

static uint32_t crc_of(const uint64_t *words, uint64_t count) {
    uint32_t crc = 0xFFFFFFFFu;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t next = words[i] ^ crc;
        crc = 0;
        for (int k = 0; k < 8; k++) crc ^= folds[7 - k][next >> 8 * k & 0xFF];
    }
    return ~crc;
}

static uint64_t load(_Atomic uint64_t *word) { return atomic_load_explicit(word, memory_order_relaxed); }
static void store(_Atomic uint64_t *word, uint64_t value) { atomic_store_explicit(word, value, memory_order_relaxed); }

EXPORT void rose_board_publish(rose_board *board) {
    uint64_t image[ROSE_BOARD_WORDS_MAX + 2], count = board->words + 1;
    uint64_t number = load(&board->page[NUMBER_AT]) + 1;
    _Atomic uint64_t *slot = &board->page[SLOT_AT(number)];
    image[0] = number;
    memcpy(&image[1], board->record, board->words * sizeof image[0]);
    image[count] = crc_of(image, count);
    for (uint64_t i = 0; i <= count; i++) store(&slot[i], image[i]);
    atomic_store_explicit(&board->page[NUMBER_AT], number, memory_order_release);
}

EXPORT int32_t rose_board_read(rose_board *board) {
    uint64_t image[ROSE_BOARD_WORDS_MAX + 2], count = board->words + 1;
    if (load(&board->page[MAGIC_AT]) != MAGIC || (uint32_t)load(&board->page[LAYOUT_AT]) != board->layout)
        return ROSE_BOARD_FOREIGN;
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        uint64_t number = atomic_load_explicit(&board->page[NUMBER_AT], memory_order_acquire);
        if (!number) return ROSE_BOARD_EMPTY;
        _Atomic uint64_t *slot = &board->page[SLOT_AT(number)];
        for (uint64_t i = 0; i <= count; i++) image[i] = load(&slot[i]);
        if (image[0] != number || image[count] != crc_of(image, count)) continue;
        memcpy(board->record, &image[1], board->words * sizeof image[0]);
        return 0;
    }
    return ROSE_BOARD_TORN;
}

static void wake(_Atomic uint32_t *bell) { syscall(SYS_futex, bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

/* Rings are counted in the low half of the word, and none is lost when several ring at once. */
EXPORT void rose_bell_ring(_Atomic uint32_t *bell) {
    uint32_t seen = atomic_load(bell);
    while (!atomic_compare_exchange_weak(bell, &seen, (seen & 0xFFFF0000u) | ((seen + 1) & 0xFFFFu))) continue;
    wake(bell);
}

/* Whoever waits first asks for nudges, then looks at the boards, then sleeps.  The fence stands between what was
 * published and the look at the question: either the one sees the publication, or the other sees the question. */
EXPORT void rose_bell_nudge(_Atomic uint32_t *bell) {
    atomic_thread_fence(memory_order_seq_cst);
    if (!atomic_load_explicit(&bell[1], memory_order_relaxed)) return;
    atomic_fetch_add(bell, 0x10000u);
    wake(bell);
}

EXPORT void rose_bell_await(_Atomic uint32_t *bell, uint32_t wanted) {
    atomic_store_explicit(&bell[1], wanted, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
}
