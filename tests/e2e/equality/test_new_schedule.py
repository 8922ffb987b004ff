"""A learning rate that an operator lowers at a resume is the one that the next steps have."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stability.errors import EXIT_UNUSABLE
from megatron_stability.ledger import entries
from tests.dist.pool import Pool
from tests.e2e import jobs

pytestmark = pytest.mark.megatron
LOWER = ("--lr", "1e-4", "--min-lr", "1e-5")
ASKED = ("--override-opt_param-scheduler", "--stability-checkpoint-allow-changes", "lr,min_lr")


def train(pool: Pool, out: Path, *flags: str, code: int = 0) -> list[float]:
    """Learning rate of each surviving step."""
    where = ("--save", str(out), "--stability-record-dir", str(out / "stability"), "--train-iters", "6")
    results = pool.run(jobs.train, (*where, "--save-interval", "3", *flags), world=1, timeout=180)
    assert [answer for answer, _ in results] == [code]
    return [step.learning_rate for step in entries.read(out / "stability").surviving]


@pytest.mark.parametrize(
    ("release", "optimizer"),
    [
        pytest.param("0.19.2", (), id="plain", marks=pytest.mark.rare),
        pytest.param("0.19.2", jobs.SHARDED, id="sharded"),
        pytest.param("0.18.2", (), id="0.18", marks=pytest.mark.rare),
        pytest.param("0.18.2", jobs.SHARDED, id="0.18-sharded", marks=pytest.mark.rare),
    ],
)
def test_the_next_steps_have_the_new_rate(
    pools: dict[tuple[str, str], Pool], tmp_path: Path, release: str, optimizer: tuple[str, ...]
) -> None:
    """Megatron-LM#1138, #963, #1284. Step n has the schedule's rate after n-1 steps: 0 to 1 in two, then a cosine."""
    pool = pools[release, "patched"]
    before = train(pool, tmp_path, *optimizer, "--exit-interval", "3")
    assert before == pytest.approx([0.0, 5e-4, 1e-3])
    resume = (*optimizer, "--load", str(tmp_path), *LOWER)
    train(pool, tmp_path, *resume, code=EXIT_UNUSABLE)
    after = train(pool, tmp_path, *resume, *ASKED)
    assert after[3:] == pytest.approx([8.681981e-05, 5.5e-05, 2.318020e-05], rel=1e-5)
