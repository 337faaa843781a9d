"""Kernels of the weight path and the memory arena.

Empty in this release: deltas are dense or coordinate lists (`rose.weights.container`), made with NumPy.  The
entropy codec with its NumPy, C and CUDA forms, and the arena, belong here.
"""
