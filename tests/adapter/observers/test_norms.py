"""The norm of the word embedding is that of its tokens' rows, wherever a rank's part of them begins and ends."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from megatron.core import parallel_state

from megatron_stability.megatron.access import master_weights
from megatron_stability.megatron.observers import norms
from megatron_stability.megatron.observers.norms import NormsHook
from megatron_stability.observe.config import Norms

pytestmark = pytest.mark.megatron
NAME = "embedding.word_embeddings.weight"


@pytest.mark.parametrize(("tensor_rank", "start", "counted"), [(0, 0, 16), (0, 6, 10), (1, 0, 4), (1, 6, 0), (2, 0, 0)])
def test_rows_of_padding_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, tensor_rank: int, start: int, counted: int
) -> None:
    """4 rows of width 4 a rank, 5 tokens in all; a shard may begin inside a row."""
    weight = torch.nn.Parameter(torch.ones(4, 4))
    monkeypatch.setattr(norms, "once", lambda *_: [(NAME, weight)])
    monkeypatch.setattr(norms, "layer_of", lambda _: {})
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: tensor_rank)
    shard = master_weights.Copy(weight.detach().view(-1)[start:], start)
    monkeypatch.setattr(master_weights, "own_master", lambda *_: shard)
    settings = Norms(layers_every=0, params_every=1)
    found = NormsHook(settings, [], None, Namespace(num_layers=1), vocab_size=5).observe()
    assert float(found["embedding_norm"]) ** 2 == pytest.approx(counted)
    assert float(found["param_norm"]) ** 2 == pytest.approx(16 - start)
