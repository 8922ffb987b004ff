"""What the hook is told of a run: one rank, one stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_stability.numerics.fp8.config import Fp8
from megatron_stability.transformer_engine.hook import Run


def a_run(**changes: Any) -> Run:
    facts: dict[str, Any] = {
        "recipe": "delayed",
        "margin": 0,
        "iteration": lambda: 20,
        "loaded": dict,
        "stage": 1,
        "stage_group": None,
        "gather": lambda own: [own],
        "folder": Path("unused"),
        "speaks": True,
    }
    settings = {name: changes.pop(name) for name in tuple(changes) if name in Fp8.model_fields}
    return Run(**(facts | changes), fp8=Fp8(**settings))
