#!/usr/bin/env bash
# One GPU, at most 8 minutes: the quickstart's model through the same code without the CPU backend, and what a step costs.
# usage: bash benchmarks/gpu/smoke.sh [--out DIR]
# Needs: python3 with torch >= 2.11 and CUDA. No Transformer Engine. Nothing is fetched: what is missing comes from
# benchmarks/wheels/, which `bash benchmarks/gpu/smoke.sh --collect` fills on a machine that reaches a registry.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${MEGATRON_STABILITY_PYTHON:-python3}
wheels=benchmarks/wheels
if [ "${1:-}" = --collect ]; then
    # Megatron and its pure dependencies, without torch and what torch brings.
    grep -E '^[a-z]' requirements/dev.lock | grep -vE '^(torch|nvidia-|cuda-|triton|sympy|mpmath|networkx)' > "$wheels.txt"
    "$python" -m pip download --no-deps --only-binary :all: --dest "$wheels" --requirement "$wheels.txt"
    rm "$wheels.txt"
    exit 0
fi
out=gpu-smoke-out
if [ "${1:-}" = --out ]; then out=${2:?"--out needs a folder"}; fi
mkdir -p "$out"
"$python" - <<'PY' || exit 2
import sys
try:
    import torch
except ImportError:
    sys.exit("gpu_smoke: this python has no torch; set MEGATRON_STABILITY_PYTHON to one that has torch >= 2.11 with CUDA")
if not torch.cuda.is_available():
    sys.exit("gpu_smoke: torch sees no CUDA device here")
print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}")
PY
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [ -d "$wheels" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --target "$site" "$wheels"/*.whl
fi
export PYTHONPATH="$PWD:$site" CUDA_DEVICE_MAX_CONNECTIONS=1

echo "== quickstart model on CUDA, three faults (3 skips expected)"
timeout 200 "$python" -m benchmarks.gpu.quickstart --out "$out/quickstart"
echo "== step overhead"
timeout 240 "$python" -m benchmarks.step_overhead --device cuda --hidden-size 2048 --steps 60 --json "$out/step_overhead.json"
echo "== FP8: emulated products against torch._scaled_mm, bandwidth of the statistics kernel"
timeout 120 "$python" -m benchmarks.gpu.fp8 --json "$out/fp8_gpu.json"
echo "results in $out"
