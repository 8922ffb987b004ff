"""Which checkpoint is next, whatever operators do: random sequences of their actions against an independent model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import effort
from tests.dist.checkpoint import operators
from tests.dist.pool import Context, Pool

pytestmark = pytest.mark.megatron
SEQUENCES, ACTIONS = effort.examples(70, 300), 10


def sequences(context: Context, folder: str) -> dict[str, int]:
    """All of them in one process; how often what happened in them."""
    import contextlib
    import io
    import os
    import shutil

    context.megatron()
    os.fsync = lambda descriptor: None  # a death here leaves the page cache
    seen = {"starts": 0, "refusals": 0, "deaths": 0}
    for seed in range(SEQUENCES):
        root = Path(folder) / str(seed)
        sequence = operators.Sequence(root, seed)
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                sequence.run(ACTIONS)
        except BaseException as error:
            raise AssertionError(f"sequence {seed}: {error!r}\n{said.getvalue()[-2000:]}") from error
        for name in seen:
            seen[name] += getattr(sequence, name)
        shutil.rmtree(root)
    return seen


def test_every_start_takes_the_checkpoint_that_must_be_next(patched_ranks: Pool, tmp_path: Path) -> None:
    (seen,) = patched_ranks.run(sequences, str(tmp_path), world=1, timeout=400)
    assert seen["starts"] > 3 * SEQUENCES, seen
    assert seen["refusals"] > SEQUENCES / 2, seen
    assert seen["deaths"] > 0.3 * SEQUENCES, seen
