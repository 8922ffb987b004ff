# Sourced by the scripts beside it: one Llama-like 8B model, TP 2, sequence parallel, 8 H100s a node. Set DATA to the
# data flags (what `megatron-stability prepare-data` prints) and OUT to a folder that all nodes see.
set -euo pipefail
: "${DATA:?set DATA to the data flags that prepare-data printed}" "${OUT:?set OUT to a shared folder}"
steps=${STEPS:-2000}
nodes=${SLURM_NNODES:-${NODES:-1}}
export CUDA_DEVICE_MAX_CONNECTIONS=1 NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1 # delayed scaling's own checkpoint state

model=(--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --bf16
    --attention-dropout 0 --hidden-dropout 0)
training=(--micro-batch-size 1 --global-batch-size 128 --train-iters "$steps" --lr 3e-4 --min-lr 3e-5
    --lr-warmup-iters 200 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 --seed 1234
    --use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel --transformer-impl transformer_engine
    --eval-iters 20 --eval-interval "$steps" --log-interval 1 --tensorboard-log-interval 1
    --stability-observe-sketch-every 100)

train() { # train NAME FLAG...: one run into $OUT/NAME; under torchrun, or one srun task a node
    local name=$1
    shift
    mkdir -p "$OUT/$name"
    if [ -f "$OUT/$name/ledger.jsonl" ]; then echo "$OUT/$name holds a run already; it is taken as it is" >&2; return; fi
    local launch=(torchrun --nproc-per-node 8 --nnodes "$nodes")
    if [ -n "${SLURM_JOB_ID:-}" ]; then
        local head
        head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
        launch=(srun --ntasks-per-node 1 "${launch[@]}" --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID-$name")
    fi
    # shellcheck disable=SC2086 # DATA is a list of flags
    "${launch[@]}" -m megatron_stability pretrain "${model[@]}" "${training[@]}" $DATA --spec megatron_stability \
        --stability-record-dir "$OUT/$name" --tensorboard-dir "$OUT/$name/tensorboard" "$@"
}

against_control() { # against_control NAME FLAG...: the BF16 control, the FP8 run, and what the one says of the other
    local name=$1
    shift
    megatron-stability doctor --fp8
    train bf16
    train "$name" "$@"
    megatron-stability compare "$OUT/$name" "$OUT/bf16" --warmup 200 --max-slowdown 1.0 \
        --json "$OUT/$name.json" --html "$OUT/$name.html"
}
