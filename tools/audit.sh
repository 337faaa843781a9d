#!/usr/bin/env bash
# Ask for known vulnerabilities of what requirements/*.txt pin.  Needs an index of them: PyPI's own, or another by
# arguments (-s osv); what could not be looked up is a failure, not a pass, and is said to be that.
set -euo pipefail
cd "$(dirname "$0")/.."

audit=("${VENV:-.venv}/bin/pip-audit" --disable-pip --require-hashes --progress-spinner off --strict)
for list in cpu dev docs audit mooncake; do
    printf 'pip-audit: requirements/%s.txt\n' "$list"
    if ! said=$("${audit[@]}" -r "requirements/$list.txt" "$@" 2>&1); then
        printf '%s\n' "$said" >&2
        case $said in
            *"could not be audited"* | *ConnectionError* | *"Max retries"* | *"service error"*)
                printf 'pip-audit: no index of vulnerabilities answers here: NOTHING was looked up\n' >&2 ;;
        esac
        exit 1
    fi
    printf '%s\n' "$said"
done
