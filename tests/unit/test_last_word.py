"""The reason why a run was refused is the last word on the screen, whatever its host prints after it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from megatron_stability.megatron.start.ranks import sentence_last

REASON = "megatron-stability nemo: checkpoint.load x: holds no checkpoint; give another folder"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (f"a warning\n{REASON}\n", f"a warning\n{REASON}\n"),
        (f"{REASON}\nTraceback ...\nSystemExit: 2\n", f"{REASON}\nTraceback ...\nSystemExit: 2\n\n{REASON}\n"),
        (f"megatron-stability: first\n{REASON}\nmore\n\n", f"megatron-stability: first\n{REASON}\nmore\n\n{REASON}\n"),
        ("> megatron-stability: mode act\nTraceback\n", "> megatron-stability: mode act\nTraceback\n"),
        ("", ""),
    ],
)
def test_the_sentence_comes_last(said: str, shown: str) -> None:
    assert sentence_last(said) == shown
