"""On a GPU with FP8 units: emulated products against `torch._scaled_mm`, and the statistics kernel's bandwidth.

    python -m benchmarks.gpu.fp8 [--size 4096] [--json FILE]      needs compute capability 8.9, no Transformer Engine

The emulation multiplies FP8 values in float32. The device multiplies the same codes with its own accumulation; the
difference, relative to the result's norm, is what the dry run does not show. Our codes are compared with those of the
device's own cast. The statistics kernel's share of memory bandwidth is against a copy (`benchmarks/fp8_stats.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.fp8_stats import measure
from megatron_stability.numerics.fp8.formats import E4M3, E5M2, Fp8Format, amax
from megatron_stability.numerics.fp8.recipes import current_scale, quantize_current

PAIRS = {"fprop": (E4M3, E4M3), "dgrad": (E5M2, E4M3)}  # the pairs of formats that FP8 GEMMs take
TOLERANCE = 2e-3  # of the result's norm: sums of 14 bits on Hopper, over 4096 products


def product(size: int, first: Fp8Format, second: Fp8Format) -> dict[str, Any]:
    """Both products of one random pair of [size, size] bf16 matrices."""
    g = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(size, size, generator=g, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a, b = quantize_current(x, first), quantize_current(w, second)
    scale = current_scale(amax(x), first, value_for_inf=torch.finfo(x.dtype).max)
    scaled = (x.float() * scale).clamp(-first.max, first.max).to(first.dtype)
    same_codes = float((scaled.view(torch.uint8) == a.codes.view(torch.uint8)).float().mean())
    emulated = a.dequantize() @ b.dequantize().t()
    scales = {"scale_a": a.scale_inv.reshape(()), "scale_b": b.scale_inv.reshape(())}
    found: dict[str, Any] = {"device_cast_equals_ours": same_codes}
    for fast in (False, True):
        real = torch._scaled_mm(a.codes, b.codes.t(), **scales, out_dtype=torch.float32, use_fast_accum=fast)
        off = float((real.double() - emulated.double()).norm() / emulated.double().norm())
        found["relative_difference_fast_accumulation" if fast else "relative_difference"] = off
    return found


def main() -> int:
    """Print all figures; exit 1 where a product is further off than sums of the hardware explain, 2 without one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        print("fp8_gpu: needs a CUDA device of compute capability 8.9 or more", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    result |= {name: product(options.size, *formats) for name, formats in PAIRS.items()}
    result["statistics"] = {way: measure(way, 100_000_000, 10) for way in ("separate", "one")}
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if all(result[name]["relative_difference"] < TOLERANCE for name in PAIRS) else 1


if __name__ == "__main__":
    sys.exit(main())
