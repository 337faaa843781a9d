"""NVIDIA MPS: serving and rollout on one GPU at once, instead of taking turns.  The operator opts in.

Every GPU has a control daemon of its own, on a path of its own: on the default path it would capture every
CUDA process of the host.  The operator starts it and the serving engine (`rose mps start`, `rose mps env`);
rosed gives the rollout engine its share, and ends it in an order that leaves the others' contexts whole.
"""
