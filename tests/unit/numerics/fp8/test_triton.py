"""The Triton kernel on a GPU, or where there is none under Triton's interpreter, in a process of its own: its switch
counts at import."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[4]

SCRIPT = """
import json, math, sys
import torch
from megatron_stability.numerics.fp8 import triton as fp8_triton
from megatron_stability.numerics.fp8.formats import E4M3, E5M2
from megatron_stability.numerics.fp8.stats import tensor_stats

device = sys.argv[1]
g = torch.Generator().manual_seed(0)
x = torch.randn(300, 333, generator=g) * torch.logspace(-9, 3, 333)
x[3, 5], x[50, 0], x[51, 0], x[:, 100], x[:, 101] = math.nan, math.inf, -math.inf, 0.0, -0.0
pairs = []
for fmt in (E4M3, E5M2):
    for y in (x, x.bfloat16(), x.t()):
        for scale in (torch.tensor([7.0]), torch.logspace(-2, 2, y.shape[0])):
            kernel = fp8_triton.tensor_stats(y.to(device), scale.to(device), fmt)
            pairs.append((kernel.tolist(), tensor_stats(y, scale, fmt).tolist()))
json.dump(pairs, sys.stdout)
"""


def test_kernel_equals_the_cpu_pass() -> None:
    gpu = torch.cuda.is_available()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | ({} if gpu else {"TRITON_INTERPRET": "1"})
    script = [sys.executable, "-c", SCRIPT, "cuda" if gpu else "cpu"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    pairs = json.loads(done.stdout)
    assert len(pairs) == 12
    for kernel, cpu in pairs:
        assert kernel[:6] == cpu[:6]
        assert kernel[6:] == pytest.approx(cpu[6:], rel=1e-5)
