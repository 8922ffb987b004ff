#!/usr/bin/env bash
# Compiles requirements/dev.lock from requirements/dev.in, for Python 3.12 and 3.13 at once; with `nemo` as its first
# argument requirements/nemo.lock, which lies over the former. Needs uv.
# Further arguments go to uv, e.g. --upgrade or --upgrade-package torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { printf 'lock: %s\n' "$*" >&2; exit 1; }
uv --version >/dev/null 2>&1 || fail "uv is not on PATH; install it to recompile the lock."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
pins() { grep -v '^ *#' "$1"; } # what asked for a package may differ, the package may not

nemo() { # what nemo.in needs and .venv lacks, or has in a version that Megatron-Bridge can't take
    local unfit='transformers|huggingface-hub|tokenizers|omegaconf'
    local left_out='aio[a-z]*|s3fs|botocore|frozenlist|jmespath|multidict|propcache|wrapt|yarl|ninja' # see nemo.lock
    pins requirements/dev.lock | grep -vE "^($unfit)==" >"$scratch/constraints"
    cp requirements/nemo.lock "$scratch/nemo"
    uv pip compile requirements/nemo.in --constraint "$scratch/constraints" --no-header --no-annotate --no-emit-index-url \
        --no-emit-find-links --python-version 3.12 --output-file "$scratch/nemo" --quiet "$@" ||
        fail "requirements/nemo.in has no solution beside dev.lock, see above."
    {
        grep '^#' requirements/nemo.lock
        { comm -23 <(pins "$scratch/nemo" | sort) <(pins requirements/dev.lock | sort) | grep -vE "^($left_out)=="
          grep -oE '^# (megatron-bridge|nvidia-resiliency-ext)==[0-9.]+' requirements/nemo.in | cut -c3-; } | sort
    } >"$scratch/new"
    mv "$scratch/new" requirements/nemo.lock
}
[ "${1:-}" != nemo ] || { shift; nemo "$@"; exit; }

for version in 3.12 3.13; do
    cp requirements/dev.lock "$scratch/$version" # the pins in force stay unless asked otherwise
    uv pip compile requirements/dev.in --no-header --no-emit-index-url --no-emit-find-links \
        --python-version "$version" --output-file "$scratch/$version" --quiet "$@" ||
        fail "requirements/dev.in has no solution for Python $version, see above."
done
diff <(pins "$scratch/3.12") <(pins "$scratch/3.13") ||
    fail "Python 3.12 and 3.13 need different pins (above); the lock is one for both."
mv "$scratch/3.12" requirements/dev.lock
