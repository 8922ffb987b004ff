"""QK-norm, the fused loss and the embedding clip on 1, 2 and 4 ranks against unsharded references."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_stability.numerics.embedding_norm import factors, scale_rows_, square_sums
from megatron_stability.numerics.qk_norm import QKNorm, Variant
from megatron_stability.numerics.softcap import masked_softmax, softcap
from megatron_stability.numerics.z_loss import LogZ, LossSettings, vocab_parallel_loss
from tests.dist.pool import Context, Pool
from tests.unit.numerics import prevention_references as reference
from tests.unit.numerics.prevention_references import relative

WORLDS = (1, 2, 4)


def group_of(context: Context) -> Any:
    return context.group if context.world > 1 else None


# --- QK-norm --------------------------------------------------------------------------------------------------------


def sharded_norm(
    context: Context, variant: str, zero_centred: bool, x: Tensor, dy: Tensor, gain: Any, bias: Any
) -> Any:
    norm = QKNorm(
        Variant(variant), x.shape[-2], x.shape[-1], zero_centred=zero_centred, scale=1.5, group=group_of(context)
    )
    if gain is not None:
        norm.weight.data.copy_(gain - 1 if zero_centred else gain)
    if bias is not None:
        norm.bias.data.copy_(bias)
    mine = slice(context.rank * x.shape[-2] // context.world, (context.rank + 1) * x.shape[-2] // context.world)
    results = []
    for _ in range(2):
        part = x[..., mine, :].clone().requires_grad_()
        norm.zero_grad()
        y = norm(part)
        y.backward(dy[..., mine, :])
        for parameter in norm.parameters():  # what Megatron's finalize_model_grads does with q_layernorm, k_layernorm
            dist.all_reduce(parameter.grad)
        results.append([y.detach(), part.grad, *(p.grad.clone() for p in norm.parameters())])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
    return results[0]


@st.composite
def norm_case(draw: Any, world: int) -> tuple[Any, ...]:
    """(variant, zero-centred, x, dy, gain, bias) of any shape whose heads the ranks can share out."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    variant, width = draw(st.sampled_from(list(Variant))), draw(st.integers(8, 13))
    shape = (*draw(st.tuples(st.integers(1, 4), st.integers(1, 3))), world * draw(st.integers(1, 3)), width)
    x, dy = (torch.randn(shape, generator=generator) * draw(st.sampled_from([0.1, 3.0, 100.0])) for _ in range(2))
    size = width * shape[2] if variant is Variant.RMSNORM_WHOLE else width
    gain = None if variant is Variant.RMS_NO_GAIN else torch.rand(size, generator=generator) + 0.5
    bias = torch.randn(width, generator=generator) if variant is Variant.LAYERNORM else None
    return variant.value, draw(st.booleans()), x, dy, gain, bias


def sharded_norms(context: Context, cases: list[tuple[Any, ...]]) -> list[Any]:
    return [sharded_norm(context, *case) for case in cases]


@pytest.mark.parametrize("world", WORLDS)
def test_qk_norm_equals_the_formula(ranks: Pool, world: int) -> None:
    @settings(max_examples=2, deadline=None, derandomize=True, database=None)
    @given(cases=st.lists(norm_case(world), min_size=20, max_size=20))
    def check(cases: list[tuple[Any, ...]]) -> None:
        results = ranks.run(sharded_norms, cases, world=world)
        for case, parts in zip(cases, zip(*results, strict=True), strict=True):
            check_norm(case, parts)

    check()


def check_norm(case: tuple[Any, ...], parts: tuple[Any, ...]) -> None:
    variant, _, x, dy, gain, bias = case
    leaves = [t.double().requires_grad_() for t in (x, gain, bias) if t is not None]
    full = iter(leaves[1:])
    y = 1.5 * reference.norm(
        leaves[0], variant, next(full) if gain is not None else None, next(full) if bias is not None else None, 1e-6
    )
    y.backward(dy.double())
    for place, expected in enumerate([y.detach(), leaves[0].grad]):
        assert relative(torch.cat([part[place] for part in parts], dim=-2), expected) < 1e-6
    for place, leaf in enumerate(leaves[1:], start=2):
        for part in parts:
            assert torch.equal(part[place], parts[0][place])
            assert relative(part[place], leaf.grad) < 1e-5


# --- loss -----------------------------------------------------------------------------------------------------------


def sharded_loss(context: Context, logits: Tensor, target: Tensor, weight: Tensor, options: dict[str, Any]) -> Any:
    part = logits.chunk(context.world, dim=-1)[context.rank].clone().requires_grad_()
    results = []
    for overwrite in (False, False, True):
        stats = LogZ()
        used = part * 1.0  # not a leaf, as an output layer's logits
        loss = vocab_parallel_loss(
            used, target, LossSettings(**options), group=group_of(context), stats=stats, overwrite=overwrite
        )
        part.grad = None
        (loss * weight).sum().backward()
        results.append((loss.detach(), part.grad.clone(), stats.sums, stats.largest))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))
    return results[0]


def sharded_loss_cases(context: Context, cases: list[tuple[Any, ...]]) -> list[Any]:
    return [sharded_loss(context, *case) for case in cases]


def check_loss(case: tuple[Any, ...], parts: tuple[Any, ...]) -> None:
    logits, target, weight, options = case
    wide = logits.double().requires_grad_()
    names = "vocab_size", "cap", "label_smoothing"
    cross_entropy, log_z = reference.token_losses(wide, target, *(options[name] for name in names))
    ((cross_entropy + options["beta"] * log_z.square()) * weight.double()).sum().backward()
    for loss, _, sums, _ in parts:
        assert torch.equal(loss, parts[0][0])
        # 1 + x and p - 1 keep an fp32 rounding of 1: a loss or gradient below 1e-7 has no digits left
        assert (loss - cross_entropy.detach()).norm() <= 1e-5 * cross_entropy.detach().norm() + 1e-6
        expected = torch.stack([weight.double(), weight * log_z, weight * log_z.square()]).detach() * (target >= 0)
        assert torch.allclose(sums, expected.flatten(1).sum(1), rtol=1e-5, atol=1e-9)
    gradient = torch.cat([part[1] for part in parts], dim=-1)
    assert (gradient - wide.grad).norm() <= 1e-5 * wide.grad.norm() + 1e-6 * weight.norm()
    assert gradient[(weight == 0) | (target < 0)].count_nonzero() == 0
    assert gradient[..., options["vocab_size"] :].count_nonzero() == 0


@st.composite
def loss_case(draw: Any, world: int) -> tuple[Any, ...]:
    """(logits, target, weight, options); a whole rank may hold padding only, and no token need be valid."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 3)))
    padded = draw(st.integers(2, 9)) * world
    vocab_size = max(2, padded - draw(st.integers(0, 9)))
    logits = torch.randn(*shape, padded, generator=generator) * draw(st.sampled_from([0.1, 3.0, 40.0]))
    target = torch.randint(0, vocab_size, shape, generator=generator)
    weight = torch.rand(shape, generator=generator)
    chosen = torch.rand(shape, generator=generator) < 0.5
    for tensor, value, where in ((target, -100, chosen), (weight, 0, ~chosen)):
        match draw(st.sampled_from(["none", "some", "all"])):
            case "some":
                tensor[where] = value
            case "all":
                tensor.fill_(value)
    options = {
        "vocab_size": vocab_size,
        "cap": draw(st.sampled_from([None, 0.5, 30.0])),
        "beta": draw(st.sampled_from([0.0, 1e-4, 0.1])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1])),
    }
    return logits, target, weight, options


@pytest.mark.parametrize("world", WORLDS)
def test_loss_equals_the_formula(ranks: Pool, world: int) -> None:
    """Many drawn cases in one job: a job's processes cost more than its arithmetic."""

    @settings(max_examples=3, deadline=None, derandomize=True, database=None)
    @given(cases=st.lists(loss_case(world), min_size=20, max_size=20))
    def check(cases: list[tuple[Any, ...]]) -> None:
        results = ranks.run(sharded_loss_cases, cases, world=world)
        for case, parts in zip(cases, zip(*results, strict=True), strict=True):
            check_loss(case, parts)

    check()


def test_case_16_a_sharded_loss_is_not_off_by_log_tp(ranks: Pool) -> None:
    logits = torch.zeros(4, 1, 8)
    target = torch.arange(4).view(4, 1)
    options = {"vocab_size": 8, "cap": None, "beta": 0.0, "label_smoothing": 0.0}
    for world in (1, 2):
        loss = ranks.run(sharded_loss, logits, target, torch.ones(4, 1), options, world=world)[0][0]
        assert torch.allclose(loss, torch.full((4, 1), 8.0).log())


def test_a_target_outside_the_vocabulary_has_infinite_loss(ranks: Pool) -> None:
    options = {"vocab_size": 7, "cap": None, "beta": 1e-4, "label_smoothing": 0.0}
    target = torch.tensor([[7], [3], [-1]])
    loss = ranks.run(sharded_loss, torch.randn(3, 1, 8), target, torch.tensor([[0.0], [1.0], [1.0]]), options, world=2)
    assert loss[0][0][0].isinf()
    assert loss[0][0][1].isfinite()
    assert loss[0][0][2] == 0


def test_case_14_final_cap_on_sharded_logits(ranks: Pool) -> None:
    """|logit| ≤ cap on every shard; loss and gradient at TP 2 are those at TP 1."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 2, 8, generator=generator) * 60
    target, weight = torch.randint(0, 7, (6, 2), generator=generator), torch.ones(6, 2)
    options = {"vocab_size": 7, "cap": 30.0, "beta": 1e-3, "label_smoothing": 0.0}
    assert all(softcap(part, 30.0).abs().max() <= 30.0 for part in logits.chunk(2, dim=-1))
    one, two = (ranks.run(sharded_loss, logits, target, weight, options, world=world) for world in (1, 2))
    assert relative(two[0][0], one[0][0]) < 1e-6
    assert torch.equal(two[1][0], two[0][0])
    assert relative(torch.cat([part[1] for part in two], dim=-1), one[0][1]) < 1e-5
    check_loss((logits, target, weight, options), tuple(two))


def unequal_micro_batches(
    context: Context, tp: int, data: list[tuple[Tensor, Tensor, Tensor]], per_token: bool, beta: float
) -> Tensor:
    """The gradient of one weight [h, V] after a global batch, divided as Megatron's schedule and DDP divide it."""
    dp, hidden = context.world // tp, data[0][0].shape[-1]
    tensor_groups = [dist.new_group(list(range(r * tp, (r + 1) * tp))) for r in range(dp)]
    data_rank, tensor_rank = divmod(context.rank, tp)
    vocab = 12
    full = torch.randn(hidden, vocab, generator=torch.Generator().manual_seed(1))
    weight = full.chunk(tp, dim=1)[tensor_rank].clone().requires_grad_()
    mine = data[data_rank::dp]
    tokens = torch.zeros(1)
    for inputs, target, mask in mine:
        losses = vocab_parallel_loss(
            inputs @ weight,
            target,
            LossSettings(vocab_size=10, beta=beta),
            group=tensor_groups[data_rank] if tp > 1 else None,
        )
        total, count = (losses * mask).sum(), mask.sum()
        if not per_token:  # core/pipeline_parallel/schedules.py forward_step_calc_loss
            total = total / count.clamp(min=1) / len(mine)
        total.backward()
        tokens += count
    gradient = weight.grad
    data_groups = [dist.new_group([r * tp + t for r in range(dp)]) for t in range(tp)]
    dist.all_reduce(gradient, group=data_groups[tensor_rank])
    dist.all_reduce(tokens, group=data_groups[tensor_rank])
    gradient = gradient / (tokens if per_token else dp)
    parts = [torch.empty_like(gradient) for _ in range(tp)]
    dist.all_gather(parts, gradient.contiguous(), group=tensor_groups[data_rank])
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("per_token", [False, True])
def test_case_15_unequal_valid_tokens(ranks: Pool, per_token: bool) -> None:
    """z-loss weighs a token exactly as its cross-entropy is weighed; with per-token loss, 1 / global count."""
    generator = torch.Generator().manual_seed(3)
    data = []
    for valid in (0, 2, 5, 6):  # data-parallel rank 0 has 0 and 5 valid tokens, rank 1 has 2 and 6
        mask = torch.zeros(6, 1)
        mask[torch.randperm(6, generator=generator)[:valid]] = 1
        data.append(
            (torch.randn(6, 1, 4, generator=generator), torch.randint(0, 10, (6, 1), generator=generator), mask)
        )
    got = {tp: ranks.run(unequal_micro_batches, tp, data, per_token, 0.3, world=2 * tp) for tp in (1, 2)}
    full = torch.randn(4, 12, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    total, everything = torch.zeros((), dtype=torch.float64), sum(float(mask.sum()) for *_, mask in data)
    for inputs, target, mask in data:
        cross_entropy, log_z = reference.token_losses(inputs.double() @ full, target, 10, None, 0.0)
        tokens = everything if per_token else 4 * float(mask.sum().clamp(min=1))
        total = total + ((cross_entropy + 0.3 * log_z.square()) * mask).sum() / tokens
    total.backward()
    for parts in got.values():
        for part in parts:
            assert relative(part, full.grad) < 1e-5


# --- context parallel -----------------------------------------------------------------------------------------------


def zigzag(world: int, rank: int, length: int) -> Tensor:
    """A rank's positions: chunks r and 2·CP - 1 - r, so that causal work is even."""
    chunks = torch.arange(length).chunk(2 * world)
    return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]])


def split_sequence(context: Context, variant: str, data: dict[str, Tensor]) -> Any:
    """Normed, capped causal attention and the loss of a rank's positions; keys and values come from all ranks."""
    from torch.distributed.nn.functional import all_gather

    here = zigzag(context.world, context.rank, data["x"].shape[1])
    everywhere = torch.cat([zigzag(context.world, rank, data["x"].shape[1]) for rank in range(context.world)])
    norms = [QKNorm(Variant(variant), heads, 8, scale=1.5) for heads in (4, 2)]
    for norm, part in zip(norms, "qk", strict=True):
        for name, parameter in norm.named_parameters():
            parameter.data.copy_(data[f"{part}.{name}"])
    q, k, v = (rows[:, here].clone().requires_grad_() for rows in data["x"].split([4, 2, 2], dim=2))
    keys, values = (torch.cat(all_gather(x.contiguous()), dim=1) for x in (norms[1](k), v))
    scores = torch.einsum("bqhd,bkhd->bhqk", norms[0](q), keys.repeat_interleave(2, dim=2))
    mask = here.unsqueeze(1) < everywhere
    probabilities = masked_softmax(scores, mask=mask, cap=2.0, scale=8**-0.5)
    out = torch.einsum("bhqk,bkhd->bqhd", probabilities, values.repeat_interleave(2, dim=2)).flatten(2)
    head = data["head"].clone().requires_grad_()
    settings_ = LossSettings(vocab_size=10, cap=3.0, beta=0.1)
    losses = vocab_parallel_loss(out @ head.T, data["target"][:, here], settings_)
    (losses * data["mask"][:, here]).sum().backward()
    gradients = {"head": head.grad}
    gradients |= {
        f"{part}.{name}": p.grad for norm, part in zip(norms, "qk", strict=True) for name, p in norm.named_parameters()
    }
    for gradient in gradients.values():  # Megatron's gradient group is data × context parallel
        dist.all_reduce(gradient)
    return here, losses.detach(), torch.cat([q.grad, k.grad, v.grad], dim=2), gradients


def whole_sequence(variant: str, data: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The same from the formulas, unsplit, in fp64: losses, and gradients by name."""
    wide = {n: t.double().requires_grad_() for n, t in data.items() if n not in ("target", "mask")}
    q, k, v = wide["x"].split([4, 2, 2], dim=2)
    q, k = (
        1.5 * reference.norm(x, variant, wide.get(f"{part}.weight"), wide.get(f"{part}.bias"), 1e-6)
        for x, part in ((q, "q"), (k, "k"))
    )
    scores = 2.0 * torch.tanh(torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * 8**-0.5 / 2.0)
    future = torch.ones(scores.shape[-2:]).triu(1).bool()
    probabilities = scores.masked_fill(future, -torch.inf).softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", probabilities, v.repeat_interleave(2, 2)).flatten(2)
    losses, log_z = reference.token_losses(out @ wide["head"].T, data["target"], 10, 3.0, 0.0)
    ((losses + 0.1 * log_z.square()) * data["mask"]).sum().backward()
    return losses.detach(), {name: leaf.grad for name, leaf in wide.items()}


def split_sequences(context: Context, cases: list[tuple[str, dict[str, Tensor]]]) -> list[Any]:
    return [split_sequence(context, *case) for case in cases]


@pytest.mark.parametrize("world", [2, 4])
def test_a_sequence_split_over_context_parallel_ranks(ranks: Pool, world: int) -> None:
    """QK-norm, softcaps and z-loss; one rank has no valid token."""
    generator = torch.Generator().manual_seed(9)
    cases = []
    for variant in Variant:
        data = {
            "x": torch.randn(2, 16, 8, 8, generator=generator) * 2,
            "head": torch.randn(12, 32, generator=generator),
            "target": torch.randint(0, 10, (2, 16), generator=generator),
            "mask": (torch.rand(2, 16, generator=generator) < 0.6).float(),
        }
        data["mask"][:, zigzag(world, 1, 16)] = 0
        for heads, part in ((4, "q"), (2, "k")):
            width = heads * 8 if variant is Variant.RMSNORM_WHOLE else 8
            if variant is not Variant.RMS_NO_GAIN:
                data[f"{part}.weight"] = torch.rand(width, generator=generator) + 0.5
            if variant is Variant.LAYERNORM:
                data[f"{part}.bias"] = torch.randn(width, generator=generator)
        cases.append((variant.value, data))
    results = ranks.run(split_sequences, cases, world=world)
    for (variant, data), parts in zip(cases, zip(*results, strict=True), strict=True):
        losses, expected = whole_sequence(variant, data)
        for here, got, x_grad, gradients in parts:
            assert relative(got, losses[:, here]) < 1e-5
            assert relative(x_grad, expected["x"][:, here]) < 1e-5
            assert all(relative(gradient, expected[name]) < 1e-5 for name, gradient in gradients.items()), variant


# --- embedding clip -------------------------------------------------------------------------------------------------


def clip_shards(context: Context, weight: Tensor, cuts: list[int], radius: float) -> Tensor:
    start, end = cuts[context.rank], cuts[context.rank + 1]
    flat = weight.flatten()[start:end].clone()
    sums = square_sums(flat, start, *weight.shape)
    dist.all_reduce(sums)
    scale_rows_(flat, start, weight.shape[1], factors(sums, radius))
    return flat


@pytest.mark.parametrize("seed", range(2))
def test_embedding_clip_of_flat_shards(ranks: Pool, seed: int) -> None:
    """Shards begin and end inside rows; one is empty."""
    rng = random.Random(seed)
    weight = torch.randn(7, 6, generator=torch.Generator().manual_seed(seed)) * 2
    weight[2] = 0
    weight[4] *= 1e-3
    inner = sorted(rng.randrange(43) for _ in range(2))
    cuts = [0, inner[0], inner[1], inner[1], 42]
    clipped = torch.cat(ranks.run(clip_shards, weight, cuts, 3.0, world=4)).view(7, 6)
    norms = weight.double().norm(dim=1, keepdim=True)
    expected = torch.where(norms > 3.0, weight.double() * (3.0 / norms), weight.double())
    assert relative(clipped, expected) < 1e-6
    assert (norms > 3.0).any()
    short = norms.squeeze() <= 3.0
    assert torch.equal(clipped[short], weight[short])
