/* Kernels in plain C, for every little-endian machine. */
#include "common.h"
#include "kernels.h"

#define ROSE_NAME(f) portable_##f
#define ROSE_TARGET
#define ROSE_MASKS 0
#include "chunk_parts.h"
#include "chunk_impl.h"

const rose_kernels rose_kernels_portable = {
    portable_scan, portable_symbolise, portable_pack, portable_unpack, portable_bytes_pack, portable_bytes_unpack,
};
