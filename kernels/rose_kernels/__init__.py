"""Kernels of ROSE: `delta`, the codec of weight deltas, and `arena`, memory that moves between engines."""
