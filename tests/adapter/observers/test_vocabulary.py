"""Ids that are no tokens are replaced before the forward, and told of in the reduction."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch

from megatron_stability.errors import UsageError
from megatron_stability.megatron.observers.vocabulary import OUTSIDE, VocabularyHook
from megatron_stability.records import StepRecord
from tests.unit.steps import reduced

pytestmark = pytest.mark.megatron
V = 200


class Chunk(torch.nn.Module):
    """Keeps what a GPT model would compute with."""

    def forward(
        self, input_ids: Any, position_ids: Any, attention_mask: Any, decoder_input: Any = None, labels: Any = None
    ) -> None:
        self.seen = input_ids, labels


def refuse(found: int, vocab_size: int) -> None:
    raise UsageError(f"{found} of {vocab_size}")


def told(hook: VocabularyHook) -> float | None:
    """What the record of a step says, by the real packing; None where nothing."""
    return reduced({OUTSIDE: "max"}, dict(hook.observe()), {}).signals.get(OUTSIDE)


@pytest.fixture
def chunk() -> Chunk:
    return Chunk()


@pytest.fixture
def hook(chunk: Chunk) -> VocabularyHook:
    return VocabularyHook(V, [chunk], torch.device("cpu"), refuse)


def test_ids_of_the_vocabulary_pass_as_they_are(chunk: Chunk, hook: VocabularyHook) -> None:
    tokens, labels = torch.arange(V).view(2, -1), torch.full((2, 100), -100)
    chunk(tokens, None, None, labels=labels)
    assert torch.equal(chunk.seen[0], tokens)
    assert torch.equal(chunk.seen[1], labels), "a label below 0 is one to be ignored"
    assert told(hook) is None
    chunk(None, None, None, labels=None)  # a middle stage
    assert told(hook) is None


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("evaluating", [False, True])
@pytest.mark.parametrize(
    ("where", "bad", "said"), [("tokens", V, V), ("tokens", 2**40, 2**40), ("tokens", -7, 7), ("labels", 256, 256)]
)
def test_another_id_is_not_computed_with_and_told(
    chunk: Chunk, hook: VocabularyHook, where: str, bad: int, said: int, evaluating: bool, named: bool
) -> None:
    given = {"tokens": torch.ones(2, 4, dtype=torch.int64), "labels": torch.ones(2, 4, dtype=torch.int64)}
    given[where][1, 2] = bad
    chunk.train(not evaluating)
    if named:
        chunk(input_ids=given["tokens"], position_ids=None, attention_mask=None, labels=given["labels"])
    else:
        chunk(given["tokens"], None, None, None, given["labels"])
    assert all(int(ids.min()) >= 0 and int(ids.max()) < V for ids in chunk.seen)
    assert int(given[where][1, 2]) == bad, "the batch itself is as it was"
    assert told(hook) == said
    chunk(torch.ones(2, 4, dtype=torch.int64), None, None)
    assert told(hook) == said, "it stays until it is judged"


def test_the_record_ends_the_run(hook: VocabularyHook) -> None:
    common = {"first_sample": 0, "samples": 1, "tokens": 1.0, "loss": 1.0, "grad_norm": 1.0}
    hook.judge(StepRecord(step=1, **common))
    with pytest.raises(UsageError, match="256 of 200"):
        hook.judge(StepRecord(step=1, **common, signals=MappingProxyType({OUTSIDE: 256.0})))
