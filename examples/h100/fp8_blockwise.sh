#!/usr/bin/env bash
#SBATCH --job-name=fp8-blockwise --nodes=1 --gpus-per-node=8 --ntasks-per-node=1 --exclusive
# Block scaling: 1x128 and 128x128 tiles (needs CUDA 12.9). Then its BF16 control and the comparison.
# usage: DATA="..." OUT=/shared/fp8 bash examples/h100/fp8_blockwise.sh        or: sbatch the same file, from this project's root
here=${SLURM_SUBMIT_DIR:+$SLURM_SUBMIT_DIR/examples/h100}
source "${here:-$(dirname "$0")}/common.sh"
against_control blockwise --fp8-format e4m3 --fp8-recipe blockwise
