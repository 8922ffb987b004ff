"""`megatron-stability doctor`: what is installed, from where, what can be active, and what to do where it can't.

Each package is looked at in a process of its own, so that a broken one can't break the report: importing a
half-installed Transformer Engine raises, and another `apex` may do anything.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megatron_stability import extras, files
from megatron_stability.echo import said
from megatron_stability.errors import EXIT_FINDING, EXIT_FINE, UsageError
from megatron_stability.ledger import entries

TIMEOUT_S = 300
_ANSWER = '{"state": '  # packages print lines of their own
State = Literal["ok", "absent", "broken", "other"]

# Each prints one JSON object: state, version, detail. What they raise makes them "broken".
_PROBES = {
    "torch": """
import torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
detail = ", ".join(f"{g.name} (compute capability {g.major}.{g.minor})" for g in gpus) or "no CUDA device"
if torch.version.cuda:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    detail += f"; CUDA {torch.version.cuda}, NCCL {nccl}"
say("ok", torch.__version__, detail, capability=min(((g.major, g.minor) for g in gpus), default=None))
""",
    "nvidia-driver": """
import shutil, subprocess
if shutil.which("nvidia-smi") is None:
    say("absent")
else:
    ask = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    done = subprocess.run(ask, capture_output=True, text=True)
    gpus = [line.split(", ", 1) for line in done.stdout.splitlines() if ", " in line]
    if done.returncode or not gpus:
        say("broken", "", f"nvidia-smi: {(done.stdout + done.stderr).strip() or 'no answer'}")
    else:
        say("ok", gpus[0][0], ", ".join(name for _, name in gpus), origin=shutil.which("nvidia-smi"))
""",
    "megatron-core": """
root = folder_of("megatron.core").parents[1]
clone = (root / "pretrain_gpt.py").is_file()
import megatron.core.package_info as info
say("ok", info.__version__, "a clone" if clone else "a wheel", origin=str(root))
""",
    "transformer_engine": """
where = folder_of("transformer_engine")
folders = [folder for folder in (where, where.parent, where / "wheel_lib") if folder.is_dir()]
libraries = {p.name for folder in folders for p in folder.glob("*.so")}
missing = [name for name, stem in (
    ("the core library (transformer_engine_cu12 or _cu13)", "libtransformer_engine"),
    ("the torch extension (transformer_engine_torch)", "transformer_engine_torch"),
) if not any(lib.startswith(stem) for lib in libraries)]
if missing:
    say("broken", version("transformer_engine"), "half-installed: lacks " + " and ".join(missing))
else:
    import transformer_engine.pytorch as te
    reasons = []
    for name in ("fp8", "mxfp8", "fp8_block_scaling"):
        check = getattr(te, f"is_{name}_available", None)
        if check is not None:
            able, why = check(return_reason=True)
            reasons.append(f"{name}: {'yes' if able else 'no, ' + why}")
    say("ok", version("transformer_engine"), "; ".join(reasons))
""",
    "apex": """
if not (folder_of("apex") / "multi_tensor_apply").is_dir():  # not imported: another's may do anything
    say("other", version("apex"), "this `apex` is not NVIDIA's")
elif importlib.util.find_spec("amp_C") is None:
    say("broken", "", "NVIDIA Apex without its compiled kernels (amp_C)")
else:
    import apex, amp_C
    say("ok", getattr(apex, "__version__", ""), "NVIDIA Apex with amp_C")
""",
    "emerging-optimizers": """
import emerging_optimizers
say("ok", version("emerging-optimizers"))
""",
    "nvidia-modelopt": """
import modelopt
say("ok", version("nvidia-modelopt"))
""",
    "nvdlfw-inspect": """
import nvdlfw_inspect
say("ok", version("nvdlfw-inspect"))
""",
    "nvidia-resiliency-ext": """
import nvidia_resiliency_ext
say("ok", version("nvidia-resiliency-ext"))
""",
    "megatron-bridge": """
import runpy  # its import takes 20 s
info = runpy.run_path(str(folder_of("megatron.bridge") / "package_info.py"))
say("ok", info["__version__"], "located, not imported")
""",
}
_FRAME = """
import importlib.metadata, importlib.util, json
from pathlib import Path
def say(state, version="", detail="", **more):
    print()
    print(json.dumps({"state": state, "version": version, "detail": detail, "origin": origin(), **more}))
def origin():
    try:
        return str(folder_of(%(module)r))
    except BaseException:
        return ""
def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""  # a checkout on PYTHONPATH
def folder_of(module):
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise ModuleNotFoundError("absent", name=module)
    return Path(next(iter(spec.submodule_search_locations or [spec.origin])))
try:
%(body)s
except ModuleNotFoundError as error:
    absent = %(module)r == error.name or %(module)r.startswith(f"{error.name}.")
    say("absent" if absent else "broken", "", "" if absent else str(error))
except BaseException as error:
    say("broken", version(%(package)r), f"{type(error).__name__}: {error}")
"""
_ADVICE = {
    ("megatron-core", "absent"): extras.command("megatron"),
    (
        "transformer_engine",
        "broken",
    ): "install it whole, `pip install --no-build-isolation transformer-engine[pytorch]`, "
    "or take the base wheel off: megatron-core believes in it and fails",
    ("transformer_engine", "absent"): f"for FP8, {extras.command('te')} on a machine with CUDA",
    ("apex", "broken"): "build it with --cuda_ext, or uninstall it: Megatron then takes torch's own",
    ("apex", "other"): "uninstall it: Megatron takes any `apex` for NVIDIA's, which is at github.com/NVIDIA/apex",
    ("nvidia-modelopt", "absent"): f"{extras.command('modelopt')} for FP8 readiness reports",
    ("nvdlfw-inspect", "absent"): "pip install nvdlfw-inspect for sampled FP8 statistics under Transformer Engine",
    ("emerging-optimizers", "absent"): "pip install emerging-optimizers for --optimizer muon",
    ("nvidia-resiliency-ext", "absent"): "pip install nvidia-resiliency-ext for Megatron's in-process restart",
    ("megatron-bridge", "absent"): f"{extras.command('nemo')} to train NeMo recipes",
    ("nvidia-driver", "broken"): "no GPU can be used until the driver answers: see dmesg, then the container's mounts",
    (
        "seams",
        "broken",
    ): "`megatron-stability patch check` says what stands there, `patch revert` puts stock files back",
}


_MODULES = {
    "megatron-core": "megatron.core",
    "megatron-bridge": "megatron.bridge",
    "nvidia-modelopt": "modelopt",
}
_SEAMS = {
    "applied": "open on disk",
    "not_applied": "closed on disk: `run`, `pretrain` and `nemo` open them in memory, "
    "any other launcher needs `megatron-stability patch apply`",
    "half_applied": "half applied: some files are patched, others stock",
}


@dataclass(frozen=True)
class Probe:
    """What is known of one package; `origin` is the folder that it is imported from."""

    package: str
    state: State
    version: str = ""
    detail: str = ""
    advice: str = ""
    capability: tuple[int, int] | None = None
    origin: str = ""


def probe(package: str) -> Probe:
    """Look at one package, in a process of its own.

    Args:
        package: a key of the probes: torch, nvidia-driver, megatron-core, transformer_engine, apex,
            emerging-optimizers, nvidia-modelopt, nvdlfw-inspect, nvidia-resiliency-ext, megatron-bridge.
    """
    module = _MODULES.get(package, package.replace("-", "_"))
    body = "\n".join("    " + line for line in _PROBES[package].strip().splitlines())
    program = _FRAME % {"body": body, "module": module, "package": package}
    try:
        done = _process(program)
        answer = json.loads([line for line in done.stdout.splitlines() if line.startswith(_ANSWER)][-1])
    except IndexError:
        answer = {"state": "broken", "detail": f"importing it ended the process with exit code {done.returncode}"}
    except subprocess.TimeoutExpired:
        answer = {"state": "broken", "detail": f"importing it took more than {TIMEOUT_S} s"}
    capability = tuple(answer.pop("capability", None) or ()) or None
    return Probe(package, advice=_ADVICE.get((package, answer["state"]), ""), capability=capability, **answer)


def _process(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def seams() -> Probe:
    """Whether the seams are open in the megatron-core that Python imports: what `patch status` says of it."""
    # The package's own folder comes last: before others it would choose which Megatron is found.
    program = "import sys; sys.path.append(sys.argv.pop(1)); from megatron_stability.cli import main; sys.exit(main())"
    try:
        done = _process(program, str(Path(__file__).resolve().parents[1]), "patch", "status", "--json")
        said_of_it = json.loads(done.stdout)
        state, origin = str(said_of_it["state"]), str(said_of_it["target"])
    except subprocess.TimeoutExpired:
        return Probe("seams", "broken", detail=f"looking took more than {TIMEOUT_S} s")
    except (ValueError, KeyError, TypeError):
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Probe("seams", "broken", detail=said(why), advice=_ADVICE["seams", "broken"])
    detail = _SEAMS[state] + (" (placed by anchors)" if said_of_it["by_anchor"] else "")
    half = state == "half_applied"
    return Probe(
        "seams",
        "broken" if half else "ok",
        version=str(said_of_it["patch_set"]),
        detail=detail,
        advice=_ADVICE["seams", "broken"] if half else "",
        origin=origin,
    )


def features(probes: Mapping[str, Probe]) -> dict[str, tuple[bool, str]]:
    """What would be active here, and why or why not.

    Args:
        probes: of every package, and the seams' where megatron-core is there.

    Returns:
        By feature: whether, and one sentence.
    """

    def needs(*packages: str) -> tuple[bool, str]:
        wrong = [f"{name} is {probes[name].state}" for name in packages if probes[name].state != "ok"]
        return not wrong, ", ".join(wrong) or f"{' and '.join(packages)} {'is' if len(packages) == 1 else 'are'} there"

    fused = next((name for name in ("transformer_engine", "apex") if probes[name].state == "ok"), None)
    adam = f"of {fused}" if fused else "torch's own: neither Transformer Engine nor NVIDIA Apex can be imported"
    plugin = needs("torch", "megatron-core")
    if plugin[0]:
        plugin = probes["seams"].state == "ok", f"seams {probes['seams'].detail}"
    return {
        "plugin in Megatron": plugin,
        "FP8": fp8_verdict(probes["torch"], probes["transformer_engine"]),
        "fused Adam": (fused is not None, adam),
        "Muon": needs("emerging-optimizers"),
        "NeMo recipes": needs("megatron-bridge", "megatron-core"),
        "sampled FP8 statistics": needs("nvdlfw-inspect", "transformer_engine"),
        "FP8 readiness": needs("nvidia-modelopt"),
        "in-process restart": needs("nvidia-resiliency-ext"),
    }


def fp8_verdict(torch: Probe, te: Probe) -> tuple[bool, str]:
    """Whether `--fp8-format` would really run FP8 here, and why or why not.

    Args:
        torch: its probe.
        te: Transformer Engine's.
    """
    if te.state == "absent":
        return False, "FP8 can't be active: no Transformer Engine, so --fp8-format would train in BF16 and is refused"
    if te.state != "ok":
        return False, f"FP8 can't be active: Transformer Engine is broken: {te.detail}"
    if torch.state != "ok":
        return False, f"FP8 can't be active: torch is {torch.state}{': ' * bool(torch.detail)}{torch.detail}"
    if torch.capability is None:
        return False, "FP8 can't be active: no CUDA device"
    if torch.capability < (8, 9):
        major, minor = torch.capability
        return False, f"FP8 can't be active: compute capability {major}.{minor}, FP8 units begin with 8.9"
    return True, f"FP8 can be active: Transformer Engine {te.version}, {torch.detail}; {te.detail}"


def fp8_of_run(folder: Path) -> tuple[bool, str]:
    """Whether a run's linears really ran in FP8 in its last step, with their number and recipe.

    Args:
        folder: of a run, or of its ledger.

    Raises:
        UsageError: no readable ledger there, or one without a step.
    """
    folder = entries.home(folder)
    steps = [step for step in entries.read(folder).surviving if step.tokens]
    if not steps:
        raise UsageError(f"{folder}: its ledger has no step yet; ask again once the run has trained one")
    signals = steps[-1].signals
    gemms, fallbacks = (int(signals.get(f"fp8/{name}", 0.0)) for name in ("gemms", "fallbacks"))
    if gemms == fallbacks:
        why = f"none of {gemms} linears that could be in FP8 was" if gemms else "nothing asked for FP8"
        return False, f"FP8 was not active in step {steps[-1].step} of {folder}: {why}"
    text = f"FP8 was active in step {steps[-1].step} of {folder}: {gemms - fallbacks} of {gemms} linears"
    tables = sorted(folder.glob("fp8.stage*.jsonl"))
    if tables:
        text += _recipe(tables[0])
    return True, said(text)


def _recipe(table: Path) -> str:
    try:
        lines = files.read_bytes(table, sys.maxsize).split(b"\n")[:-1]  # what follows the last line feed is torn
        if not lines:
            return ""
        last = files.parse_json(lines[-1])
        return f", recipe {last['recipe']}{' (emulated)' if last['emulated'] else ''}, {last['kernel']}"
    except OSError as error:
        raise UsageError(f"{table}: cannot be read ({error.strerror}); move it away to ask without it") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{table}: its last line is no table of FP8; move it away to ask without it") from None


def run(argv: Sequence[str]) -> int:
    """The command.

    Args:
        argv: see `--help`.

    Returns:
        0; 1 where a package is broken or another, or where `--fp8` asked for FP8 and it can't be active, or where
        `--run` named a run in which it was not.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-stability doctor",
        description="What is installed and from where, and what can be active of it.",
        epilog="Example: megatron-stability doctor --fp8",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--fp8", action="store_true", help="exit with 1 where FP8 can't be active")
    parser.add_argument("--run", type=Path, metavar="DIR", help="a run's folder: was FP8 active? Exit with 1 if not")
    options = parser.parse_args(list(argv))
    if options.run is not None:
        active, why = fp8_of_run(options.run)
        print(json.dumps({"fp8": {"active": active, "why": why}}, indent=1) if options.json else why)
        return EXIT_FINE if active else EXIT_FINDING
    probes = {package: probe(package) for package in _PROBES}
    if probes["megatron-core"].state == "ok":
        probes["seams"] = seams()
    able = features(probes)
    active, why = able["FP8"]
    if options.json:
        report = {
            "packages": [asdict(each) for each in probes.values()],
            "features": {name: {"active": on, "why": reason} for name, (on, reason) in able.items()},
            "fp8": {"can_be_active": active, "why": why},
        }
        print(json.dumps(report, indent=1))
    else:
        _show(probes, able)
    wrong = any(each.state in ("broken", "other") for each in probes.values())
    return EXIT_FINDING if wrong or (options.fp8 and not active) else EXIT_FINE


def _show(probes: Mapping[str, Probe], able: Mapping[str, tuple[bool, str]]) -> None:
    for each in probes.values():
        where = f"[{each.origin}]" if each.origin else ""
        line = " ".join(filter(None, (f"{each.package:<22}{each.state:<8}{each.version:<10}", each.detail, where)))
        print(line.rstrip() + (f"\n{'':<22}-> {each.advice}" if each.advice else ""))
    print()
    for name, (on, why) in able.items():
        print(f"{name:<24}{'yes' if on else 'no':<5}{why}")
