#!/usr/bin/env bash
# Ask for known vulnerabilities of what requirements/*.txt pin; needs an index of them (PyPI's, or OSV with ARGS).
set -euo pipefail
cd "$(dirname "$0")/.."

audit=("${VENV:-.venv}/bin/pip-audit" --disable-pip --no-deps --progress-spinner off)
for list in cpu dev docs audit mooncake; do
    printf 'pip-audit: requirements/%s.txt\n' "$list"
    "${audit[@]}" --require-hashes -r "requirements/$list.txt" "$@"
done
