"""What a rank keeps for itself in a checkpoint: its random generators, and what its tensors looked like.

Megatron saves one generator state for each pipeline × tensor rank, from data-parallel rank 0 (unless
--data-parallel-random-init), and restores it before the data iterators are built, which draw from it again. Here every
rank's is saved, and it is restored right before the first step.
"""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_stability.checkpoints.manifest import RANK_STATE
from megatron_stability.files import parse_json
from megatron_stability.ledger.entries import strict
from megatron_stability.megatron.access.flags.argument_table import given
from megatron_stability.observe import fingerprint
from megatron_stability.observe.fingerprint import Fingerprint, combined
from megatron_stability.observe.storage import plain


def sharded(data: dict[str, Any]) -> ShardedObject:
    """This rank's part of an object with one shard a rank (`torch_dist` format)."""
    return ShardedObject(f"{RANK_STATE}.state", data, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


# --- generators -------------------------------------------------------------------------------------------------------


def generators() -> dict[str, Any]:
    """Host generators (Python, NumPy, torch), the device's, and Megatron's tracker; primitives and tensors only."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": {name: tensor_parallel.convert_cuda_rng_state(state) for name, state in tracker.items()},
    }


def restore_generators(state: dict[str, Any]) -> None:
    """The inverse of `generators`."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"].cpu())
    torch.cuda.set_rng_state(state["device"].cpu())
    tracker = tensor_parallel.get_cuda_rng_tracker()
    graphable = tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
    tracker.set_states(
        {
            name: tensor_parallel.convert_cuda_rng_state(saved.cpu(), to_graphable=graphable)
            for name, saved in state["tracker"].items()
        }
    )


# --- tensors ----------------------------------------------------------------------------------------------------------


def weights(model: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's parameters by name; of a quantized parameter the codes."""
    for number, chunk in enumerate(model):
        for name, parameter in chunk.named_parameters():
            yield f"model{number}.{name}", plain(parameter)


def optimizer_tensors(optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's master weights and moments, named by their place in the optimizer; of quantized moments the codes."""
    for number, one in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        inner = getattr(one, "optimizer", None)
        for index, group in enumerate(inner.param_groups if inner is not None else ()):
            for place, parameter in enumerate(group["params"]):
                name = f"optimizer{number}.group{index}.{place}"
                yield f"{name}.weight", plain(parameter)
                moments = one.optimizer.state.get(parameter, {})
                for key in sorted(k for k, v in moments.items() if isinstance(v, torch.Tensor)):
                    yield f"{name}.{key}", plain(moments[key])


def begin_measure(model: list[Any], optimizer: Any) -> Callable[[], dict[str, Fingerprint]]:
    """`measure` beside what comes next, which must not change a tensor before the result is asked for."""
    return fingerprint.begin([*weights(model), *optimizer_tensors(optimizer)])


def measure(model: list[Any], optimizer: Any) -> dict[str, Fingerprint]:
    """Fingerprints of this rank's weights and optimizer state."""
    return begin_measure(model, optimizer)()


def packed(prints: Mapping[str, Fingerprint], model: list[Any]) -> bytes:
    """Fingerprints as JSON, with the kind of device that hashed them."""
    tensors = {name: (each.bits, each.amax) for name, each in prints.items()}
    return json.dumps(strict({"hashed_on": _device(model), "tensors": tensors}), allow_nan=False).encode()


def unpacked(text: bytes, model: list[Any]) -> dict[str, tuple[int | None, float]]:
    """The inverse of `packed`: (bits, amax) by name, bits None where another kind of device hashed."""
    state = parse_json(text)
    same = state["hashed_on"] == _device(model)
    return {name: (bits if same else None, float(amax)) for name, (bits, amax) in state["tensors"].items()}


def _device(model: list[Any]) -> str:
    return next((parameter.device.type for chunk in model for parameter in chunk.parameters()), "")


def complaint(prints: dict[str, Fingerprint], saved: Mapping[str, tuple[int | None, float]] | None) -> str | None:
    """What speaks against this rank's loaded tensors.

    Args:
        prints: of what was loaded.
        saved: `unpacked`, of the same rank of the same layout; None: not known.

    Returns:
        One sentence on the first bad tensor, or None.
    """
    for name, each in prints.items():
        if not each.finite:
            return f"{name} holds NaN or Inf after the load"
        if saved is None or name not in saved:
            continue
        was_bits, was_amax = saved[name]
        if each.amax > was_amax:
            return (
                f"{name} has a largest magnitude of {each.amax:.6g} after the load, and had {was_amax:.6g} when saved"
            )
        if was_bits is not None and each.bits != was_bits:
            return f"{name} differs in its bits from what was saved"
    missing = sorted(set(saved or ()) - set(prints))
    return f"{missing[0]} was saved and is not there after the load" if missing else None


def complaint_of(prints: dict[str, Fingerprint], packed: bytes | None, model: list[Any]) -> str | None:
    """`complaint`, of the bytes of the rank's file, which may be anything.

    Args:
        prints: of what was loaded.
        packed: the file's; None: there is none.
        model: Megatron's chunks.
    """
    try:
        return complaint(prints, None if packed is None else unpacked(packed, model))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"the checkpoint's fingerprints of its tensors can't be read ({type(error).__name__}: {error})"


def expert_names(model: list[Any]) -> set[str]:
    """Names, as `weights` gives them, of what Megatron reduces over expert data-parallel groups."""
    return {
        f"model{number}.{name}"
        for number, chunk in enumerate(model)
        for name, parameter in chunk.named_parameters()
        if not getattr(parameter, "allreduce", True)  # Megatron marks expert parameters so
    }


class Digest(NamedTuple):
    """What the ranks of one data-parallel group must have in common."""

    kind: str
    ranks: tuple[int, ...]
    value: int


class Replicated(NamedTuple):
    """Weights of which the ranks of one data-parallel group have copies."""

    kind: str
    ranks: tuple[int, ...]
    names: frozenset[str]


def replicated(model: list[Any]) -> list[Replicated]:
    """This rank's weights by the group that has copies: data-parallel replicas, and those of the experts."""
    names, expert = frozenset(name for name, _ in weights(model)), frozenset(expert_names(model))
    data = parallel_state.get_data_parallel_group(with_context_parallel=True)
    of_experts = parallel_state.get_expert_data_parallel_group()
    return [
        Replicated("weights", tuple(dist.get_process_group_ranks(data)), names - expert),
        Replicated("expert weights", tuple(dist.get_process_group_ranks(of_experts)), expert),
    ]


def replica_digests(groups: Sequence[Replicated], prints: Mapping[str, Fingerprint]) -> list[Digest]:
    """This rank's digest for each of `replicated`.

    Args:
        groups: of this rank.
        prints: of its weights; others in it are ignored.
    """
    return [
        Digest(kind, ranks, combined(each for name, each in prints.items() if name in names))
        for kind, ranks, names in groups
    ]


def replica_complaint(digests: Mapping[int, Sequence[Digest]]) -> str | None:
    """One sentence on the first group, by its ranks, whose digests are not one value, or None.

    Args:
        digests: `replica_digests` by rank; a rank that is not in it is not compared.
    """
    for rank in sorted(digests):
        for at, (kind, ranks, value) in enumerate(digests[rank]):
            if rank != ranks[0]:
                continue
            differ = [str(other) for other in ranks if other in digests and digests[other][at].value != value]
            if differ:
                return f"{kind} of rank {', '.join(differ)} differ from those of rank {rank}, their replica"
    return None


def check_replicas(model: list[Any], prints: Mapping[str, Fingerprint]) -> str | None:
    """`replica_complaint` of all ranks, the same on every rank. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, replica_digests(replicated(model), prints))
    return replica_complaint(dict(enumerate(everyone)))


def layout_of(args: Namespace) -> dict[str, int]:
    """World size and the sizes that decide which rank holds what."""
    names = (
        *("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size"),
        *("context_parallel_size", "expert_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    )
    return {name: int(given(args, name) or 1) for name in names}
