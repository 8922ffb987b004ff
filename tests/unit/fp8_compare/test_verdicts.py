"""What the comparison says: every gate's outcome by name, nothing unmeasured that passes, one line at the end."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_stability.errors import UsageError
from megatron_stability.fp8_compare import command
from megatron_stability.fp8_compare.criteria import compare
from megatron_stability.fp8_compare.figures import RunFigures
from megatron_stability.fp8_compare.gates import GATES, Gates, warmup_of
from megatron_stability.fp8_compare.table import table
from tests.unit.fp8_compare.test_compare import FP8, run_of, sketched

BF16 = run_of("bf16", 1.0)
DELAYED = {"fp8.emulate": "delayed"}
LONG = DELAYED | {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}


def run(signals: dict[str, float] | None = None, settings: dict[str, Any] | None = None) -> RunFigures:
    return replace(run_of("fp8", 1.0, FP8 | (signals or {})), settings=settings or {"fp8.emulate": "current"})


def judged(fp8: RunFigures, control: RunFigures = BF16, gates: Gates | None = None) -> dict[str, Any]:
    return compare(fp8, control, None, 100, gates or Gates())


def without(name: str, run: RunFigures) -> RunFigures:
    """The run as it would be had it not measured this."""
    if name == "held-out":
        return replace(run, held_out=None)
    if name == "cosine":
        return replace(run, sketches={})
    steps = [s.model_copy(update={"signals": {k: v for k, v in s.signals.items() if name not in k}}) for s in run.steps]
    return replace(run, steps=steps)


def test_a_pass_says_how_many_gates_it_stands_on() -> None:
    result = judged(run())
    assert [verdict["gate"] for verdict in result["verdicts"]] == list(GATES)
    assert result["verdict"].startswith(
        "PASS: 7 of 9 gates judged; not judged: binades (none to judge: current scaling"
    )
    assert table(result).splitlines()[-1] == result["verdict"]
    left = judged(run(), gates=Gates(cosine=None))
    assert left["verdict"].startswith("PASS: 6 of 9 gates judged; not judged: cosine (left out)")
    assert judged(run({"fp8/binades": 12.0}, LONG))["verdict"].startswith("PASS: 8 of 9 gates judged")


@pytest.mark.parametrize("name", ["cosine", "underflow", "saturation", "held-out"])
def test_what_could_be_measured_and_was_not_fails_by_name(name: str) -> None:
    result = judged(without(name, run()))
    (finding,) = result["findings"]
    assert "not measured" in finding
    assert "--" in finding
    assert "stability." in finding or "validation." in finding, "the remedy has a recipe's words too"
    assert result["verdict"].startswith(f"FAIL: {name}; 6 of 9 gates judged")
    assert re.search(r"NOT MEASURED", table(result))


def test_delayed_scaling_without_binades_is_unmeasured_and_other_scaling_has_none() -> None:
    assert judged(run(settings=LONG))["findings"][0].startswith("binades were not measured, though scaling is delayed")
    te = run(settings={"fp8": "hybrid", "fp8_recipe": "tensorwise"})
    assert "tensorwise scaling takes each tensor's own amax" in judged(te)["verdict"]
    assert judged(te)["findings"] == []


def test_runs_that_begin_after_step_2_have_no_early_gradients() -> None:
    late = [replace(each, sketches={}, steps=each.steps[10:]) for each in (run(), BF16)]
    result = judged(*late)
    assert result["findings"] == []
    assert (
        "cosine (none to judge: gradients are judged in step 2, and the runs begin with step 11)" in result["verdict"]
    )


@pytest.mark.parametrize("withheld", ["bf16", "fp8"])
def test_a_step_that_one_run_alone_withheld_is_a_finding(withheld: str) -> None:
    def skip(each: RunFigures, number: int) -> RunFigures:
        changed = [s.model_copy(update={"fate": "skipped"}) if s.step == number else s for s in each.steps]
        return replace(each, steps=changed)

    both = skip(run(), 40), skip(BF16, 40)
    assert judged(*both)["findings"] == []
    pair = (skip(run(), 40), BF16) if withheld == "fp8" else (run(), skip(BF16, 40))
    (finding,) = judged(*pair)["findings"]
    other = "bf16" if withheld == "fp8" else "fp8"
    assert finding.startswith(f"{withheld} withheld step 40, which {other} did not")
    assert judged(*pair)["verdict"].startswith("FAIL: steps; ")


def test_saturation_under_delayed_scaling_names_the_history_that_mends_it() -> None:
    signals = {"fp8/binades": 12.0, "fp8/saturation": 0.0037}
    (finding,) = judged(run(signals, DELAYED))["findings"]
    assert "0.37% of a tensor's elements were cut off" in finding
    assert (
        "follow the most_recent amax of 1 step; use --fp8-amax-history-len 1024 --fp8-amax-compute-algo max" in finding
    )
    assert "(model.fp8_amax_history_len" in finding
    (long,) = judged(run(signals, LONG))["findings"]
    assert "--fp8-amax-history-len" not in long
    assert "a larger --fp8-margin" in long
    (current,) = judged(run({"fp8/saturation": 0.0037}))["findings"]
    assert current.endswith("the gate is 0.10%")


def test_warmup_is_a_quarter_of_a_short_run() -> None:
    assert [warmup_of(steps) for steps in (20, 60, 199, 200, 5000)] == [5, 15, 49, 100, 100]


def test_the_page_has_verdict_gates_findings_and_labelled_limits(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from megatron_stability.fp8_compare import plots

    bad = sketched(run({"fp8/binades": 6.0, "fp8/saturation": 0.02}, DELAYED), 0.0)
    skipped = [s.model_copy(update={"fate": "skipped"}) if s.step == 40 else s for s in BF16.steps]
    control = replace(BF16, steps=skipped, name="<b>bf16</b>")
    result = judged(bad, control)
    plots.write(result, [bad, control], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    head = page.partition("Curves</h2>")[0]
    assert "FAIL: steps, binades, saturation; 8 of 9 gates judged" in head
    assert head.count('class="finding"') == 3
    assert "&lt;b&gt;bf16&lt;/b&gt; withheld step 40" in head
    assert "<b>bf16</b>" not in page
    figure = plots.figure(result, [bad, control])
    titles = {note.text for note in figure.layout.annotations}
    assert {"gate 10", "gate 0.1 %", "gate 0.9, judged in step 2", "end of warmup"} <= titles
    legends = {trace.yaxis: trace.legend for trace in figure.data}
    assert len(legends) == 7, "seven plots, underflow and saturation among them"
    assert len(set(legends.values())) == 7, "each with a legend of its own"
    assert any(trace.name.startswith("withheld by") and list(trace.x) == [40] for trace in figure.data)


RECIPE = "train: {train_iters: 1000}\nvalidation: {eval_interval: 100, eval_iters: 2}\ncheckpoint: {save: runs/x}\n"
SMALL = RECIPE + "scale_down:\n  train: {train_iters: 60}\n  validation: {eval_iters: 0}\n  checkpoint: {save: null}\n"


def started(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> list[list[str]]:
    """The commands of the runs that `compare` starts, each without its interpreter; the first run ends them."""
    import subprocess

    seen: list[list[str]] = []

    def train(words: list[str], **_: Any) -> Any:
        seen.append(words[3:])
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", train)
    with pytest.raises(UsageError, match="ledger"):
        command.run(argv)
    return seen


def test_a_recipe_is_compared_with_everything_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(SMALL)
    own = ["--out", str(tmp_path / "out"), "--emulate", "delayed", "--noise-seed", "3", "--nproc", "2"]
    words = ["nemo", str(recipe), "--scale-down", "model.num_layers=3"]
    bf16, fp8, noise = started(monkeypatch, [*own, "--fp8-flags", "model.fp8_margin=1 a='b c'", "--", *words])
    assert bf16[:4] == ["nemo", str(recipe), "--nproc-per-node", "2"]
    measured = ["stability.observe.sketch.every=1", "stability.fp8.sample_every=1"]
    held_out = ["validation.eval_interval=12", "validation.eval_iters=4"]
    assert {*measured, *held_out, "checkpoint.load=null", "--scale-down", "model.num_layers=3"} <= {*bf16}
    history = ["model.fp8_amax_history_len=1024", "model.fp8_amax_compute_algo=max"]
    assert fp8[-5:] == ["stability.fp8.emulate=delayed", *history, "model.fp8_margin=1", "a=b c"]
    assert noise[-1] == "rng.seed=3"
    assert f"stability.record.dir={tmp_path / 'out' / 'bf16'}" in bf16
    assert not any(word.startswith("checkpoint.save") for word in bf16), "the recipe in small saves nothing"
    (tmp_path / "whole").mkdir()
    whole, *_ = started(monkeypatch, ["--out", str(tmp_path / "whole"), "--", "nemo", str(recipe)])
    assert not any(word.startswith("validation.") for word in whole), "the recipe has a held-out set of its own"
    assert {"stability.observe.sketch.every=20", f"checkpoint.save={tmp_path}/whole/bf16/checkpoints"} <= {*whole}
    (tmp_path / "many").mkdir()
    engine = ["--emulate", "none", "--fp8-flags", "mixed_precision=bf16_with_fp8_delayed_scaling_mixed"]
    starter = ["--", "torchrun", "--nnodes", "2"]
    argv = ["--out", str(tmp_path / "many"), *engine, "--", "nemo", str(recipe), "a=1", *starter]
    _, many = started(monkeypatch, argv)
    assert many[-6:] == ["stability.fp8.inspect=true", engine[-1], *starter], "what starts the ranks stays last"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--warmup", "60", "--", "nemo", "RECIPE", "--scale-down"],
            "--warmup 60: train.train_iters 60 leaves no step",
        ),
        (["--warmup", "100", "--", "--train-iters", "60"], "--warmup 100: --train-iters 60 leaves no step to judge"),
        (["--warmup", "100", "--", "--train-iters=60"], "--warmup 100: --train-iters 60 leaves no step to judge"),
        (["--", "nemo"], "give the BF16 control's recipe"),
        (["--", "nemo", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["--", "nemo", "RECIPE", "stability.record.dir=x"], "stability.record.dir after --"),
        (["--", "nemo", "RECIPE", "+checkpoint.save=x"], "checkpoint.save after --"),
    ],
)
def test_what_would_be_told_after_hours_is_told_before(tmp_path: Path, words: list[str], says: str) -> None:
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(SMALL)
    with pytest.raises(UsageError, match=re.escape(says)):
        command.run(["--out", str(out), *(str(recipe) if word == "RECIPE" else word for word in words)])
    assert not out.exists()
