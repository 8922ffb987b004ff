"""The comparison as a table for people: each figure, its gate, whether it passes."""

from __future__ import annotations

from typing import Any

from megatron_stability.fp8_compare.gates import EARLY, layer_name

_UNKNOWN = "-"


def table(result: dict[str, Any]) -> str:
    """A headline with tolerance and tokens, one line a figure with its gate's outcome, findings, and the verdict.

    Args:
        result: from `criteria.compare`.
    """
    lines = [headline(result)]
    found = rows(result)
    widths = [max(len(row[i]) for row in found) for i in range(4)]
    for name, value, limit, outcome, note in found:
        gate = f"gate {limit:>{widths[2]}}" if limit else " " * (widths[2] + 5)
        lines.append(f"  {name:<{widths[0]}}  {value:>{widths[1]}}  {gate}  {outcome:<{widths[3]}}  {note}".rstrip())
    return "\n".join([*lines, *(f"FINDING: {finding}" for finding in result["findings"]), result["verdict"]])


def headline(result: dict[str, Any]) -> str:
    """Which runs, how long, and what ran in FP8."""
    scaling = result["scaling"]
    length, algorithm = result["history"]
    how = f", {scaling} scaling" if scaling else ""
    how += f" (history {length}, {algorithm})" if scaling == "delayed" else ""
    return (
        f"{result['fp8']} against {result['control']}: {result['steps']} steps, {result['tokens']:,.0f} tokens, "
        f"{result['warmup']} steps of warmup, FP8 in {result['fp8_share']:.0%} of linears{how}"
    )


def rows(result: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """(figure, value, limit, outcome, note), as the table and the page show them."""
    worst, noise = result["loss_error_worst"], result["noise"]
    band = f"two BF16 seeds: {noise['worst']['error']:.4%}" if noise else "no second seed (--noise)"
    gates, telemetry = result["gates"], result["telemetry"]
    outcome = {verdict["gate"]: _shown(verdict["outcome"]) for verdict in result["verdicts"]}
    span = f"loss error, steps {worst['first_step']}-{worst['last_step']}"

    def measured(name: str, show: Any) -> tuple[str, str, str, str, str]:
        return name, show(telemetry[name]), _limit(gates[name]), outcome[name], telemetry[f"{name}_at"] or ""

    return [
        (span, _share(worst["error"]), f"{result['loss_error_limit']:.4%}", outcome["loss"], band),
        ("loss error, mean", _share(result["loss_error_mean"]), "", "", ""),
        ("gradient norm ratio, median", _plain(result["grad_norm_ratio_median"]), "", "", ""),
        *_cosines(result, outcome["cosine"]),
        ("binades of normal values", *measured("binades", _plain)[1:]),
        measured("underflow", _share),
        measured("saturation", _share),
        (
            *("held-out loss error", _share(result["held_out_error"]), _percent(result["held_out_limit"])),
            *(outcome["held-out"], ""),
        ),
        (
            *("time a step / control's", _plain(result["slowdown"]), _limit(gates["slowdown"])),
            *(outcome["time"] if gates["slowdown"] else "", _speed(result)),
        ),
        (
            *("withheld steps, FP8 / BF16", f"{result['withheld']['fp8']} / {result['withheld']['control']}"),
            *("the same", outcome["steps"], ""),
        ),
    ]


def _shown(outcome: str) -> str:
    return {"fail": "FAIL", "not measured": "NOT MEASURED"}.get(outcome, outcome)


def _cosines(result: dict[str, Any], outcome: str) -> list[tuple[str, str, str, str, str]]:
    seen = [row for row in result["updates"] if row["step"] >= EARLY]
    limit = _limit(result["gates"]["cosine"])
    if not seen:
        return [("gradient cosine, worst layer", _UNKNOWN, limit, outcome, "")]
    first, last = seen[0], seen[-1]
    limit = limit if first["step"] == EARLY else ""
    departed = result["first_departure"]
    note = (
        f"first departs: {layer_name(departed['layer'])}, step {departed['step']}" if departed else "no layer departs"
    )
    found = [
        (f"gradient cosine, worst layer, step {first['step']}", _least(first["gradient_cosine"]), limit, outcome, note),
        (f"update cosine, worst layer, step {last['step']}", _least(last["update_cosine"]), "", "", ""),
    ]
    return found if last["update_cosine"] else found[:1]


def _least(cosines: list[float | str] | None) -> str:
    values = [float(value) for value in cosines or ()]
    known = [value for value in values if value == value]  # a NaN is a layer without a gradient
    return f"{min(known):.4f}" if known else _UNKNOWN


def _speed(result: dict[str, Any]) -> str:
    rates = result["tokens_per_second"]
    return " / ".join(f"{rates[name]:,.0f}" for name in ("fp8", "control")) + " tokens/s" if all(rates.values()) else ""


def _share(value: float | str | None) -> str:
    return _UNKNOWN if value is None else f"{float(value):+.4%}"


def _plain(value: float | str | None) -> str:
    return _UNKNOWN if value is None else f"{float(value):.3f}"


def _limit(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.4%}"
