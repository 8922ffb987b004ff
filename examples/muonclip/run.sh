#!/usr/bin/env bash
# A tiny GPT (GQA 8/2) under Muon at a learning rate that makes attention logits run away: without and with QK-clip.
# usage: bash examples/muonclip/run.sh [--out DIR] [--steps N] [--tau TAU]     (default: muonclip-out, 300 steps, 10)
# The toy data is learnt by heart by step 100; then gradients jump tenfold, and the spike detector would end the DP 2 run
# without QK-clip at step 187. So that all curves have 300 steps, it is off.
# Four runs on this machine's CPU, two layouts: DP 2 with the distributed optimizer, and TP 2 x PP 2. Then plot.py.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
refuse() { printf 'muonclip: %s\n' "$*" >&2; exit 2; }

out=muonclip-out steps=300 tau=10
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) sed -n '2,6s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
        --out | --steps | --tau) [ -n "${2:-}" ] || refuse "$1 needs a value."; printf -v "${1#--}" %s "$2"; shift 2 ;;
        *) refuse "unknown argument '$1'; see --help." ;;
    esac
done
[ -x "$root/.venv/bin/megatron-stability" ] || bash "$root/ci/env.sh"

train() { # name, processes, flags
    local name=$1 processes=$2
    shift 2
    "$root/.venv/bin/megatron-stability" pretrain --nproc "$processes" --cpu \
        --num-layers 2 --hidden-size 64 --num-attention-heads 8 --group-query-attention --num-query-groups 2 \
        --seq-length 64 --max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm \
        --disable-bias-linear --swiglu --attention-dropout 0 --hidden-dropout 0 --bf16 --seed 1234 \
        --micro-batch-size 4 --global-batch-size 8 --train-iters "$steps" --mock-data --vocab-size 63 \
        --optimizer muon --lr 0.003 --lr-decay-style constant --weight-decay 0 \
        --log-interval 50 --eval-iters 0 --eval-interval 100000 \
        --stability-detect-grad-norm-spike-enabled false --stability-observe-attention-every 25 \
        --stability-record-dir "$out/$name" "$@"
}

watch=(--stability-observe-attention-enabled true)
clip=(--stability-qk-clip-enabled true --stability-qk-clip-tau "$tau" --stability-qk-clip-headroom 0.5)
data_parallel=(--use-distributed-optimizer)
model_parallel=(--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2)
train dp2-without 2 "${data_parallel[@]}" "${watch[@]}"
train dp2-with 2 "${data_parallel[@]}" "${clip[@]}"
train tp2pp2-without 4 "${model_parallel[@]}" "${watch[@]}"
train tp2pp2-with 4 "${model_parallel[@]}" "${clip[@]}"
exec "$root/.venv/bin/python" "$root/examples/muonclip/plot.py" "$out" --tau "$tau"
