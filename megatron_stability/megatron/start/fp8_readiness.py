"""`megatron-stability fp8-readiness`: whether a checkpoint's linears would bear FP8, and which to keep in BF16.

Megatron loads the model and runs its validation set forward (`--skip-train`); a hook on every linear of the decoder
feeds NVIDIA ModelOpt's calibrators and our own statistics with the same inputs. ModelOpt is the independent witness:
its largest absolute value has to be ours. Only forward tensors are judged: its calibrators know no E5M2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_stability.errors import EXIT_FINE, UsageError
from megatron_stability.megatron.start import command, input_checks, ranks
from megatron_stability.numerics.fp8.formats import amax
from megatron_stability.numerics.fp8.readiness import Expected, LayerReadiness, expected, most_sensitive_first
from megatron_stability.numerics.fp8.readiness import output_snr_db as output_snr
from megatron_stability.numerics.fp8.recipes import Recipe
from megatron_stability.records import encode_float
from megatron_stability.report import pages

ROWS = 512  # inputs of a layer that are kept for the SNRs, spread over the batches
E4M3_BITS = (4, 3)  # ModelOpt's name for it


class LinearCalibration:
    """One linear: its calibrators, our amax, and some of its inputs."""

    def __init__(self, name: str, weight: torch.Tensor, rows_a_call: int, percentile: float) -> None:
        """ModelOpt is imported here: at the top it would add seconds to every command.

        Args:
            name: in the whole model.
            weight: [out, in].
            rows_a_call: inputs kept of each call.
            percentile: of the histogram, in [0, 100].
        """
        self.name, self.weight, self._rows_a_call, self._percentile = name, weight.detach(), rows_a_call, percentile
        self._input = _Calibrators()
        self.rows: list[torch.Tensor] = []

    @torch.no_grad()
    def see(self, x: torch.Tensor) -> None:
        """An input [..., in]; what is not finite can't be calibrated with.

        Raises:
            UsageError: names the layer.
        """
        if x.numel() == 0:
            return
        if not bool(x.isfinite().all()):
            raise UsageError(f"fp8-readiness: the input of {self.name} holds NaN or Inf; the checkpoint is unusable")
        flat = x.detach().reshape(-1, x.shape[-1])
        self._input.collect(flat)
        stride = max(1, flat.shape[0] // self._rows_a_call)
        self.rows.append(flat[::stride][: self._rows_a_call].clone())

    def result(self, recipe: Recipe) -> LayerReadiness:
        """What was seen, judged."""
        weight = _Calibrators()
        weight.collect(self.weight)
        if not self.rows:
            nothing = Expected(math.nan, math.nan, math.nan, math.nan)
            return LayerReadiness(self.name, {"telemetry": nothing}, self._expected(weight, self.weight), math.nan)
        rows = torch.cat(self.rows)
        return LayerReadiness(
            self.name,
            self._expected(self._input, rows),
            self._expected(weight, self.weight),
            output_snr(rows, self.weight, recipe),
        )

    def _expected(self, calibrators: _Calibrators, x: torch.Tensor) -> dict[str, Expected]:
        return {name: expected(x, value) for name, value in calibrators.amaxes(self._percentile, x).items()}


class _Calibrators:
    """ModelOpt's max and histogram calibrators for E4M3, and our own amax, fed with the same tensors."""

    def __init__(self) -> None:
        from modelopt.torch.quantization.calib import HistogramCalibrator, MaxCalibrator

        self._max, self._histogram = MaxCalibrator(num_bits=E4M3_BITS), HistogramCalibrator(num_bits=E4M3_BITS)
        self._own = 0.0

    def collect(self, x: torch.Tensor) -> None:
        self._own = max(self._own, float(amax(x)))
        self._max.collect(x)
        self._histogram.collect(x)

    def amaxes(self, percentile: float, sample: torch.Tensor) -> dict[str, float]:
        """By name; "mse" is searched on the sample, since the histogram's search does not take E4M3 in 0.47."""
        from modelopt.torch.quantization.calib import MseCalibrator
        from modelopt.torch.quantization.tensor_quant import scaled_e4m3

        largest = self._max.compute_amax().float()
        found = {
            "telemetry": self._own,
            "max": largest,
            "percentile": self._histogram.compute_amax("percentile", percentile=percentile),
            "mse": largest,
        }
        if largest > 0:
            search = MseCalibrator(largest, quant_func=lambda x, amax: scaled_e4m3(x, amax, None, *E4M3_BITS))
            search.collect(sample)
            found["mse"] = search.compute_amax()
        return {name: float(value) for name, value in found.items()}


def hook(model: torch.nn.Module, calls: int, percentile: float) -> list[LinearCalibration]:
    """Watch every linear of the model's layers.

    Args:
        model: a chunk that is the whole model.
        calls: forwards that will be run.
        percentile: as for `LinearCalibration`.

    Returns:
        One entry a linear, in the model's order; the embedding and the output layer stay in BF16 under TE too.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    watched = []
    for name, module in model.named_modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and not name.endswith("output_layer"):
            linear = LinearCalibration(name, module.weight, max(1, ROWS // calls), percentile)
            module.register_forward_pre_hook(lambda _, inputs, linear=linear: linear.see(inputs[0]))
            watched.append(linear)
    return watched


def report(layers: Sequence[LayerReadiness], recipe: Recipe, calls: int, keep: int) -> dict[str, Any]:
    """For machines: layers, most sensitive first, and the names that stay in BF16.

    Args:
        layers: of the model.
        recipe: whose rounding the output's SNR is of.
        calls: forwards that were run.
        keep: how many names to give.
    """
    import modelopt

    ordered = most_sensitive_first(layers)
    return {
        "recipe": recipe.name,
        "forwards": calls,
        "modelopt": modelopt.__version__,
        "torch": torch.__version__,
        "keep_in_bf16": [layer.name for layer in ordered[:keep] if not math.isnan(layer.output_snr_db)],
        "layers": [
            {
                "name": layer.name,
                "output_snr_db": encode_float(layer.output_snr_db),
                "input": _encoded(layer.input),
                "weight": _encoded(layer.weight),
            }
            for layer in ordered
        ],
    }


def _encoded(choices: Mapping[str, Expected]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: {key: encode_float(value) for key, value in dataclasses.asdict(each).items()}
        for name, each in choices.items()
    }
    if "max" in choices:
        found["amax_difference"] = encode_float(choices["telemetry"].amax - choices["max"].amax)
    return found


def table(layers: Sequence[LayerReadiness]) -> str:
    """For people: amax by each calibrator and the SNR it leads to (dB), most sensitive layer first."""
    lines = [f"{'':44}{'output':>8}  {'input: amax (SNR dB) by max, percentile, mse':54}weight: max (SNR dB)"]
    for layer in most_sensitive_first(layers):
        inputs = "  ".join(
            f"{layer.input[name].amax:9.4g} ({layer.input[name].snr_db:4.1f})"
            for name in ("max", "percentile", "mse")
            if name in layer.input
        )
        own = layer.weight["max"]
        lines.append(f"{layer.name:44}{layer.output_snr_db:8.2f}  {inputs:54}{own.amax:9.4g} ({own.snr_db:4.1f})")
    return "\n".join(lines)


def judge(options: argparse.Namespace, rest: list[str]) -> int:
    """Load, run forward, report.

    Args:
        options: of the command.
        rest: Megatron's flags.

    Returns:
        0.

    Raises:
        UsageError: the checkpoint or its values are unusable.
    """
    layers = _calibrated(options, rest)
    recipe = Recipe(name=options.recipe)
    results = [layer.result(recipe) for layer in layers]
    print(table(results))
    found = report(results, recipe, options.forwards, options.keep)
    print(f"keep in BF16 first: {', '.join(found['keep_in_bf16'])}")
    if options.json is not None:
        pages.replace("--json", options.json, json.dumps(found, indent=1, allow_nan=False) + "\n")
    return EXIT_FINE


def _calibrated(options: argparse.Namespace, rest: list[str]) -> list[LinearCalibration]:
    """Megatron's own loading and validation, with the hooks in; this process is the one rank."""
    iterations = str(options.forwards)
    flags = [*rest, "--skip-train", "--eval-iters", iterations, "--no-load-optim", "--no-load-rng", "--finetune"]
    checked, _ = command.launcher_options("pretrain", ["--cpu", *flags] if options.cpu else flags)
    job = command.checked_job(checked, flags, None, world=1)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"} | ranks.rendezvous()
    job.prepare()
    if complaint := input_checks.complaint_about_arguments(job, 1):
        raise UsageError(complaint)
    watched: list[LinearCalibration] = []
    job.train(lambda model: watched.extend(hook(model, options.forwards, options.percentile)))
    if not any(layer.rows for layer in watched):
        raise UsageError("fp8-readiness: the validation set is empty; give --data-path with a --split that has one")
    return watched
