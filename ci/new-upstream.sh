#!/usr/bin/env bash
# Tries a Megatron that has no diffs of its own: a row a seam, the names that the adapter reads, then tests on it.
# usage: bash ci/new-upstream.sh [--seams-only] [VERSION | PATH]      default: the newest release of the registry
# VERSION is taken as a wheel from the registry (pre-releases too), PATH is a clone's root or a site-packages folder.
# Ends with a row for the table in docs/porting.md. Exit code 0: all holds; 1: a seam, a name or a test does not;
# 2: there is no such Megatron. What the tests said is in build/upstream/NAME.log. Neither tree nor .venv is changed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { printf 'new-upstream: %s\n' "$*" >&2; exit 2; }
seams_only=""
[ "${1:-}" != --seams-only ] || { seams_only=yes; shift; }
[ $# -le 1 ] || fail "one VERSION or PATH, got $#; see the head of this file."
asked=${1:-}
python=$PWD/.venv/bin/python
"$python" -c "" 2>/dev/null || fail "there is no .venv; run ci/env.sh first."
work=$PWD/build/upstream
mkdir -p "$work"

if [ -n "$asked" ] && [ -d "$asked" ]; then
    root=$(cd "$asked" && pwd -P)
    name=$(basename "$root")
else
    download=$(mktemp -d "$work/.download-XXXXXX")
    trap 'rm -rf "$download"' EXIT
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --pre --only-binary :all: \
        --dest "$download" "megatron-core${asked:+==$asked}" >"$work/pip.log" 2>&1 ||
        fail "no wheel of megatron-core ${asked:-at all} for this Python (build/upstream/pip.log), nor a folder of that name."
    wheel=$(ls "$download"/*.whl)
    name=$(basename "$wheel" | cut -d- -f2)
    root=$work/$name
    [ -d "$root" ] || { "$python" -m zipfile -e "$wheel" "$root.new" && mv "$root.new" "$root"; } || fail "$wheel can't be unpacked."
fi

export PYTHONPATH=$root:$PWD PYTHONNOUSERSITE=1
log=$work/$name.log rc=0
"$python" -m megatron_stability patch check --target "$root" || rc=$?
[ "$rc" -le 1 ] || exit 2
json=$("$python" -m megatron_stability patch check --target "$root" --json)
row() { # $1: what the tests said
    "$python" - "$1" "$json" <<'PYTHON'
import json, sys
said, found = sys.argv[1], json.loads(sys.argv[2])
seams = found["seams"]
lost = [f"{s['seam']} ({s['state']})" for s in seams if s["state"] in ("gone", "changed")]
around = sorted({s["function"] for s in seams if s["function_changed"]})
missing = [need["what"] for need in found["missing"]]
cells = [
    found["megatron_core"],
    f"{len(seams) - len(lost)} of {len(seams)}",
    ", ".join(lost) or "none",
    ", ".join(missing) or "none",
    f"{len(around)}",
    said,
]
print("\nfunctions changed since", found["compared_with"] + ":", ", ".join(around) or "none")
print("| " + " | ".join(cells) + " |")
PYTHON
}
if [ "$rc" != 0 ] || [ -n "$seams_only" ]; then
    row "not run"
    exit "$rc"
fi

: >"$log"
passed=0 failed=""
try() { # NAME COMMAND...
    local what=$1
    shift
    if "$@" >>"$log" 2>&1; then passed=$((passed + 1)); else failed="$failed, $what"; fi
}
try "adapter" "$python" -m pytest tests/adapter -m "not known_release"
try "off is stock" "$python" -m pytest tests/e2e/equality/test_stock_equality.py -k "not 0.18.2"
try "a withheld step leaves no trace" "$python" -m pytest tests/e2e/equality/test_skip_equality.py -k "not older"
try "faults" "$python" -m pytest tests/e2e/incidents/test_faults.py
try "rewinds" "$python" -m pytest tests/e2e/incidents/test_rewind.py
try "quickstart" "$python" -m megatron_stability quickstart --out "$work/$name-quickstart"
[ -z "$failed" ] && row "$passed of 6 passed" || { row "$passed of 6 passed; failed: ${failed#, }"; rc=1; }
exit "$rc"
