#!/usr/bin/env bash
# Install the Debian packages that some tests need, where that is possible; the tests say what they skip without.
#
#   libibverbs1   Mooncake Store is linked against it (the relay of kind mooncake)
#   iperf3        measures the emulated link beside which `rose bench link` is judged
set -euo pipefail

missing=()
for package in libibverbs1 iperf3; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    printf 'debian: not installed, and only root can: apt-get install %s\n' "${missing[*]}" >&2
    exit 0
fi
printf 'debian: installing %s\n' "${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get install -y -qq --no-install-recommends "${missing[@]}" ||
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; }; } >/dev/null 2>&1; then
    printf 'debian: could not be installed: %s\n' "${missing[*]}" >&2
fi
