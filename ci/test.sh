#!/usr/bin/env bash
# Every check of the project, cheap ones first; each of two lanes stops at its first stage that fails.
# usage: bash ci/test.sh [--fast | --all | --release]
# --fast      what runs on one process: no ranks, no pretraining; for between two commits
# --all       also the rare tests, more examples a property, each supported Transformer Engine, and ten mutants; nightly
# --release   also that every committed result is of the code as it is
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
what=everyday
case "$#:${1:-}" in
    0:) ;;
    1:--fast | 1:--all | 1:--release) what=${1#--} ;;
    *) echo "usage: bash ci/test.sh [--fast | --all | --release]" >&2; exit 2 ;;
esac
[ -t 1 ] && bold=$'\033[1m' plain=$'\033[0m' || bold="" plain=""
summary=$(mktemp)
trap 'rm -f "$summary"' EXIT

stage() { # stage NAME COMMAND...
    local name=$1 began=$SECONDS rc=0 took
    shift
    printf '%s== %s%s\n' "$bold" "$name" "$plain"
    "$@" || rc=$?
    took=$((SECONDS - began))
    printf '%6d s  %s\n' "$took" "$name" >>"$summary"
    [ "$rc" = 0 ] || { printf '\n%s\ntest.sh: stage "%s" failed after %d s (exit code %d).\n' "$(cat "$summary")" "$name" "$took" "$rc" >&2; exit 1; }
}

side_by_side() { # FIRST SECOND, two lanes of stages; FIRST's output comes when both have ended
    local log rc=0
    log=$(mktemp)
    ("$1") >"$log" 2>&1 &
    ("$2") || rc=$?
    wait $! || rc=$?
    cat "$log"
    rm -f "$log"
    [ "$rc" = 0 ] || exit "$rc"
}

types() { stage "mypy" "$bin/mypy"; }
imports() {
    stage "ruff: lint" "$bin/ruff" check --quiet .
    stage "ruff: format" "$bin/ruff" format --check --quiet .
    stage "import-linter" "$bin/lint-imports"
    stage "pure rooms on plain torch" "$bin/python" ci/bare_import.py
}

bad_input=(tests/e2e/test_bad_input.py) # it ends before training
alone() { stage "tests: units" "$bin/python" -m pytest tests/unit; }
beside() {
    imports
    types
    stage "tests: adapter, patches, bad input" "$bin/python" -m pytest tests/adapter tests/patches "${bad_input[@]}"
}
processes() {
    alone
    stage "tests: adapter, patches, bad input" "$bin/python" -m pytest tests/adapter tests/patches "${bad_input[@]}"
    stage "tests: dist" "$bin/python" -m pytest tests/dist
}
runs() {
    stage "tests: e2e" "$bin/python" -m pytest tests/e2e --ignore="${bad_input[0]}"
    stage "tests: nemo" nemo
    stage "tests: Transformer Engine's Python" bash ci/te_env.sh ${te[@]+"${te[@]}"}
}
nemo() { # Megatron-Bridge stands in an overlay of its own
    if [ "$("$bin/python" -c 'import sys; print(sys.version_info[:2])')" != "(3, 12)" ]; then
        echo "skipped: megatron-bridge 0.6.2 needs Python 3.12" >&2
        return 0
    fi
    bash ci/nemo_env.sh && PYTHONPATH=$PWD/.nemo TORCH_COMPILE_DISABLE=1 "$bin/python" -m pytest tests/nemo
}

# Whatever the caller's shell carries, the tests see this tree's code and no user-site packages.
unset PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE  # importing Megatron takes 8 s from bytecode, 24 s from source
export PYTHONNOUSERSITE=1
bin=.venv/bin

te=(2.20.2)
[ "$what" = everyday ] || [ "$what" = fast ] || { te=(); export TESTS=all; }

stage "environment" bash ci/env.sh
[ "$what" != release ] || stage "results" "$bin/python" -m benchmarks.results
if [ "$what" = fast ]; then
    side_by_side alone beside
else
    side_by_side types imports
    side_by_side processes runs
fi
[ -z "${TESTS:-}" ] || stage "ten mutants" bash ci/mutants.sh --total 10 --results "$(mktemp -d)/mutants.jsonl"
printf '\n%s\n%6d s  all stages passed\n' "$(cat "$summary")" "$SECONDS"
