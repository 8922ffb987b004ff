#!/usr/bin/env bash
# Breaks the code in many small ways, one at a time in a copy of the tree, and says which breaks no test noticed.
# usage: bash ci/mutants.sh [--rooms a,b] [--seed N] [--per-room N] [--total N] [--jobs N] [--table FILE]
# By hand, for it takes hours; one that was stopped goes on where it was. See ci/mutant_runs.py --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash ci/env.sh >&2
unset PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE=1
exec .venv/bin/python ci/mutant_runs.py "$@"
