"""`megatron-stability doctor`: what is installed, whether FP8 can be active, and what to do where it can't.

Each package is looked at in a process of its own, so that a broken one can't break the report: importing a
half-installed Transformer Engine raises, and another `apex` may do anything.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from megatron_stability.errors import EXIT_FINDING, EXIT_FINE

TIMEOUT_S = 300
State = Literal["ok", "absent", "broken", "other"]

# Each prints one JSON object: state, version, detail. What they raise makes them "broken".
_PROBES = {
    "torch": """
import torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
detail = ", ".join(f"{g.name} (compute capability {g.major}.{g.minor})" for g in gpus) or "no CUDA device"
say("ok", torch.__version__, detail, capability=min(((g.major, g.minor) for g in gpus), default=None))
""",
    "megatron-core": """
import megatron.core.package_info as info
say("ok", info.__version__)
""",
    "transformer_engine": """
import importlib.metadata as metadata
from pathlib import Path
version = metadata.version("transformer_engine")
parts = {d.metadata["Name"].lower().replace("-", "_") for d in metadata.distributions() if d.metadata["Name"]}
import importlib.util
where = Path(importlib.util.find_spec("transformer_engine").origin).parent
folders = [folder for folder in (where, where.parent, where / "wheel_lib") if folder.is_dir()]
libraries = {p.name for folder in folders for p in folder.glob("*.so")}
missing = [name for name, stem in (
    ("the core library (transformer_engine_cu12 or _cu13)", "libtransformer_engine"),
    ("the torch extension (transformer_engine_torch)", "transformer_engine_torch"),
) if not any(lib.startswith(stem) for lib in libraries)]
if missing:
    say("broken", version, "half-installed: lacks " + " and ".join(missing))
else:
    import transformer_engine.pytorch as te
    reasons = []
    for name in ("fp8", "mxfp8", "fp8_block_scaling"):
        check = getattr(te, f"is_{name}_available", None)
        if check is not None:
            able, why = check(return_reason=True)
            reasons.append(f"{name}: {'yes' if able else 'no, ' + why}")
    say("ok", version, "; ".join(reasons))
""",
    "apex": """
import importlib.util
import apex
if importlib.util.find_spec("apex.multi_tensor_apply") is None or importlib.util.find_spec("amp_C") is None:
    say("other", getattr(apex, "__version__", ""), "this `apex` is not NVIDIA's, or lacks its compiled kernels")
else:
    import amp_C
    say("ok", getattr(apex, "__version__", ""), "NVIDIA Apex with amp_C")
""",
    "nvidia-modelopt": """
import importlib.metadata as metadata
version = metadata.version("nvidia-modelopt")
import modelopt
say("ok", version)
""",
    "nvdlfw-inspect": """
import importlib.metadata as metadata
version = metadata.version("nvdlfw-inspect")
import nvdlfw_inspect
say("ok", version)
""",
}
_FRAME = """
import json, sys
def say(state, version="", detail="", **more):
    print(json.dumps({"state": state, "version": version, "detail": detail, **more}))
try:
%s
except ModuleNotFoundError as error:
    say("absent" if (error.name or "").split(".")[0] == %r else "broken", "", str(error))
except ImportError as error:
    say("absent" if type(error).__name__ == "PackageNotFoundError" else "broken", "", str(error))
except BaseException as error:
    say("broken", "", f"{type(error).__name__}: {error}")
"""
_ADVICE = {
    ("megatron-core", "absent"): "pip install 'megatron-stability[megatron]'",
    (
        "transformer_engine",
        "broken",
    ): "install it whole, `pip install --no-build-isolation transformer-engine[pytorch]`, "
    "or take the base wheel off: megatron-core believes in it and fails",
    ("transformer_engine", "absent"): "for FP8, pip install 'megatron-stability[te]' on a machine with CUDA",
    ("apex", "other"): "uninstall it, or install NVIDIA's from github.com/NVIDIA/apex; it is not used",
    ("nvidia-modelopt", "absent"): "pip install 'megatron-stability[modelopt]' for FP8 readiness reports",
    ("nvdlfw-inspect", "absent"): "pip install nvdlfw-inspect for sampled FP8 statistics under Transformer Engine",
}


@dataclass(frozen=True)
class Probe:
    """What is known of one package."""

    package: str
    state: State
    version: str = ""
    detail: str = ""
    advice: str = ""
    capability: tuple[int, int] | None = None


def probe(package: str) -> Probe:
    """Look at one package, in a process of its own.

    Args:
        package: a key of the probes: torch, megatron-core, transformer_engine, apex, nvidia-modelopt, nvdlfw-inspect.
    """
    module = {"megatron-core": "megatron", "nvidia-modelopt": "modelopt"}.get(package, package.replace("-", "_"))
    body = "\n".join("    " + line for line in _PROBES[package].strip().splitlines())
    try:
        done = subprocess.run(
            [sys.executable, "-c", _FRAME % (body, module)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        answer = {"state": "broken", "detail": f"importing it ended the process with exit code {done.returncode}"}
    except subprocess.TimeoutExpired:
        answer = {"state": "broken", "detail": f"importing it took more than {TIMEOUT_S} s"}
    if answer["state"] == "broken" and "No package metadata" in answer.get("detail", ""):
        answer["state"] = "absent"
    capability = tuple(answer.pop("capability", None) or ()) or None
    return Probe(package, advice=_ADVICE.get((package, answer["state"]), ""), capability=capability, **answer)


def fp8_verdict(torch: Probe, te: Probe) -> tuple[bool, str]:
    """Whether `--fp8-format` would really run FP8 here, and why or why not.

    Args:
        torch: its probe.
        te: Transformer Engine's.
    """
    if te.state == "absent":
        return False, "FP8 can't be active: no Transformer Engine, so --fp8-format would train in BF16 and is refused"
    if te.state != "ok":
        return False, f"FP8 can't be active: Transformer Engine is {te.detail}"
    if torch.capability is None:
        return False, "FP8 can't be active: no CUDA device"
    if torch.capability < (8, 9):
        major, minor = torch.capability
        return False, f"FP8 can't be active: compute capability {major}.{minor}, FP8 units begin with 8.9"
    return True, f"FP8 can be active: Transformer Engine {te.version}, {torch.detail}; {te.detail}"


def run(argv: Sequence[str]) -> int:
    """The command.

    Args:
        argv: `[--json] [--fp8]`.

    Returns:
        0; 1 where a package is broken or another, or where `--fp8` asked for FP8 and it can't be active.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-stability doctor",
        description="What is installed, and whether FP8 can be active.",
        epilog="Example: megatron-stability doctor --fp8",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--fp8", action="store_true", help="exit with 1 where FP8 can't be active")
    options = parser.parse_args(list(argv))
    probes = {package: probe(package) for package in _PROBES}
    active, why = fp8_verdict(probes["torch"], probes["transformer_engine"])
    if options.json:
        report = {"packages": [asdict(each) for each in probes.values()], "fp8": {"can_be_active": active, "why": why}}
        print(json.dumps(report, indent=1))
    else:
        for each in probes.values():
            line = " ".join(filter(None, (f"{each.package:<20}{each.state:<8}{each.version:<10}", each.detail)))
            print(line.rstrip() + (f"\n{'':<20}-> {each.advice}" if each.advice else ""))
        print(why)
    wrong = any(each.state in ("broken", "other") for each in probes.values())
    return EXIT_FINDING if wrong or (options.fp8 and not active) else EXIT_FINE
