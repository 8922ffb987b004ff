"""What `doctor` says of packages that are whole, half there, another's, broken or absent: fakes on PYTHONPATH."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_stability import doctor
from megatron_stability.doctor import Probe
from megatron_stability.errors import UsageError
from megatron_stability.megatron.patching import on_disk
from megatron_stability.megatron.patching.tree import read_tree
from tests.unit.fp8_compare.test_compare import FP8, write

TE = """
def is_fp8_available(return_reason=False):
    return (False, "no device")
def is_mxfp8_available(return_reason=False):
    return (True, "")
"""
TORCH = """
__version__ = "2.99"
class Properties:
    name, major, minor = "NVIDIA H100", {major}, 0
class version:
    cuda = "12.8"
class cuda:
    class nccl:
        version = staticmethod(lambda: (2, 27, 5))
    device_count = staticmethod(lambda: {devices})
    get_device_properties = staticmethod(lambda i: Properties)
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first for every probe's imports."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    # A module that is written again within a second, as long as before, would be read from its old bytecode.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return folder


def module(path: Path, name: str, text: str = "", version: str = "") -> Path:
    """A package `name`, with metadata where it has a version."""
    folder = path / name.replace(".", "/")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").write_text(text)
    if version:
        info = path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def transformer_engine(path: Path, *libraries: str, text: str = TE) -> None:
    folder = module(path, "transformer_engine", version="2.14.0")
    module(path, "transformer_engine.pytorch", text)
    for library in libraries:
        (path if library.endswith("torch.so") else folder).joinpath(library).touch()


WHOLE = ("libtransformer_engine.so", "transformer_engine_torch.so")


@pytest.mark.parametrize(
    ("libraries", "lacks"),
    [
        ((), "transformer_engine_cu12 or _cu13) and the torch extension (transformer_engine_torch)"),
        (WHOLE[:1], "lacks the torch extension"),
        (WHOLE[1:], "lacks the core library"),
    ],
)
def test_a_half_installed_transformer_engine_is_named_with_what_to_do(
    path: Path, libraries: tuple[str, ...], lacks: str
) -> None:
    transformer_engine(path, *libraries, text="raise RuntimeError('found an incomplete installation')")
    found = doctor.probe("transformer_engine")
    assert (found.state, found.version) == ("broken", "2.14.0")
    assert lacks in found.detail
    assert "install it whole" in found.advice
    assert not doctor.fp8_verdict(Probe("torch", "ok", capability=(9, 0)), found)[0]


def test_a_whole_transformer_engine_says_which_recipes_the_hardware_takes(path: Path) -> None:
    transformer_engine(path, *WHOLE)
    found = doctor.probe("transformer_engine")
    assert (found.state, found.detail) == ("ok", "fp8: no, no device; mxfp8: yes")


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("raise OSError('libcudart.so.13: cannot open')", "OSError: libcudart.so.13: cannot open"),
        ("import torch_that_is_not_there", "No module named 'torch_that_is_not_there'"),
        ("import os; os._exit(7)", "exit code 7"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exit code -11"),
        ("print('{'); raise SystemExit(0)", "SystemExit: 0"),
    ],
)
def test_a_package_that_breaks_on_import_breaks_its_own_process_only(path: Path, text: str, detail: str) -> None:
    transformer_engine(path, *WHOLE, text=text)
    found = doctor.probe("transformer_engine")
    assert (found.state, detail in found.detail) == ("broken", True), found


def test_an_import_that_hangs_is_given_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(path, "nvdlfw_inspect", "import time; time.sleep(600)")
    monkeypatch.setattr(doctor, "TIMEOUT_S", 1)
    assert doctor.probe("nvdlfw-inspect").detail == "importing it took more than 1 s"


def test_apex_is_nvidias_only_with_its_parts(path: Path) -> None:
    assert doctor.probe("apex").state == "absent"
    module(path, "apex", "raise SystemError('an unrelated web toolkit must not be imported')", version="0.9.10")
    other = doctor.probe("apex")
    assert (other.state, other.version, other.detail) == ("other", "0.9.10", "this `apex` is not NVIDIA's")
    assert "uninstall" in other.advice
    module(path, "apex", "__version__ = '0.1'")
    module(path, "apex.multi_tensor_apply")
    without = doctor.probe("apex")
    assert (without.state, "--cuda_ext" in without.advice) == ("broken", True)
    module(path, "amp_C")
    assert (doctor.probe("apex").state, doctor.probe("apex").version) == ("ok", "0.1")


def test_the_other_packages(path: Path) -> None:
    for package, name in (
        ("nvidia-modelopt", "modelopt"),
        ("nvdlfw-inspect", "nvdlfw_inspect"),
        ("nvidia-resiliency-ext", "nvidia_resiliency_ext"),
    ):
        absent = doctor.probe(package)
        assert (absent.state, absent.detail) == ("absent", "")
        assert "pip install" in absent.advice
        folder = module(path, name)
        found = doctor.probe(package)
        assert (found.state, found.origin) == ("ok", str(folder))
        module(path, name, "raise ImportError('undefined symbol')")
        broken = doctor.probe(package)
        assert (broken.state, broken.detail) == ("broken", "ImportError: undefined symbol")


def test_muon_and_bridge(path: Path) -> None:
    module(path, "emerging_optimizers", "import torch_of_another_build")
    assert "torch_of_another_build" in doctor.probe("emerging-optimizers").detail
    module(path, "megatron")
    assert doctor.probe("megatron-bridge").state == "absent"
    bridge = module(path, "megatron.bridge", "raise SystemError('its import takes 20 s and must not be made')")
    assert doctor.probe("megatron-bridge").state == "broken", "half-installed: it does not say what it is"
    (bridge / "package_info.py").write_text("__version__ = '0.5.1'")
    found = doctor.probe("megatron-bridge")
    assert (found.state, found.version, found.origin) == ("ok", "0.5.1", str(bridge))


def test_a_torch_that_breaks_is_why_nothing_is_active(path: Path) -> None:
    module(path, "torch", "raise OSError('libcudnn.so.9: cannot open')")
    torch = doctor.probe("torch")
    assert (torch.state, torch.detail) == ("broken", "OSError: libcudnn.so.9: cannot open")
    assert "torch is broken: OSError: libcudnn" in doctor.fp8_verdict(torch, Probe("transformer_engine", "ok"))[1]


@pytest.mark.parametrize(
    ("script", "state", "says"),
    [
        ("echo '570.86, NVIDIA H100'", "ok", "NVIDIA H100"),
        ("echo 'Driver/library version mismatch'; exit 18", "broken", "Driver/library version mismatch"),
    ],
)
def test_the_driver(path: Path, monkeypatch: pytest.MonkeyPatch, script: str, state: str, says: str) -> None:
    tool = path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(path))
    found = doctor.probe("nvidia-driver")
    assert (found.state, says in found.detail) == (state, True), found
    tool.unlink()
    assert doctor.probe("nvidia-driver").state == "absent"


@pytest.mark.megatron
def test_the_seams_of_the_megatron_that_python_imports(path: Path) -> None:
    real = Path(doctor.seams().origin)
    tree = read_tree(real)
    for name in ["megatron/core/package_info.py", *(each.path for each in tree.files)]:
        if (real / name).exists():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes((real / name).read_bytes())
    for folder in ("megatron", "megatron/core"):
        (path / folder / "__init__.py").touch()
    assert doctor.probe("megatron-core").detail == "a wheel"
    (path / "pretrain_gpt.py").touch()
    assert doctor.probe("megatron-core").detail == "a clone"
    closed = doctor.seams()
    assert (closed.state, closed.origin) == ("ok", str(path))
    assert "closed on disk" in closed.detail
    on_disk.apply(path)
    assert doctor.seams().detail == "open on disk"
    file = next(each for each in tree.files if each.stock is not None)
    (path / file.path).write_text(file.stock or "")
    half = doctor.seams()
    assert (half.state, "half applied" in half.detail) == ("broken", True)
    (path / file.path).write_text("torn")
    torn = doctor.seams()
    assert (torn.state, file.path in torn.detail) == ("broken", True), torn
    assert "patch check" in torn.advice


def test_what_is_active_and_why_not() -> None:
    probes = {name: Probe(name, "absent") for name in doctor._PROBES}
    none = doctor.features(probes)
    assert not any(on for on, _ in none.values())
    assert none["plugin in Megatron"][1] == "torch is absent, megatron-core is absent"
    assert "torch's own" in none["fused Adam"][1]
    probes = {name: Probe(name, "ok", capability=(9, 0)) for name in (*doctor._PROBES, "seams")}
    assert all(on for on, _ in doctor.features(probes).values())
    probes["seams"] = Probe("seams", "broken", detail="half applied")
    probes["transformer_engine"] = Probe("transformer_engine", "broken")
    able = doctor.features(probes)
    assert able["plugin in Megatron"] == (False, "seams half applied")
    assert able["fused Adam"] == (True, "of apex")
    assert able["sampled FP8 statistics"] == (False, "transformer_engine is broken")


def test_absent_transformer_engine_and_an_old_or_missing_device_cant_run_fp8(path: Path) -> None:
    absent = doctor.probe("transformer_engine")
    assert absent.state == "absent"
    whole = Probe("transformer_engine", "ok", "2.14.0")
    h100, a100, none = (Probe("torch", "ok", capability=c) for c in ((9, 0), (8, 0), None))
    for torch, te, why in (
        (h100, absent, "no Transformer Engine"),
        (a100, whole, "compute capability 8.0"),
        (none, whole, "no CUDA device"),
    ):
        assert doctor.fp8_verdict(torch, te)[0] is False
        assert why in doctor.fp8_verdict(torch, te)[1]
    assert doctor.fp8_verdict(h100, whole)[0]


def test_the_command_and_its_exit_codes(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "seams", lambda: Probe("seams", "ok", detail="open on disk"))
    monkeypatch.setenv("PATH", str(path))  # no nvidia-smi
    module(path, "emerging_optimizers")
    transformer_engine(path, *WHOLE)
    module(path, "torch", TORCH.format(devices=2, major=9))
    module(path, "megatron")
    module(path, "megatron.core")
    (path / "megatron/core/package_info.py").write_text("__version__ = '0.19.2'")
    assert doctor.run(["--json", "--fp8"]) == 0
    report = json.loads(capsys.readouterr().out)
    there = {each["package"] for each in report["packages"] if each["state"] == "ok"}
    assert there == {"torch", "megatron-core", "transformer_engine", "emerging-optimizers", "seams"}
    assert report["packages"][0]["origin"] == str(path / "torch")
    assert report["packages"][0]["detail"].endswith("; CUDA 12.8, NCCL 2.27.5")
    assert report["features"]["plugin in Megatron"] == {"active": True, "why": "seams open on disk"}
    assert report["fp8"]["can_be_active"] is True
    module(path, "torch", TORCH.format(devices=0, major=0))
    module(path, "apex")
    assert doctor.run([]) == 1, "another `apex` is a finding"
    lines = capsys.readouterr().out
    assert "this `apex` is not NVIDIA's" in lines
    assert "FP8 can't be active: no CUDA device" in lines


def test_fp8_asked_for_where_it_cannot_be_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe", lambda package: Probe(package, "absent"))
    assert doctor.run([]) == 0
    assert doctor.run(["--fp8"]) == 1


def test_a_runs_ledger_says_whether_fp8_was_active(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "fp8", 1.0, FP8)
    table = {"recipe": "delayed", "emulated": True, "kernel": "torch 2.99"}
    (tmp_path / "fp8" / "fp8.stage0.jsonl").write_text(json.dumps(table) + "\n")
    write(tmp_path / "run" / "stability", 1.0, FP8)
    assert doctor.run(["--run", str(tmp_path / "run")]) == 0, "found where `report` finds it"
    assert "24 of 24" in capsys.readouterr().out
    write(tmp_path / "bf16", 1.0, {})
    write(tmp_path / "fallen", 1.0, {"fp8/gemms": 24.0, "fp8/fallbacks": 24.0})
    assert doctor.run(["--run", str(tmp_path / "fp8")]) == 0
    assert "24 of 24 linears, recipe delayed (emulated), torch 2.99" in capsys.readouterr().out
    assert doctor.run(["--run", str(tmp_path / "bf16")]) == 1
    assert "nothing asked for FP8" in capsys.readouterr().out
    assert doctor.run(["--json", "--run", str(tmp_path / "fallen")]) == 1
    assert "none of 24" in json.loads(capsys.readouterr().out)["fp8"]["why"]
    with pytest.raises(UsageError, match="cannot be read"):
        doctor.run(["--run", str(tmp_path / "nowhere")])
