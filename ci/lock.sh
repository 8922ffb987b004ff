#!/usr/bin/env bash
# Compiles requirements/dev.lock from requirements/dev.in, for Python 3.12 and 3.13 at once. Needs uv.
# Arguments go to uv, e.g. --upgrade or --upgrade-package torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { printf 'lock: %s\n' "$*" >&2; exit 1; }
uv --version >/dev/null 2>&1 || fail "uv is not on PATH; install it to recompile the lock."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for version in 3.12 3.13; do
    cp requirements/dev.lock "$scratch/$version" # the pins in force stay unless asked otherwise
    uv pip compile requirements/dev.in --no-header --no-emit-index-url --no-emit-find-links \
        --python-version "$version" --output-file "$scratch/$version" --quiet "$@" ||
        fail "requirements/dev.in has no solution for Python $version, see above."
done
pins() { grep -v '^ *#' "$1"; } # what asked for a package may differ, the package may not
diff <(pins "$scratch/3.12") <(pins "$scratch/3.13") ||
    fail "Python 3.12 and 3.13 need different pins (above); the lock is one for both."
mv "$scratch/3.12" requirements/dev.lock
