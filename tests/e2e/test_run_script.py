"""`megatron-stability run SCRIPT`: a script that knows nothing of the plugin, both releases, both `--spec` forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_stability.ledger import entries, fates
from megatron_stability.megatron.start.job import Job
from tests import effort
from tests.dist.pool import Context, Pool
from tests.e2e import artifacts, jobs
from tests.e2e.conftest import RELEASES

pytestmark = pytest.mark.megatron

SCRIPT = Path(__file__).with_name("script.py")
STEPS = 4
ONE_NAME = ("--spec", "megatron_stability")
TWO_NAMES = ("--spec", "megatron_stability.megatron.model.layer_specs", "stability_layer_spec")
# Dense and MoE layers in turn: one ModuleSpec for the block must still give each layer its own kind.
ALTERNATING = (*jobs.MOE, "--num-layers", "4", "--moe-layer-freq", "[0,1,0,1]", *jobs.PP2, "--tied")


def run_script(context: Context, argv: tuple[str, ...]) -> None:
    Job(argv, SCRIPT, cpu=True, patched=True).train()


def _run(pool: Pool, out: Path, *flags: str) -> dict[str, Any]:
    argv = jobs.command_line((*ALTERNATING, "--train-iters", str(STEPS), "--tensorboard-dir", str(out), *flags))
    pool.run(run_script, argv, world=2, timeout=180)
    scalars = artifacts.scalars(out)
    assert len(scalars["lm loss"]) == STEPS
    return {tag: scalars[tag] for tag in ("lm loss", "grad-norm")}


@pytest.mark.parametrize("release", effort.sampled(RELEASES, RELEASES[:1]))
def test_both_forms_build_what_the_script_would(
    pools: dict[tuple[str, str], Pool], tmp_path: Path, release: str
) -> None:
    stock = _run(pools[release, "stock"], tmp_path / "stock")
    assert _run(pools[release, "stock"], tmp_path / "two-names", *TWO_NAMES) == stock
    record = ("--stability-mode", "act", "--stability-record-dir", str(tmp_path / "stability"))
    assert _run(pools[release, "patched"], tmp_path / "one-name", *ONE_NAME, *record) == stock
    view = entries.read(tmp_path / "stability")
    assert [(step.step, step.fate) for step in view.surviving] == [(i + 1, "trained") for i in range(STEPS)]
    assert fates.audit(view) == []
