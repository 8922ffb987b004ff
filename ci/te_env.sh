#!/usr/bin/env bash
# Tests against Transformer Engine's own Python, on a CPU: its base wheel, whose compiled module a stub stands in for
# (tests/te/stub.py), in folders of its own beside .venv, since megatron must never find it.
# usage: bash ci/te_env.sh [VERSION ...] [-- PYTEST ARGUMENTS]      default: every pinned version
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pinned=(2.14.0 2.15.0 2.20.2)
shared=("torchao==0.18.0" "nvdlfw-inspect==0.2.2")
shared+=("onnxscript==0.7.2" "onnx==1.23.2" "onnx-ir==1.1.0" "ml-dtypes==0.6.0" "einops==0.8.2") # TE imports them all
fail() { printf 'te_env: %s\n' "$*" >&2; exit 1; }

versions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do versions+=("$1"); shift; done
[ $# -eq 0 ] || shift
[ ${#versions[@]} -gt 0 ] || versions=("${pinned[@]}")
python=.venv/bin/python
"$python" -c "" 2>/dev/null || fail "there is no .venv; run ci/env.sh first."

install() { # $1: folder, made whole or not at all; the rest: packages, without what they depend on (torch is in .venv)
    local folder=$1
    shift
    [ ! -d "$folder" ] || return 0
    rm -rf "$folder.new"
    if uv --version >/dev/null 2>&1; then
        uv pip install --quiet --python "$python" --no-deps --target "$folder.new" "$@"
    else
        "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder.new" "$@"
    fi || fail "installing $* failed, see above."
    mv "$folder.new" "$folder"
}

install .te/shared "${shared[@]}"
for version in "${versions[@]}"; do
    install ".te/$version" "transformer_engine==$version"
    printf 'te_env: tests/te with transformer_engine %s\n' "$version" >&2
    NVTE_PROJECT_BUILDING=1 TORCHDYNAMO_DISABLE=1 PYTHONPATH="$PWD:.te/$version:.te/shared" \
        "$python" -m pytest tests/te "$@"
done
