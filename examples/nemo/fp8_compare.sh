#!/usr/bin/env bash
# Trains the BF16 recipe as it is and in FP8 on the same data, and judges the two: exit code 1 if FP8 strays.
# usage: bash examples/nemo/fp8_compare.sh delayed|current|blockwise OUT [--scale-down] [key=value ...] [-- torchrun ...]
# On a CPU, with emulated FP8 (the second seed is the noise below which a small model's loss tells nothing):
#   bash examples/nemo/fp8_compare.sh delayed runs/compare --scale-down
set -euo pipefail
control=$(dirname "${BASH_SOURCE[0]}")/llama3_8b_bf16.yaml
scaling=${1:?delayed, current or blockwise} out=${2:?folder of the runs}
shift 2
case $scaling in
    delayed) precision=bf16_with_fp8_delayed_scaling_mixed emulate=delayed ;;
    current) precision=bf16_with_fp8_current_scaling_mixed emulate=current ;;
    blockwise) precision=bf16_with_fp8_subchannel_scaling_mixed emulate=block ;;
    *) echo "$scaling: give delayed, current or blockwise" >&2; exit 2 ;;
esac
fp8=(--emulate none --fp8-flags "mixed_precision=$precision")
case " $* " in *" --scale-down "*) fp8=(--emulate "$emulate" --noise-seed 4321) ;; esac
exec megatron-stability compare --out "$out" "${fp8[@]}" --json "$out.json" -- nemo "$control" "$@"
