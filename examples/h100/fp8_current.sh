#!/usr/bin/env bash
#SBATCH --job-name=fp8-current --nodes=1 --gpus-per-node=8 --ntasks-per-node=1 --exclusive
# Current scaling: one scale a tensor, from the tensor itself. Then its BF16 control and the comparison.
# usage: DATA="..." OUT=/shared/fp8 bash examples/h100/fp8_current.sh        or: sbatch the same file, from this project's root
here=${SLURM_SUBMIT_DIR:+$SLURM_SUBMIT_DIR/examples/h100}
source "${here:-$(dirname "$0")}/common.sh"
against_control current --fp8-format hybrid --fp8-recipe tensorwise
