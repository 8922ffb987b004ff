"""What a Triton kernel needs of an H100, by compiling it: no GPU is asked."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCH, CAPABILITY = "sm_90a", 90


def resources(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], warps: int, tmp: Path) -> list[int]:
    """[registers a thread, bytes of spill stores, bytes of spill loads] by ptxas, which comes with Triton's wheel.

    Args:
        kernel: the `triton.jit` function, imported without TRITON_INTERPRET.
        types: of the other arguments, as Triton names them, e.g. "*bf16" or "i64".
        constants: values of the `tl.constexpr` arguments.
        warps: `num_warps` of the launch.
        tmp: a folder for the PTX.
    """
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=dict(constants))
    made = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options={"num_warps": warps})
    ptx = tmp / "kernel.ptx"
    ptx.write_text(made.asm["ptx"])
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [str(ptxas), "-v", f"--gpu-name={ARCH}", str(ptx), "-o", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stderr
    found = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert len(found) == 1, said
    return [int(re.findall(r"Used (\d+) registers", said)[0]), *map(int, found[0])]
