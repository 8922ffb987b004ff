"""The fused pass against the torch passes: on a GPU, or under Triton's interpreter in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import json, math, sys
import torch
from megatron_stability.observe import fingerprint, fingerprint_triton
device = sys.argv[1]
if device == "cpu":
    fingerprint_triton.ROUNDS = 1
g = torch.Generator().manual_seed(0)
floats = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
found = []
for dtype in [*floats, torch.float8_e4m3fnuz, torch.uint8, torch.int64]:
    for elements in (1, 7, 8, 4099):  # the last takes two programs and more
        x = (torch.randn(elements, generator=g) * 30).to(dtype)
        for bad in (None, math.inf, -math.inf, math.nan) if dtype in floats[:4] else (None,):
            if bad is not None:
                x[elements // 2] = bad
            for y in (x, x[1:]):  # the second begins at no multiple of 8 bytes
                y = y.to(device) if y is x else x.to(device)[1:]
                fused = fingerprint.mixed_and_amax(y)
                want = fingerprint.mixed(y), fingerprint.amax(y)
                found.append([str(dtype), elements, str(bad), *(str(v.item()) for v in (*fused, *want))])
json.dump(found, sys.stdout)
"""


def test_the_kernel_gives_the_bits_and_the_magnitude_of_the_torch_passes() -> None:
    gpu = torch.cuda.is_available()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | ({} if gpu else {"TRITON_INTERPRET": "1"})
    script = [sys.executable, "-W", "ignore", "-c", SCRIPT, "cuda" if gpu else "cpu"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 2 * 4 * (4 * 4 + 5)
    assert [case for case in found if case[3:5] != case[5:7]] == []
    assert {case[4] for case in found} >= {"nan", "inf", "0.0"}


@pytest.mark.parametrize("element_bytes", [0, 1, 2, 4, 8])
def test_the_kernel_keeps_to_its_registers_on_an_h100(
    element_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_stability.observe import fingerprint, fingerprint_triton
    from tests.unit.numerics.compiled import resources

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {
        "lane": 8 * element_bytes,
        "magnitude": (1 << (8 * element_bytes - 1)) - 1 if element_bytes else 0,
        "double_golden": fingerprint._signed(2 * fingerprint._GOLDEN),
        "low": fingerprint._LOW,
        "BLOCK": fingerprint_triton.BLOCK,
        "ROUNDS": fingerprint_triton.ROUNDS,
    }
    types = {"words_ptr": "*i64", "out_ptr": "*i64", "words": "i64"}
    registers, *spills = resources(fingerprint_triton._kernel, types, constants, fingerprint_triton.WARPS, tmp_path)
    assert spills == [0, 0]
    assert registers <= 64  # 4 programs of 8 warps fit into an SM's 65,536 registers
