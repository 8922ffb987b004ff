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
x = torch.randn(64, 333, generator=g) * torch.logspace(-9, 3, 333)
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


@pytest.mark.parametrize("row", [0, 128], ids=["one scale", "a scale a row"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_kernel_keeps_to_its_registers_on_an_h100(
    dtype: str, row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_stability.numerics.fp8 import triton as fp8_triton
    from megatron_stability.numerics.fp8.formats import E4M3
    from tests.unit.numerics.compiled import resources

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"x_ptr": f"*{dtype}", "scale_ptr": "*fp32", "out_ptr": "*fp64", "elements": "i64"}
    constants = {
        "row": row,
        "largest_value": E4M3.max,
        "least_normal": E4M3.least_normal,
        "shift": 1.5 * 2.0 ** (23 - E4M3.mantissa_bits),
        "BLOCK": fp8_triton.BLOCK,
        "ROUNDS": fp8_triton.ROUNDS,
    }
    registers, *spills = resources(fp8_triton._kernel, types, constants, fp8_triton.WARPS, tmp_path)
    assert spills == [0, 0]
    assert registers <= 80  # 3 programs of 8 warps fit into an SM's 65,536 registers
