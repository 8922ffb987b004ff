"""A skip list in Megatron's own batches: what is listed is masked, all else is as it was to the bit."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest
import torch

from megatron_stability.data import order, skips
from megatron_stability.data.skips import Skip
from tests.adapter.access.test_order import megatrons, prefixes  # noqa: F401  # a fixture

pytestmark = pytest.mark.megatron
EOD = 60000


def batches(dataset, begin, size, stride):
    from torch.utils.data import default_collate

    for first in range(begin, len(dataset) - size, stride):
        yield default_collate([dataset[at] for at in range(first, first + size)])


@pytest.mark.parametrize("weights", [None, [0.2, 0.5, 0.3]])
def test_listed_documents_are_masked_and_nothing_else_changes(prefixes, monkeypatch, weights):  # noqa: F811
    from megatron_stability.megatron.access.skipped import Masked, blend_of

    monkeypatch.chdir(prefixes[0].rpartition("/")[0])
    used = prefixes if weights else prefixes[:1]
    args = Namespace(split="1,0,0", seed=3, seq_length=16, train_iters=40, global_batch_size=4)
    args.data_path = used if weights is None else [str(w) for pair in zip(weights, used, strict=True) for w in pair]
    dataset = megatrons(args, used, weights, per_split=False)
    blend = blend_of(dataset, args)
    lengths = blend.orders[0].index.lengths()
    listed = [Skip(used[0], at, 0, int(lengths[at])) for at in (3, 4, 11)]
    bad = {int(token) for each in listed for token in _tokens(blend.orders[0].index, each.document)}
    masks = skips.masks(blend, listed)
    again = skips.masks(order.of_run(args), listed)
    assert [masks.spans(at) for at in range(len(dataset))] == [again.spans(at) for at in range(len(dataset))]
    plain = batches(dataset, 2, 2, 4)  # the second of two data-parallel ranks, with micro-batches of 2
    masked = Masked(batches(dataset, 2, 2, 4), masks, 2, 4, EOD)
    seen = 0
    for before, after in zip(plain, masked, strict=True):
        isin = torch.tensor(sorted(bad))
        for name in ("tokens", "labels"):
            hit = torch.isin(before[name], isin)
            assert torch.equal(after[name], torch.where(hit, EOD, before[name]))
        hit = torch.isin(before["labels"], isin)
        assert torch.equal(after["loss_mask"], torch.where(hit, 0.0, before["loss_mask"]))
        assert torch.equal(after["position_ids"], before["position_ids"])
        seen += int(hit.sum())
    assert seen > 0


def _tokens(index, document):
    first = int(index.offsets(document, document + 1)[0])
    return np.asarray(index.ids()[first : first + int(index.lengths()[document])])
