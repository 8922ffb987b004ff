#!/usr/bin/env bash
# Makes .nemo, the packages that Megatron-Bridge needs and .venv lacks or has in an unfit version, from
# requirements/nemo.lock; reuses it when nothing changed. It is an overlay: PYTHONPATH=.nemo .venv/bin/python ...
# Needs the .venv of ci/env.sh, on Python 3.12 (megatron-bridge 0.6.2 allows no other), and a package registry.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lock=requirements/nemo.lock
folder=.nemo
python=$PWD/.venv/bin/python
fail() { printf 'nemo_env: %s\n' "$*" >&2; exit 1; }
"$python" -c "" 2>/dev/null || fail "there is no .venv; run ci/env.sh first."
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$version" = 3.12 ] ||
    fail "megatron-bridge 0.6.2 needs Python 3.12 and .venv has $version; make it anew with MEGATRON_STABILITY_PYTHON=python3.12."

stamp=$({ cat "$lock" "${BASH_SOURCE[0]}"; printf '%s' "$PWD"; } | cksum)
[ "$(cat "$folder/.stamp" 2>/dev/null)" != "$stamp" ] || exit 0

# Two wheels carry the tag manylinux_2_39 (glibc 2.39), which an older machine's installer refuses; so the platform is
# named. megatron-bridge is pure Python; nvidia-resiliency-ext has one compiled module, a CUPTI profiler for straggler
# detection, which Bridge imports only on GPUs that ask for it: that one does need glibc 2.39.
machine=$(uname -m)
rm -rf "$folder.new"
if uv --version >/dev/null 2>&1; then
    uv pip install --quiet --python "$python" --no-deps --python-platform "$machine-manylinux_2_39" \
        --target "$folder.new" -r "$lock"
else
    platforms=(--platform "manylinux2014_$machine")
    for minor in $(seq 39 -1 17); do platforms+=(--platform "manylinux_2_${minor}_$machine"); done
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile "${platforms[@]}" --target "$folder.new" -r "$lock"
fi || fail "installing the packages of $lock failed, see above."
printf '%s\n' "$stamp" >"$folder.new/.stamp"
rm -rf "$folder"
mv "$folder.new" "$folder"
printf 'nemo_env: ready: %s\n' "$PWD/$folder" >&2
