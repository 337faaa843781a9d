"""Kernels: `rose_kernels.delta`, the weight delta codec, and `rose_kernels.arena`, memory that moves between engines."""
