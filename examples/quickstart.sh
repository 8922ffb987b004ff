#!/usr/bin/env bash
# Trains a small GPT twice on this machine's CPU, stock Megatron and with the plugin, and writes a report of both.
# usage: bash examples/quickstart.sh [--out DIR]      (default: quickstart-out in the current folder)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
refuse() { printf 'quickstart: %s\n' "$*" >&2; exit 2; }

out=quickstart-out
case "${1:-}" in
    -h | --help) sed -n '2,3s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
    --out) [ -n "${2:-}" ] || refuse "--out needs a folder."; out=$2; shift 2 ;;
    --out=?*) out=${1#--out=}; shift ;;
esac
[ $# = 0 ] || refuse "unknown argument '$1'; the only option is --out DIR."

# Before any work: can the report be written there? Asked of the folder, or of the nearest parent that exists.
nearest=$out
until [ -e "$nearest" ] || [ -L "$nearest" ]; do nearest=$(dirname -- "$nearest"); done
[ -d "$nearest" ] || refuse "--out $out cannot be a folder, because $nearest is not one; choose another."
{ probe=$(mktemp -d -- "$nearest/.quickstart-XXXXXX") && rmdir -- "$probe"; } 2>/dev/null ||
    refuse "--out $out is not writable; choose another folder."

unset PYTHONDONTWRITEBYTECODE  # importing Megatron takes 8 s from bytecode, 24 s from source
bash "$root/ci/env.sh"
exec "$root/.venv/bin/megatron-stability" quickstart --out "$out"
