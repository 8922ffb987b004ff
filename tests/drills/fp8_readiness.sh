#!/usr/bin/env bash
# A small GPT trained on Python's standard library, its checkpoint, and what `fp8-readiness` says of it with the real
# NVIDIA ModelOpt. Result: docs/drills/fp8_readiness.json.   usage: bash tests/drills/fp8_readiness.sh [OUT]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${1:-fp8-readiness-out} python=.venv/bin/python
mkdir -p "$out"
text=$("$python" -c "import sysconfig; print(sysconfig.get_paths()['stdlib'])")/asyncio
export PYTHONPATH=$PWD
[ -e "$out/data.idx" ] || "$python" -m megatron_stability.cli prepare-data "$text" --pattern '*.py' --output "$out/data"
flags=(--cpu --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear
    --swiglu --micro-batch-size 4 --global-batch-size 8 --train-iters 60 --lr 2e-3 --lr-warmup-iters 10 --seed 1234
    --attention-dropout 0 --hidden-dropout 0 --no-create-attention-mask-in-dataloader --num-workers 0 --bf16
    --data-path "$out/data" --split 90,10,0 --vocab-size 257 --null-tokenizer-eod-id 256
    --eval-interval 1000 --eval-iters 0 --log-interval 20)
[ -e "$out/checkpoint/latest_checkpointed_iteration.txt" ] ||
    "$python" -m megatron_stability.cli pretrain "${flags[@]}" --save "$out/checkpoint" --save-interval 60
bash ci/modelopt_env.sh "$python" -m megatron_stability.cli fp8-readiness "${flags[@]}" --load "$out/checkpoint" \
    --forwards 8 --json docs/drills/fp8_readiness.json
