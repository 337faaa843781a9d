/* The kernels of changes.cu on the host: each is called as `run_NAME(blocks, threads, its arguments...)`. */
#include "cuda_blocks.h"

#include "changes.cu"

#define RUN_COUNT(Word, suffix)                                                                                       \
    extern "C" void run_rose_count_##suffix(unsigned blocks, unsigned threads, const rose_map *map, const Word *base, \
                                            const Word *target, const unsigned char *history, long long n,            \
                                            long long chunk_elements, long long strips_per_chunk, long long strips,   \
                                            unsigned *counts) {                                                       \
        fibers::launch(blocks, threads, [=] {                                                                         \
            rose_count_##suffix(map, base, target, history, n, chunk_elements, strips_per_chunk, strips, counts);     \
        });                                                                                                           \
    }
#define RUN_LIST(Word, suffix)                                                                                        \
    extern "C" void run_rose_list_##suffix(                                                                           \
        unsigned blocks, unsigned threads, const rose_map *map, const Word *base, const Word *target,                 \
        const unsigned char *history, long long n, long long chunk_elements, long long strips_per_chunk,              \
        long long strips, const unsigned *before, const long long *starts, unsigned *places,                          \
        unsigned short *steps) {                                                                                      \
        fibers::launch(blocks, threads, [=] {                                                                         \
            rose_list_##suffix(map, base, target, history, n, chunk_elements, strips_per_chunk, strips, before,       \
                               starts, places, steps);                                                                \
        });                                                                                                           \
    }

RUN_COUNT(unsigned char, u8)
RUN_COUNT(unsigned short, u16)
RUN_LIST(unsigned char, u8)
RUN_LIST(unsigned short, u16)
