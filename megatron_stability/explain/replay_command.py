"""The command line of `replay`: plan, progress, table, page, and the gate."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_stability import files, terminal
from megatron_stability.errors import EXIT_FINDING, EXIT_FINE, UsageError
from megatron_stability.explain import branches, replay
from megatron_stability.explain.facts.fact import amplified, departs
from megatron_stability.explain.replay import RESULT, Outcome, Plan
from megatron_stability.ledger.entries import read, strict
from megatron_stability.report.command import build_report
from megatron_stability.report.runview import RunView, ledger_of
from megatron_stability.report.summary import number

PAGE = "replay.html"
EXAMPLE = """examples:
  megatron-stability replay runs/a 1200 --plan -- pretrain --nproc 4 FLAGS OF THE RUN
  megatron-stability replay runs/a 1200 --branches replay,skip,lr -- pretrain --nproc 4 FLAGS OF THE RUN
  megatron-stability replay runs/a --branches skip --gate 50 -- torchrun --nproc-per-node 8 pretrain_gpt.py FLAGS
branches:
"""


def run(argv: Sequence[str]) -> int:
    """The command `replay`.

    Args:
        argv: its arguments.

    Returns:
        0; 1 where a branch gave no answer, the replay was not reproducible, or the gate does not hold.

    Raises:
        UsageError: no such run, step, branch or checkpoint, no command, or a folder that can't be written.
    """
    at = list(argv).index("--") if "--" in argv else len(argv)
    options = _parser().parse_args(argv[:at])
    for name in ("after", "gate"):
        if getattr(options, name) < 0:
            raise UsageError(f"--{name} {getattr(options, name)}: must not be negative")
    if not options.timeout > 0:
        raise UsageError(f"--timeout {options.timeout:g}: must be more than 0 seconds")
    planned = replay.plan(
        ledger_of(options.run),
        step=options.step,
        command=argv[at + 1 :],
        names=options.branches.split(","),
        checkpoints=options.checkpoints,
        after=max(options.after, options.gate),
    )
    out = options.out or Path(f"replay-{planned.scene.step.step}")
    if options.plan:
        _show_plan(planned, out)
        return EXIT_FINE
    return _run(planned, out, options)


def _run(planned: Plan, out: Path, options: argparse.Namespace) -> int:
    _own_folder(out)
    console = Console(stderr=True)
    outcomes = []
    with console.status("") as doing:
        doing.update(f"{len(planned.chosen)} branches of {planned.steps} steps")
        for outcome in replay.run(planned, out, timeout_s=options.timeout):
            outcomes.append(outcome)
            console.print(f"{outcome.name}: {outcome.failure or outcome.meaning}", markup=False, soft_wrap=True)
    held = _gate(planned, out, outcomes[-1]) if options.gate else None
    document = {
        "step": planned.scene.step.step,
        "from": planned.good.step,
        "until": planned.until,
        "branches": [asdict(each) for each in outcomes],
        "left_out": dict(planned.left_out),
        "gate": held,
    }
    text = json.dumps(strict(document), indent=1, allow_nan=False)
    files.write_atomically(out / RESULT, text.encode())
    _page(out, outcomes)
    if options.json:
        print(text)
    else:
        _show(planned, outcomes, held)
    wrong = any(each.failure for each in outcomes) or not outcomes[0].equal or held is False
    return EXIT_FINDING if wrong else EXIT_FINE


def _own_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out}: can't be made ({error.strerror}); name another folder") from None
    foreign = [path.name for path in out.iterdir() if path.name not in (*branches.BRANCHES, RESULT, PAGE)]
    if foreign:
        raise UsageError(f"--out {out}: holds {foreign[0]}, which is no replay's; name a folder of its own")


def _gate(planned: Plan, out: Path, last: Outcome) -> bool:
    """Whether the last branch's steps after the incident all lie in the band of before it."""
    if last.failure:
        return False
    scene = planned.scene
    after = [step for step in read(out / last.name / replay.FOLDER).steps if step.step > scene.step.step]
    withheld = any(step.fate != "trained" for step in after)
    return bool(after) and not withheld and not any(departs(s, scene.loss) or amplified(s, scene.norm) for s in after)


def _page(out: Path, outcomes: Sequence[Outcome]) -> None:
    """The branches' curves on the same axes, where the extra that draws is there."""
    drawn = [each.name for each in outcomes if not each.failure]
    if drawn and all(importlib.util.find_spec(name) for name in ("plotly", "jinja2")):
        build_report([RunView.from_ledger(out / name, name) for name in drawn], out / PAGE, "Replay of an incident")


def _show_plan(planned: Plan, out: Path) -> None:
    console = terminal.console()
    step = planned.scene.step
    console.print(
        f"step {step.step} (samples {step.first_sample} to {step.last_sample}), from the checkpoint of step "
        f"{planned.good.step}: {planned.steps} steps a branch on {planned.scene.ranks or 'the same'} ranks",
        markup=False,
        soft_wrap=True,
    )
    if planned.rank_seconds is not None:
        console.print(f"about {planned.rank_seconds / 3600:.2g} rank-hours, without start-up", markup=False)
    for name, branch in planned.chosen.items():
        console.print(f"\n{name}: {branch.says}", markup=False)
        console.print("  " + " ".join(planned.argv(branch, out / name)), markup=False, soft_wrap=True, highlight=False)
    _show_left_out(console, planned)


def _show_left_out(console: Console, planned: Plan) -> None:
    for name, why in planned.left_out.items():
        console.print(f"{name} is left out: {why}", markup=False)


def _show(planned: Plan, outcomes: Sequence[Outcome], held: bool | None) -> None:
    console = terminal.console()
    step = planned.scene.step
    table = Table(show_edge=False, pad_edge=False)
    for head in ("branch", "loss", "gradient norm", "last loss", "incident", "says"):
        table.add_column(head, overflow="fold")
    table.add_row("the run", number(step.loss), number(step.grad_norm), "", "yes", "")
    for each in outcomes:
        table.add_row(*_cells(each))
    console.print(table)
    _show_left_out(console, planned)
    if held is not None:
        what = "holds" if held else "does not hold: a step after the incident was withheld or left the band"
        console.print(f"gate of branch {outcomes[-1].name}: {what}", markup=False)


def _cells(each: Outcome) -> list[Any]:
    if each.failure:
        return [each.name, "–", "–", "–", "–", escape(each.failure)]
    loss = number(each.loss) if math.isfinite(each.loss) or each.present else "passed over"
    came = "yes" if each.present else "no"
    return [each.name, loss, number(each.grad_norm), number(each.last_loss), came, escape(each.meaning)]


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:<8}  {branch.says}" for name, branch in branches.BRANCHES.items())
    parser = argparse.ArgumentParser(
        prog="megatron-stability replay",
        description="Run an incident again from the last good checkpoint, in branches that differ by one thing. The "
        "run's folders are only read.",
        epilog=EXAMPLE + listed,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="the run's folder, with its ledger")
    parser.add_argument("step", type=int, nargs="?", help="the incident's step (default: the last incident's first)")
    parser.add_argument("--branches", default=",".join(branches.DEFAULT), help="by commas (default: %(default)s)")
    parser.add_argument("--checkpoints", type=Path, help="the run's saves (default: the command's --save or --load)")
    parser.add_argument("--after", type=int, default=3, help="steps after the incident (default: 3)")
    parser.add_argument(
        "--gate",
        type=int,
        default=0,
        metavar="N",
        help="N steps after it must be as those before it, in the last branch: exit code 0 or 1",
    )
    parser.add_argument("--out", type=Path, help="a folder of its own (default: replay-STEP); what is there is kept")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds a branch (default: 3600)")
    parser.add_argument("--plan", action="store_true", help="show steps, ranks, cost and commands; run nothing")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser
