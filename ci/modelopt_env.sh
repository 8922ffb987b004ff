#!/usr/bin/env bash
# NVIDIA ModelOpt in a folder of its own beside .venv: in .venv it would add seconds to every import of Megatron, which
# takes it where it finds it.   usage: bash ci/modelopt_env.sh COMMAND ...      COMMAND then finds modelopt
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { printf 'modelopt_env: %s\n' "$*" >&2; exit 1; }
python=.venv/bin/python
"$python" -c "" 2>/dev/null || fail "there is no .venv; run ci/env.sh first."
[ $# -gt 0 ] || fail "give it a command."
folder=.te/modelopt
if [ ! -d "$folder" ]; then
    rm -rf "$folder.new"
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder.new" \
        "nvidia-modelopt==0.47.0" "scipy==1.18.1" "pulp==3.3.2" "omegaconf==2.4.0" "antlr4-python3-runtime==4.9.3" \
        "nvidia-ml-py==13.615.71" || fail "installing ModelOpt failed, see above."
    mv "$folder.new" "$folder"
fi
PYTHONPATH="$PWD:$folder" exec "$@"
