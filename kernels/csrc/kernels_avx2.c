/* Kernels for x86-64 with AVX2, BMI1, BMI2 and POPCNT (every server CPU since 2015), chosen when the program runs. */
typedef int rose_kernels_avx2_not_empty; /* other machines compile nothing else here */

#if defined(__x86_64__)
#include <immintrin.h>

#include "common.h"
#include "kernels.h"

#define ROSE_NAME(f) avx2_##f
#define ROSE_TARGET __attribute__((target("avx2,bmi,bmi2,popcnt,lzcnt")))
#define ROSE_MASKS 1
#include "chunk_parts.h"
#include "masks_avx2.h"
#include "chunk_impl.h"

const rose_kernels rose_kernels_avx2 = {
    avx2_scan, avx2_symbolise, avx2_pack, avx2_unpack, avx2_bytes_pack, avx2_bytes_unpack,
};
#endif
