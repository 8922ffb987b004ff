"""Every copy of a clipped weight: the model's and the optimizer's masters, whole or in flat shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.attention import attention_models as models
from tests.dist.pool import Context, Pool

pytestmark = pytest.mark.megatron
TAU = 30.0
OPTIMIZERS = ("fp32", "fp32-distributed", "float16", "distributed", "overlap", "muon", "dist-muon")


def _maxima(layers: int = 2) -> torch.Tensor:
    return torch.rand(layers, models.HEADS, generator=torch.Generator().manual_seed(5)) * 200


def _clip(ddp: Any, optimizer: Any) -> None:
    from megatron_stability.megatron.attention.attention_layers import find
    from megatron_stability.megatron.attention.qk_clip import Clip
    from megatron_stability.numerics.qk_clip import gamma
    from megatron_stability.observe.config import QKClip

    Clip(find([ddp]), optimizer, QKClip(tau=TAU, alpha=0.4))(gamma(_maxima(), TAU))


def _qkv(ddp: Any) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in ddp.named_parameters() if "linear_qkv" in name}


def _masters(ddp: Any, optimizer: Any) -> dict[str, tuple[int, torch.Tensor]]:
    """This rank's masters or shards of them, by name: (start, flat values)."""
    from megatron_stability.megatron.access.master_weights import copies

    found = {name: copies(parameter, optimizer) for name, parameter in _qkv(ddp).items()}
    return {name: (held[-1].start, held[-1].flat.clone()) for name, held in found.items() if len(held) == 2}


def _zero_gradient_step(ddp: Any, optimizer: Any) -> None:
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    assert optimizer.step()[0]
    if ddp.ddp_config.overlap_param_gather:
        ddp.start_param_sync(force_sync=True)


def _ready(kind: str, optimizer: str, tp: int = 1) -> tuple[Any, Any]:
    # sizes that put half of all parameters inside a head of the first layer's linear_qkv
    gpt = models.model(models.config(kind, tp, layers=2, ffn_hidden_size=4), tied=True)
    models.fill(gpt)
    ddp, made = models.wrapped(gpt, optimizer)
    _zero_gradient_step(ddp, made)  # an optimizer's state begins with its first step
    return ddp, made


def clipped(context: Context, optimizer: str) -> dict[str, Any]:
    context.megatron()
    ddp, made = _ready("gqa", optimizer)
    before = {name: parameter.detach().float().clone() for name, parameter in _qkv(ddp).items()}
    masters = _masters(ddp, made)
    starts = {name: (start, flat.numel()) for name, (start, flat) in masters.items()}
    _clip(ddp, made)
    at_once = {name: parameter.detach().clone() for name, parameter in _qkv(ddp).items()}
    scaled = _masters(ddp, made)
    _zero_gradient_step(ddp, made)
    after = {name: parameter.detach().clone() for name, parameter in _qkv(ddp).items()}
    return {
        "before": before,
        "masters": masters,
        "scaled": scaled,
        "starts": starts,
        "at_once": at_once,
        "after": after,
        "final": _masters(ddp, made),
    }


def _rows(name: str, shape: torch.Size) -> torch.Tensor:
    """The factors that the algebra gives, on every element."""
    from megatron_stability.numerics import qk_clip

    layer = int(name.split("layers.")[1].split(".")[0])
    rows = qk_clip.qkv_rows(qk_clip.split(qk_clip.gamma(_maxima()[layer], TAU), 2, 0.4), models.HEAD)
    return rows.view(-1, *[1] * (len(shape) - 1)).expand(shape).flatten()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_case_2_masters_shards_and_model_agree_after_one_zero_gradient_step(
    megatron_ranks: Pool, optimizer: str
) -> None:
    ranks = megatron_ranks.run(clipped, optimizer, world=2)
    for seen in ranks:
        for name, weight in seen["after"].items():
            assert torch.equal(weight, ranks[0]["after"][name])  # data-parallel ranks agree
            factor = _rows(name, weight.shape)
            assert (factor < 1).any()
            bf16 = weight.dtype is torch.bfloat16
            assert bf16 == ("fp32" not in optimizer)
            if optimizer != "overlap":
                assert torch.equal(seen["at_once"][name], ranks[0]["at_once"][name])
                want = (seen["before"][name].flatten() * factor).to(weight.dtype)
                assert torch.equal(seen["at_once"][name].flatten(), want)
            if not bf16:
                assert torch.equal(weight, seen["at_once"][name])
    covered = {name: torch.zeros(w.numel(), dtype=torch.bool) for name, w in ranks[0]["after"].items()}
    for seen in ranks:
        for name, (start, master) in seen["scaled"].items():
            part = slice(start, start + master.numel())
            covered[name][part] = True
            assert torch.equal(master, seen["masters"][name][1] * _rows(name, seen["after"][name].shape)[part])
            assert torch.equal(master, seen["final"][name][1])  # nothing but the clip moved it
            cast = master.to(seen["after"][name].dtype)
            assert torch.equal(seen["after"][name].flatten()[part], cast)
    if "fp32" not in optimizer:
        assert all(mask.all() for mask in covered.values())
    if optimizer in ("distributed", "overlap"):
        cuts = [start for seen in ranks for start, _ in seen["starts"].values() if start]
        assert any(start % (models.HEAD * models.HIDDEN) for start in cuts), cuts  # a shard ends inside a head


def tensor_parallel(context: Context, tp: int) -> dict[str, torch.Tensor]:
    """Whole weights after a clip with the distributed optimizer, gathered over TP."""
    from megatron.core import parallel_state

    context.megatron(tp=tp)
    ddp, made = _ready("gqa", "distributed", tp)
    _clip(ddp, made)
    _zero_gradient_step(ddp, made)
    whole = {}
    for name, parameter in _qkv(ddp).items():
        parts = [torch.empty_like(parameter) for _ in range(tp)]
        dist.all_gather(parts, parameter.detach(), group=parallel_state.get_tensor_model_parallel_group())
        whole[name] = torch.cat(parts)
    return whole


def test_case_1_tp_2_dp_2_with_the_distributed_optimizer_equals_tp_1(megatron_ranks: Pool) -> None:
    single = megatron_ranks.run(tensor_parallel, 1, world=2)[0]
    for tp in (2, 4):
        for whole in megatron_ranks.run(tensor_parallel, tp, world=4):
            assert all(torch.equal(whole[name], value) for name, value in single.items())


def interrupted(context: Context) -> bool:
    """The last layer's optimizer state raises when it is asked for: nothing is written anywhere."""
    from megatron_stability.megatron.access import master_weights

    context.megatron()
    ddp, made = _ready("gqa", "distributed")
    kept = {name: parameter.detach().clone() for name, parameter in ddp.named_parameters()}
    masters = _masters(ddp, made)
    last = _qkv(ddp)[[name for name in _qkv(ddp) if name.endswith("weight")][-1]]
    last.main_param_sharded, last.main_param = True, torch.zeros(1)
    for leaf in master_weights._leaves(made):
        leaf.model_param_group_index_map.pop(last, None)
    with pytest.raises(AssertionError, match="sharded master"):
        _clip(ddp, made)
    same = all(torch.equal(kept[name], parameter) for name, parameter in ddp.named_parameters())
    now = {name: held for name, held in masters.items() if "layers.0" in name}
    found = {name: master_weights.copies(_qkv(ddp)[name], made)[-1].flat for name in now}
    return same and all(torch.equal(found[name], flat) for name, (_, flat) in now.items())


def test_case_2_an_exception_leaves_nothing_half_clipped(megatron_ranks: Pool) -> None:
    assert megatron_ranks.run(interrupted, world=2) == [True, True]


def precision_aware(context: Context) -> bool:
    """A stand-in for FusedAdam's state: the master lives there, and the parameter has none."""
    from megatron_stability.megatron.access.master_weights import copies

    context.megatron()
    ddp, made = _ready("gqa", "distributed")
    (leaf,) = made.chained_optimizers
    weight = next(p for p in _qkv(ddp).values() if p in leaf.model_param_group_index_map)
    group, order = leaf.model_param_group_index_map[weight]
    held = leaf.optimizer.param_groups[group]["params"][order].bfloat16()
    leaf.optimizer.param_groups[group]["params"][order] = held
    master = weight.main_param
    weight.main_param = None
    leaf.optimizer.state[held]["master_param"] = master
    return bool(copies(weight, made)[1].flat.data_ptr() == master.data_ptr())


def test_precision_aware_masters_are_found(megatron_ranks: Pool) -> None:
    assert megatron_ranks.run(precision_aware, world=2) == [True, True]


def _with_remainders(ddp: Any, leaf: Any) -> dict[str, tuple[int, torch.Tensor]]:
    """Lay the optimizer's state out as FusedAdam does by default; returns the masters that it stands for."""
    from megatron_stability.megatron.access.master_weights import own_range
    from megatron_stability.numerics.remainders import split

    masters = {}
    leaf.optimizer.store_param_remainders = True
    for name, weight in ddp.named_parameters():
        part, flat = own_range(weight, leaf), weight.data.view(-1)
        if part.stop > part.start:
            master = weight.main_param + torch.randn(part.stop - part.start) * 1e-4  # off the weights' own grid
            masters[name] = part.start, master.clone()
            flat[part], remainder = split(master)
            held = flat[part]
            group, order = leaf.model_param_group_index_map[weight]
            leaf.optimizer.param_groups[group]["params"][order] = held
            leaf.optimizer.state[held] = {"master_param": remainder}
        weight.main_param = None
    ddp.start_param_sync(force_sync=True)
    return masters


def clipped_remainders(context: Context, clip: str) -> dict[str, Any]:
    from megatron_stability.megatron.access.master_weights import own_master
    from megatron_stability.megatron.model.embedding_clip import EmbeddingClipHook

    context.megatron()
    ddp, made = _ready("gqa", "distributed")
    (leaf,) = made.chained_optimizers
    torch.manual_seed(context.rank)
    masters = _with_remainders(ddp, leaf)
    if clip == "qk":
        _clip(ddp, made)
    else:
        EmbeddingClipHook(1.0, [ddp], made).update_done(None, updated=True)
    named = dict(ddp.named_parameters())
    return {
        "masters": masters,
        "after": {name: own_master(named[name], made).flat for name in masters},
        "weights": {name: weight.detach() for name, weight in named.items()},
    }


def test_masters_kept_as_remainders_are_clipped_exactly_and_weights_are_equal(megatron_ranks: Pool) -> None:
    from megatron_stability.numerics.remainders import split

    ranks = megatron_ranks.run(clipped_remainders, "qk", world=2)
    seen = 0
    for rank in ranks:
        for name, (start, master) in rank["masters"].items():
            part = slice(start, start + master.numel())
            factor = _rows(name, rank["weights"][name].shape)[part] if "linear_qkv" in name else torch.ones(())
            assert torch.equal(rank["after"][name], master * factor)
            for other in ranks:  # on the others too, without a step between
                assert torch.equal(other["weights"][name].flatten()[part], split(master * factor)[0])
            seen += int((factor < 1).sum())
    assert seen


def test_embedding_rows_kept_as_remainders_are_clipped_to_the_radius(megatron_ranks: Pool) -> None:
    from megatron_stability.numerics.remainders import split

    ranks = megatron_ranks.run(clipped_remainders, "embedding", world=2)
    (name,) = (name for name in ranks[0]["weights"] if name.endswith("word_embeddings.weight"))
    rows, width = ranks[0]["weights"][name].shape
    before, after = torch.zeros(2, rows * width).unbind()
    for rank in ranks:
        if name in rank["masters"]:
            start, master = rank["masters"][name]
            before[start : start + master.numel()], after[start : start + master.numel()] = master, rank["after"][name]
    norms = before.view(rows, width).norm(dim=1)
    assert (norms > 1.0).any()
    torch.testing.assert_close(after.view(rows, width).norm(dim=1), norms.clamp(max=1.0))
    for rank in ranks:
        assert torch.equal(rank["weights"][name].flatten(), split(after)[0])
