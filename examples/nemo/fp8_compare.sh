#!/usr/bin/env bash
# Trains a recipe in FP8 and its BF16 control on the same data, and judges the two: exit code 1 if FP8 strays.
# usage: bash examples/nemo/fp8_compare.sh delayed|current|blockwise OUT [--scale-down] [key=value ...] [-- torchrun ...]
# On a CPU:   bash examples/nemo/fp8_compare.sh delayed runs/compare --scale-down
set -euo pipefail
recipes=$(dirname "${BASH_SOURCE[0]}")
scaling=${1:?delayed, current or blockwise} out=${2:?folder of the runs}
shift 2
own=() starter=() # what comes after -- starts the ranks
while [ $# -gt 0 ] && [ "$1" != -- ]; do own+=("$1"); shift; done
starter=("$@")
for run in "fp8_$scaling" bf16; do
    megatron-stability nemo "$recipes/llama3_8b_$run.yaml" "${own[@]}" "stability.record.dir=$out/$run" "${starter[@]}"
done
warmup=() # of the gate; a run in small has 20 steps
case " ${own[*]} " in *" --scale-down "*) warmup=(--warmup 5 --max-loss-error 0.05) ;; esac
megatron-stability compare "$out/fp8_$scaling" "$out/bf16" "${warmup[@]}" --json "$out/compare.json"
