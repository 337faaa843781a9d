/* One end of a board, for an end in Python or on another machine type.
 *
 *     board_words FILE LAYOUT WORDS publish NUMBER      publish a record with NUMBER in every word
 *     board_words FILE LAYOUT WORDS read                print the record, or what is wrong with it
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "boards.h"

int main(int count, char **arguments) {
    if (count < 5) return 2;
    int file = open(arguments[1], O_RDWR);
    rose_board board = {.layout = strtoull(arguments[2], NULL, 10), .words = strtoull(arguments[3], NULL, 10)};
    board.page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file < 0 || board.page == MAP_FAILED || board.words > ROSE_BOARD_WORDS_MAX) return 2;
    if (!strcmp(arguments[4], "publish")) {
        for (uint64_t i = 0; i < board.words; i++) board.record[i] = strtoull(arguments[5], NULL, 10);
        rose_board_publish(&board);
        rose_bell_ring((_Atomic uint32_t *)((char *)board.page + 3072));
        return 0;
    }
    int trouble = rose_board_read(&board);
    if (trouble) printf("trouble %d\n", trouble);
    for (uint64_t i = 0; !trouble && i < board.words; i++) printf("%lld ", (long long)board.record[i]);
    return 0;
}
