#!/usr/bin/env bash
# Ask for known vulnerabilities of what requirements/*.txt pin.  Needs an index of them: PyPI's own, or another by
# arguments (-s osv); what could not be looked up is a failure, not a pass.
set -euo pipefail
cd "$(dirname "$0")/.."

audit=("${VENV:-.venv}/bin/pip-audit" --disable-pip --no-deps --progress-spinner off --strict)
for list in cpu dev docs audit mooncake; do
    printf 'pip-audit: requirements/%s.txt\n' "$list"
    "${audit[@]}" --require-hashes -r "requirements/$list.txt" "$@"
done
