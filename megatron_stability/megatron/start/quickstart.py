"""`megatron-stability quickstart`: the same small GPT twice, stock Megatron and with the plugin, faults included.

Real text (the sources of Python's standard library), TP2 × PP2, four CPU ranks, one seed. Two hard batches, whose
gradients are 50 times too large, and one NaN in one gradient on one rank. What is said of the outcome is read off the
two runs.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_stability import files, terminal
from megatron_stability.data.prepare import Options
from megatron_stability.errors import EXIT_FINDING, EXIT_FINE, UsageError
from megatron_stability.megatron.start import input_checks
from megatron_stability.megatron.start.prepare_data import prepare
from megatron_stability.records import encode_float
from megatron_stability.report import pages
from megatron_stability.report.command import build_report
from megatron_stability.report.runview import RunView
from megatron_stability.report.summary import number, table

TENSOR, PIPELINE = 2, 2
STEPS, BATCH = 180, 8
HARD_BATCHES, NAN_STEP, NAN_RANK = (60, 120), 160, 3
TEXT_BYTES = 4_000_000
LIMIT_S = 1200  # a run that takes longer is broken
MODEL = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"),
    *("--max-position-embeddings", "64", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--untie-embeddings-and-output-weights", "--disable-bias-linear", "--seed", "1234"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--no-create-attention-mask-in-dataloader"),
    *("--micro-batch-size", "4", "--global-batch-size", str(BATCH), "--train-iters", str(STEPS)),
    *("--lr", "2e-3", "--min-lr", "2e-4", "--lr-warmup-iters", "10", "--lr-decay-style", "cosine"),
    *("--weight-decay", "0.1", "--clip-grad", "1.0", "--adam-beta2", "0.95", "--split", "100,0,0"),
    *("--tensor-model-parallel-size", str(TENSOR), "--pipeline-model-parallel-size", str(PIPELINE)),
    *("--eval-iters", "0", "--eval-interval", str(STEPS), "--log-interval", "1", "--tensorboard-log-interval", "1"),
    *("--num-workers", "0", "--no-check-for-nan-in-loss-and-grad"),
)


@dataclass(frozen=True)
class Finished:
    """One run: its view for the report, and how it ended."""

    view: RunView
    exit_code: int
    seconds: float

    @property
    def skipped(self) -> list[int]:
        """Steps whose update was withheld."""
        return sorted(self.view.withheld)

    def lost_samples(self) -> int:
        """Samples that were read, but neither trained finite weights nor were skipped for a stated reason."""
        steps = zip(self.view.steps, self.view.loss, strict=True)
        return BATCH * sum(not math.isfinite(loss) and step not in self.view.withheld for step, loss in steps)

    def summary(self) -> dict[str, object]:
        """This run's part of summary.json."""
        losses = [
            loss for step, loss in zip(self.view.steps, self.view.loss, strict=True) if step not in self.view.withheld
        ]
        return {
            "first_loss": encode_float(losses[0]),
            "final_loss": encode_float(losses[-1]),
            "skipped_steps": len(self.skipped),
            "skipped_at": self.skipped,
            "lost_samples": self.lost_samples(),
            "seconds": round(self.seconds, 1),
            "exit_code": self.exit_code,
        }


def run(argv: Sequence[str]) -> int:
    """The command.

    Args:
        argv: `--out DIR`.

    Returns:
        0 when both runs went to their end, 1 otherwise.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-stability quickstart",
        description="Trains a small GPT on four CPU ranks, twice: stock Megatron, and with the plugin.",
        epilog="Example: megatron-stability quickstart --out quickstart-out",
    )
    parser.add_argument("--out", default="quickstart-out", metavar="DIR", help="default: %(default)s")
    given: str = parser.parse_args(argv).out
    if not given:  # an unset variable, most often; it would mean the current folder
        raise UsageError("--out is empty; name a folder")
    out = Path(given).absolute()
    input_checks.check_writable("--out", out)
    out.mkdir(parents=True, exist_ok=True)
    console = terminal.console()

    text = prepare([sysconfig.get_paths()["stdlib"]], out / "data" / "stdlib", text_options())
    console.print(f"{text.documents:,} files of Python's standard library, {text.tokens:,} byte tokens")
    faults = [f"scale:step={step},factor=50" for step in HARD_BATCHES] + [f"nan:step={NAN_STEP},rank={NAN_RANK}"]
    flags = [*MODEL, *text.training_flags, "--data-cache-path", str(out / "data" / "cache")]
    flags += [word for fault in faults for word in ("--drill-fault", fault)]
    stock = _train("stock", [*flags, "--stability-mode", "off"], out, console)
    plugin = _train("plugin", [*flags, "--spec", "megatron_stability"], out, console)

    finished = [replace(each, view=replace(each.view, notes=_story(each))) for each in (stock, plugin)]
    build_report([each.view for each in finished], out / "report.html", title="Quickstart: stock and with the plugin")
    summary = {
        "tensor_model_parallel_size": TENSOR,
        "pipeline_model_parallel_size": PIPELINE,
        **{each.view.name: each.summary() for each in finished},
    }
    pages.replace("--out", out / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
    console.print(table([each.view for each in finished]))
    for each in finished:
        for line in each.view.notes:
            console.print(f"{each.view.name}: {line}", highlight=False)
    console.print(f"report: {out / 'report.html'}\nfigures: {out / 'summary.json'}", soft_wrap=True)
    return EXIT_FINE if all(each.exit_code == EXIT_FINE for each in finished) else EXIT_FINDING


def text_options() -> Options:
    """What is taken of the standard library: sources, without what pip put beside them and without its tests."""
    exclude = ("*/site-packages/*", "site-packages/*", "*/test/*", "test/*", "*/tests/*")
    return Options(patterns=("*.py",), exclude=exclude, max_bytes=TEXT_BYTES, overwrite=True, follow_links=True)


def _train(name: str, flags: Sequence[str], out: Path, console: Console) -> Finished:
    folder = out / name
    command = [sys.executable, "-m", "megatron_stability.cli", "pretrain", "--nproc", str(TENSOR * PIPELINE), "--cpu"]
    command += [*flags, "--tensorboard-dir", str(folder / "tensorboard"), "--stability-record-dir", str(folder)]
    for old in (*folder.glob("tensorboard/*"), *folder.glob("ledger.*")):
        old.unlink()
    folder.mkdir(exist_ok=True)
    started = time.monotonic()
    code = _follow(command, folder / "log.txt", name, console)
    seconds = time.monotonic() - started
    stock = _from_tensorboard(name, folder / "tensorboard")
    view = RunView.from_ledger(folder, name) if (folder / "ledger.jsonl").exists() else stock
    if not view.steps:
        raise UsageError(f"the {name} run took no step (exit code {code}); its log is {folder / 'log.txt'}")
    return Finished(view, code, seconds)


def _follow(command: Sequence[str], log: Path, name: str, console: Console) -> int:
    """Run it, its output into `log`, its iterations onto a progress bar."""
    columns = (
        TextColumn(f"{name:>6}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with (
        io.TextIOWrapper(files.open_log(log), encoding="utf-8") as stream,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("importing Megatron", total=STEPS)
        assert process.stdout is not None
        deadline = time.monotonic() + LIMIT_S
        for line in process.stdout:
            stream.write(line)
            if match := re.search(r"iteration +(\d+)/.*lm loss: (\S+)", line):
                progress.update(task, completed=int(match[1]), description=f"loss {float(match[2]):.3f}")
            if time.monotonic() > deadline:
                process.kill()
                raise UsageError(f"the {name} run took more than {LIMIT_S} s; its log is {log}")
    return process.returncode


def _from_tensorboard(name: str, folder: Path) -> RunView:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    if "lm loss" not in events.Tags()["scalars"]:
        return RunView(name=name, steps=(), loss=(), grad_norm=(), learning_rate=())
    loss, norm, rate = (events.Scalars(tag) for tag in ("lm loss", "grad-norm", "learning-rate"))
    return RunView(
        name=name,
        steps=[point.step for point in loss],
        loss=[point.value for point in loss],
        grad_norm=[point.value for point in norm],
        # Megatron steps the scheduler before it logs, so that what stands at a step is the next one's
        learning_rate=[math.nan, *(point.value for point in rate[:-1])],
        facts={
            "mode": "off",
            "layout": f"tensor_model_parallel_size {TENSOR}, pipeline_model_parallel_size {PIPELINE}",
        },
    )


def _story(finished: Finished) -> list[str]:
    """What the run's own numbers say of each fault, and of its end."""
    view = finished.view
    loss = dict(zip(view.steps, view.loss, strict=True))
    norm = dict(zip(view.steps, view.grad_norm, strict=True))
    lines = []
    for step in (*HARD_BATCHES, NAN_STEP):
        fault = "one NaN gradient element" if step == NAN_STEP else "gradient 50 times too large"
        did = "skipped" if step in view.withheld else "applied"
        before, after = loss.get(step - 1, math.nan), loss.get(step + 1, math.nan)
        lines.append(
            f"step {step}, {fault}: {did} (gradient norm {number(norm.get(step))}, "
            f"loss {number(before)} before, {number(after)} after)"
        )
    lost = finished.lost_samples()
    if lost:
        first = next(step for step, value in loss.items() if not math.isfinite(value) and step not in view.withheld)
        lines.append(f"loss is not finite from step {first} on: {lost:,} samples were read and taught nothing")
    last = [value for step, value in loss.items() if step not in view.withheld][-1]
    lines.append(f"final loss {number(last)}, {len(finished.skipped)} steps skipped, exit code {finished.exit_code}")
    return lines
