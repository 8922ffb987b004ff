"""The order of samples that is worked out of flags, against what Megatron's own data sets give."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest

from megatron_stability.data import attribution, order
from tests.unit.data.maker import make

pytestmark = pytest.mark.megatron


class Tokenizer:
    """What the config asks of one."""

    vocab_size, eod, pad, unique_identifiers = 60001, 60000, None, {"name": "none"}


def megatrons(args, prefixes, weights, per_split):
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    blend = (prefixes, weights)
    config = GPTDatasetConfig(
        random_seed=args.seed, sequence_length=args.seq_length, tokenizer=Tokenizer(), path_to_cache=None,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
        **({"blend_per_split": [blend, None, None]} if per_split else {"blend": blend, "split": args.split}),
    )  # fmt: skip
    samples = [args.train_iters * args.global_batch_size, 0 if per_split else 1, 0 if per_split else 1]
    return BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, config).build()[0]


@pytest.fixture
def prefixes(tmp_path):
    rng = np.random.RandomState(3)
    ids, found = iter(range(60000)), []
    for name, count in (("a", 40), ("b", 25), ("c", 60)):
        lengths = rng.randint(1, 60, count)
        found.append(make(tmp_path / name, [[next(ids) for _ in range(n)] for n in lengths]))
    return found


@pytest.mark.parametrize("iters", [3, 20, 61, 70, 75, 80, 97, 150])
@pytest.mark.parametrize("which", ["one", "one of a split", "weights", "one with a weight", "no weights", "per split"])
def test_every_sample_is_megatrons(prefixes, monkeypatch, iters, which):
    per_split = which in ("one of a split", "per split")
    used = prefixes[:1] if which.startswith("one") else prefixes
    weights = {"weights": [0.2, 0.5, 0.3], "per split": [3.0, 1.0, 2.0], "one with a weight": [1.0]}.get(which)
    args = Namespace(split="8,1,1", seed=11, seq_length=16, train_iters=iters, global_batch_size=4)
    words = used if weights is None else [str(word) for pair in zip(weights, used, strict=True) for word in pair]
    setattr(args, "train_data_path" if per_split else "data_path", words)
    monkeypatch.chdir(prefixes[0].rpartition("/")[0])
    theirs = megatrons(args, used, weights, per_split)
    blend = order.of_run(args)
    assert blend.size == len(theirs)
    tokens = [each.index.ids() for each in blend.orders]
    offsets = [each.index.offsets() for each in blend.orders]
    for sample in range(blend.size):
        given = theirs[sample]
        wanted = [*given["tokens"].tolist(), int(given["labels"][-1])]
        ours = [
            int(token)
            for piece in attribution.attribute(blend, sample)
            for token in tokens[piece.data_set][offsets[piece.data_set][piece.document] :][piece.first : piece.last]
        ]
        assert ours == wanted
