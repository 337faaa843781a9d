"""Kernels of the weight path: `rose_kernels.delta`, the exponent-class delta codec, in NumPy and in C."""
