"""What the hook is told of a run: one rank, one stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_stability.transformer_engine.hook import Run


def a_run(**changes: Any) -> Run:
    facts: dict[str, Any] = {
        "recipe": "delayed",
        "margin": 0,
        "sample_every": 100,
        "keep_amax_after_skips": 3,
        "recalibrate": 0,
        "iteration": lambda: 20,
        "loaded": dict,
        "stage": 1,
        "stage_group": None,
        "gather": lambda own: [own],
        "folder": Path("unused"),
        "speaks": True,
    }
    return Run(**(facts | changes))
