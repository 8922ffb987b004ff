#!/usr/bin/env bash
#SBATCH --job-name=fp8-delayed --nodes=1 --gpus-per-node=8 --ntasks-per-node=1 --exclusive
# Delayed scaling: scales from the last 1024 steps' amax. Then its BF16 control and the comparison.
# usage: DATA="..." OUT=/shared/fp8 bash examples/h100/fp8_delayed.sh        or: sbatch the same file, from this project's root
here=${SLURM_SUBMIT_DIR:+$SLURM_SUBMIT_DIR/examples/h100}
source "${here:-$(dirname "$0")}/common.sh"
against_control delayed --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 1024 --fp8-amax-compute-algo max
