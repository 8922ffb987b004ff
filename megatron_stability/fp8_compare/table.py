"""The comparison as a table for people: each figure, its gate, whether it passes."""

from __future__ import annotations

from typing import Any

from megatron_stability.fp8_compare.criteria import EARLY, layer_name

_UNKNOWN = "not measured"


def table(result: dict[str, Any]) -> str:
    """A headline with tolerance and tokens, then one line a figure.

    Args:
        result: from `gate.compare`.
    """
    worst, noise = result["loss_error_worst"], result["noise"]
    lines = [
        f"{result['fp8']} against {result['control']}: {result['steps']} steps, {result['tokens']:,.0f} tokens, FP8 in "
        f"{result['fp8_share']:.0%} of linears"
    ]
    band = f"two BF16 seeds: {noise['worst']['error']:.4%}" if noise else "no second seed (--noise)"
    gates, telemetry = result["gates"], result["telemetry"]
    rows = [
        (
            f"loss error, steps {worst['first_step']}-{worst['last_step']}",
            _share(worst["error"]),
            f"{result['loss_error_limit']:.4%}",
            band,
        ),
        ("loss error, mean", _share(result["loss_error_mean"]), "", ""),
        ("gradient norm ratio, median", _plain(result["grad_norm_ratio_median"]), "", ""),
        *_cosines(result),
        ("binades of normal values", _plain(telemetry["binades"]), _limit(gates["binades"]), telemetry["binades_at"]),
        ("underflow", _share(telemetry["underflow"]), _limit(gates["underflow"]), telemetry["underflow_at"]),
        ("saturation", _share(telemetry["saturation"]), _limit(gates["saturation"]), telemetry["saturation_at"]),
        ("held-out loss error", _share(result["held_out_error"]), _percent(result["held_out_limit"]), ""),
        ("time a step / control's", _plain(result["slowdown"]), _limit(gates["slowdown"]), _speed(result)),
        (
            "withheld steps, FP8 / BF16",
            f"{result['withheld']['fp8']} / {result['withheld']['control']}",
            "",
            "",
        ),
    ]
    widths = [max(len(str(row[i])) for row in rows) for i in range(3)]
    lines += [
        f"  {name:<{widths[0]}}  {value:>{widths[1]}}  gate {limit:>{widths[2]}}  {note or ''}".rstrip()
        if limit
        else f"  {name:<{widths[0]}}  {value:>{widths[1]}}  {'':>{widths[2] + 5}}  {note or ''}".rstrip()
        for name, value, limit, note in rows
    ]
    return "\n".join(lines)


def _cosines(result: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    rows = [row for row in result["updates"] if row["step"] >= EARLY]
    limit = _limit(result["gates"]["cosine"])
    if not rows:
        return [("gradient cosine, worst layer", _UNKNOWN, limit, "--stability-observe-sketch-every N in both runs")]
    first, last = rows[0], rows[-1]
    limit = limit if first["step"] == EARLY else ""
    departed = result["first_departure"]
    note = (
        f"first departs: {layer_name(departed['layer'])}, step {departed['step']}" if departed else "no layer departs"
    )
    found = [
        (f"gradient cosine, worst layer, step {first['step']}", _least(first["gradient_cosine"]), limit, note),
        (f"update cosine, worst layer, step {last['step']}", _least(last["update_cosine"]), "", ""),
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
