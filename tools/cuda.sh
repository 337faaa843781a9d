#!/usr/bin/env bash
# Compile the CUDA sources for the GPUs ROSE is meant for, where there is an nvcc; nothing is kept.
# ROSE itself compiles them where they run, through CuPy.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v nvcc >/dev/null; then
    echo 'cuda: no nvcc here, the CUDA sources were not compiled'
    exit 0
fi
output=$(mktemp -d)
trap 'rm -rf "$output"' EXIT
for source in kernels/rose_kernels/*/*.cu; do
    for architecture in sm_80 sm_90; do
        nvcc -std=c++17 -arch="$architecture" -Werror all-warnings -Xptxas -warn-spills \
            -cubin -o "$output/kernel.cubin" "$source"
        echo "cuda: $source compiles for $architecture"
    done
done
