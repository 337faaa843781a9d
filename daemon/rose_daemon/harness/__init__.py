"""What the demo and the benchmarks share: a whole ROSE host as child processes, load, and statistics."""
