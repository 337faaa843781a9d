/* The pages of ROSE's boards (the format is told in rose/boards.py): one writer, any number of readers, no lock.
 *
 * The words of a record are stored and loaded one by one, atomically, and the number of the record last, with
 * release and acquire: so a reader that finds the number finds the words, also on machines that reorder plain
 * accesses (arm64).  A record that is overwritten while it is read is known by its checksum.
 */
#ifndef ROSE_BOARDS_H
#define ROSE_BOARDS_H

#include <stdatomic.h>
#include <stdint.h>

#define ROSE_BOARD_WORDS_MAX 118

/* Results of reading. */
#define ROSE_BOARD_EMPTY 1
#define ROSE_BOARD_TORN 2
#define ROSE_BOARD_FOREIGN 3

/* What one reader or writer needs beside the page, and where its record lies. */
typedef struct {
    _Atomic uint64_t *page;
    uint64_t layout;                          /* 32 bits, as the page must say */
    uint64_t words;                           /* of a record, at most ROSE_BOARD_WORDS_MAX */
    uint64_t record[ROSE_BOARD_WORDS_MAX];
} rose_board;

/* Make `record` what every reader sees.  One writer at a time. */
void rose_board_publish(rose_board *board);

/* Fetch the latest record; 0, or one of ROSE_BOARD_* with `record` as it was. */
int32_t rose_board_read(rose_board *board);

/* A bell is the futex word, followed by the word that says whether somebody waits for nudges. */
void rose_bell_ring(_Atomic uint32_t *bell);
void rose_bell_nudge(_Atomic uint32_t *bell);
void rose_bell_await(_Atomic uint32_t *bell, uint32_t wanted);

#endif
