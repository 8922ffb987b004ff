"""What the gate of `compare` says of healthy and of broken FP8, with the quickstart's model and text.

    python -m tests.drills.fp8_compare run --folder DIR --seed 1        once for each of three seeds or more
    python -m tests.drills.fp8_compare judge --folder DIR --out docs/drills/fp8_compare.json --figure docs/fp8.svg

One rank, 320 steps of 4 sequences, emulated delayed scaling: as Transformer Engine has it ("healthy"), with a margin of
8, and with E4M3 gradients at a margin of 12, whose largest code is 0.11. The next seed's BF16 run is the noise band.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.results import PLUGIN
from megatron_stability.fp8_compare.command import figures
from megatron_stability.fp8_compare.criteria import compare
from megatron_stability.fp8_compare.gates import EARLY, Gates
from megatron_stability.megatron import cpu
from megatron_stability.megatron.start import quickstart
from megatron_stability.megatron.start.prepare_data import prepare
from tests.dist.pool import Context, Pool
from tests.e2e import jobs

STEPS, DONE = 320, "done.json"
DELAYED = (
    *("--stability-fp8-emulate", "delayed", "--fp8-amax-history-len", "1024", "--fp8-amax-compute-algo", "max"),
    *("--stability-fp8-sample-every", "25"),
)
ARMS: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "healthy": DELAYED,
    "margin 8": (*DELAYED, "--fp8-margin", "8"),
    "E4M3 gradients, tiny scale": (*DELAYED, "--stability-fp8-format", "e4m3", "--fp8-margin", "12"),
}
COMMON = (
    *("--bf16", "--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"),
    *("--global-batch-size", "4", "--train-iters", str(STEPS)),
    *("--split", "95,5,0", "--eval-iters", "20", "--eval-interval", str(STEPS)),
    *("--log-interval", "100", "--spec", "megatron_stability", "--stability-mode", "observe"),
    *("--stability-observe-sketch-every", "25"),
)


def train(context: Context, flags: tuple[str, ...]) -> int:
    """One run; its exit code."""
    from megatron_stability.megatron.access import handle
    from megatron_stability.megatron.start import pretrain_gpt

    sys.argv = ["megatron-stability pretrain", *cpu.FLAGS, *flags]
    try:
        pretrain_gpt.main()
    except SystemExit as ending:
        return int(ending.code or 0)
    finally:
        handle.uninstall()
    return 0


def folder_of(root: Path, seed: int, arm: str) -> Path:
    """Of one run."""
    return root / f"seed{seed}" / arm.replace(" ", "-").replace(",", "")


def _of(folder: Path) -> dict[str, Any]:
    """The stamp of a run that went to its end, else nothing."""
    done = folder / DONE
    return dict(json.loads(done.read_text())) if done.exists() else {}


def run(options: argparse.Namespace) -> int:
    """Train a seed's arms; 0 where all went to their end."""
    root: Path = options.folder
    text = prepare([sysconfig.get_paths()["stdlib"]], root / "data" / "stdlib", quickstart.text_options())
    pool, failed, of = Pool(jobs.patched), 0, results.stamp((*PLUGIN, "tests/drills/fp8_compare.py"))
    try:
        for arm, flags in ARMS.items():
            folder = folder_of(root, options.seed, arm)
            if _of(folder).get("sources") == of["sources"] or (options.arms and arm not in options.arms):
                continue
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
            more = ("--seed", str(options.seed), "--stability-record-dir", str(folder))
            more += ("--tensorboard-dir", f"{folder}/tensorboard", "--data-cache-path", f"{root}/data/cache")
            began = time.monotonic()
            (code,) = pool.run(
                train, (*quickstart.MODEL, *text.training_flags, *COMMON, *more, *flags), world=1, timeout=400
            )
            if code == 0:
                (folder / DONE).write_text(json.dumps(of))  # not started again where a part is repeated
            print(f"seed {options.seed} {arm}: exit code {code}, {time.monotonic() - began:.0f} s", flush=True)
            failed += code != 0
    finally:
        pool.close()
    return min(failed, 1)


def judge(options: argparse.Namespace) -> int:
    """Compare every seed's FP8 arms with its control; 0 where healthy ones pass and the others fail, all of them."""
    seeds = sorted(int(folder.name[4:]) for folder in options.folder.glob("seed*"))
    found: list[dict[str, Any]] = []
    of, *others = [_of(folder_of(options.folder, seed, arm)) for seed in seeds for arm in ARMS]
    if not of or any(other.get("sources") != of["sources"] for other in others):
        raise SystemExit("runs are missing, or are of different code: `run` each seed again")
    for seed, other in zip(seeds, seeds[1:] + seeds[:1], strict=True):
        control, noise = (figures(folder_of(options.folder, each, "bf16")) for each in (seed, other))
        for arm in list(ARMS)[1:]:
            fp8 = figures(folder_of(options.folder, seed, arm))
            result = compare(fp8, control, noise, 100, Gates())
            binades = [(s.step, s.signals["fp8/binades"]) for s in fp8.steps if "fp8/binades" in s.signals]
            found.append(
                {
                    "seed": seed,
                    "arm": arm,
                    "passes": not result["findings"],
                    "findings": [finding.replace(f"{options.folder}/", "") for finding in result["findings"]],
                    "loss_error_worst": result["loss_error_worst"],
                    "loss_error_mean": result["loss_error_mean"],
                    "loss_error_limit": result["loss_error_limit"],
                    "held_out_error": result["held_out_error"],
                    "held_out_limit": result["held_out_limit"],
                    "telemetry": result["telemetry"],
                    "gradient_cosine": {row["step"]: row["gradient_cosine"] for row in result["updates"]},
                    "update_cosine": {r["step"]: r["update_cosine"] for r in result["updates"] if r["step"] > EARLY},
                    "first_departure": result["first_departure"],
                    "errors": [[step, round(float(error), 5)] for step, error in result["errors"][::5]],
                    "binades": [[step, round(value, 2)] for step, value in binades[::5]],
                }
            )
    separated = all(each["passes"] is (each["arm"] == "healthy") for each in found)
    summary = {"steps": STEPS, "tokens": result["tokens"], "seeds": seeds, "separated": separated}
    results.write(options.out, summary | {"runs": found}, of)
    options.figure.write_text(picture(found), encoding="utf-8")
    for each in found:
        print(each["seed"], each["arm"], "passes" if each["passes"] else each["findings"])
    return 0 if separated else 1


COLOURS = {"healthy": "#2a9d8f", "margin 8": "#e07b39", "E4M3 gradients, tiny scale": "#e63946"}
PANELS = (  # key, title, least, greatest, tick, factor
    ("errors", "relative loss error, smoothed (%), cut off at 6", -6.0, 6.0, 3, 100.0),
    ("binades", "binades left to normal values, fewest over tensors", -10.0, 16.0, 5, 1.0),
)
WIDTH, HEIGHT = 420, 240


def picture(runs: list[dict[str, Any]]) -> str:
    """Two panels, one curve a run; gates dashed."""
    limit = 100 * max(run["loss_error_limit"] for run in runs)
    panels = [_panel(*panel, runs) for panel in PANELS]
    panels[0] += _line(limit, *PANELS[0][2:4]) + _line(-limit, *PANELS[0][2:4])
    panels[1] += _line(Gates().binades or 0.0, *PANELS[1][2:4])
    legend = [
        f'<text x="{60 + 110 * i}" y="16" fill="{colour}">{arm}</text>'
        for i, (arm, colour) in enumerate(COLOURS.items())
    ]
    body = [f'<g transform="translate({60 + i * (WIDTH + 60)} 50)">{text}</g>' for i, text in enumerate(panels)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1020 {HEIGHT + 110}" font-family="sans-serif" '
    return "".join([head, 'font-size="12"><rect width="100%" height="100%" fill="white"/>', *legend, *body, "</svg>\n"])


def _panel(key: str, title: str, low: float, high: float, tick: int, factor: float, runs: list[dict[str, Any]]) -> str:
    parts = [f'<text y="-8">{title}</text><rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#8d99ae"/>']
    parts += [
        f'<text x="-8" y="{_y(level, low, high) + 4:.1f}" text-anchor="end">{level}</text>'
        for level in range(int(low), int(high) + 1, tick)
    ]
    parts += [
        f'<text x="{WIDTH * step / STEPS:.1f}" y="{HEIGHT + 16}" text-anchor="middle">{step}</text>'
        for step in range(0, STEPS + 1, 80)
    ]
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT + 34}" text-anchor="middle">step</text>')
    for run in runs:
        points = " ".join(f"{WIDTH * step / STEPS:.1f},{_y(factor * v, low, high):.1f}" for step, v in run[key])
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[run["arm"]]}" stroke-width="1.2"/>')
    return "".join(parts)


def _y(value: float, low: float, high: float) -> float:
    return HEIGHT * (1 - (min(max(value, low), high) - low) / (high - low))


def _line(level: float, low: float, high: float) -> str:
    return f'<path d="M0 {_y(level, low, high):.1f}H{WIDTH}" stroke="#333" stroke-dasharray="4 3"/>'


def main() -> int:
    """Run a part, or judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("run")
    part.add_argument("--folder", type=Path, required=True)
    part.add_argument("--seed", type=int, required=True)
    part.add_argument("--arms", nargs="*", choices=ARMS)
    part.set_defaults(call=run)
    part = parts.add_parser("judge")
    for name in ("--folder", "--out", "--figure"):
        part.add_argument(name, type=Path, required=True)
    part.set_defaults(call=judge)
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    return int(options.call(options))


if __name__ == "__main__":
    sys.exit(main())
