"""What Megatron takes from NVIDIA Apex, and what it takes instead where Apex is not there.

Megatron asks for Transformer Engine first, then Apex, then its own or torch's code, at import and without a choice
(`core/optimizer/__init__.py`, `core/optimizer/clip_grads.py`, `core/fusions/fused_layer_norm.py`,
`core/models/gpt/gpt_layer_specs.py`, `core/tensor_parallel/layers.py`, equal in 0.18.2 and 0.19.2). This module says at
start-up what that came to. It looks for files and imports nothing: a broken Apex must not be loaded only to be named.

The package `apex` on PyPI is an unrelated web toolkit. Megatron's local layer spec believes any `import apex`, so that
package makes it choose Apex's LayerNorm and fail while the model is built.
"""

import importlib.util
import sys
from dataclasses import dataclass
from enum import Enum
from importlib.machinery import PathFinder


class Apex(Enum):
    """What the name `apex` stands for on this machine."""

    ABSENT = "absent"
    NVIDIA = "NVIDIA's"
    OTHER = "another package of that name"


@dataclass(frozen=True)
class Row:
    """One thing that Megatron can take from Apex.

    Attributes:
        feature: what it is.
        taken: the class, function or module in use.
        usable: False where Megatron, asked for the feature, stops instead of falling back.
        note: what to do or to know; empty when nothing.
    """

    feature: str
    taken: str
    usable: bool = True
    note: str = ""


def located(name: str) -> bool:
    """Whether the module `name` could be found, without importing it or any parent of it."""
    top, *rest = name.split(".")
    spec = sys.modules[top].__spec__ if sys.modules.get(top) is not None else importlib.util.find_spec(top)
    path = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return False
        path = f"{path}.{part}"
        spec = PathFinder.find_spec(path, spec.submodule_search_locations)
    return spec is not None


def state() -> Apex:
    """Absent, NVIDIA's (it has `apex.multi_tensor_apply`) or another package."""
    if not located("apex"):
        return Apex.ABSENT
    return Apex.NVIDIA if located("apex.multi_tensor_apply") else Apex.OTHER


def status() -> list[Row]:
    """The table: one row for each thing that Megatron can take from Apex."""
    te = located("transformer_engine.pytorch.optimizers")
    kernels = located("amp_C") and located("apex.multi_tensor_apply")
    return [
        _optimizer("FusedAdam", te, "torch.optim.AdamW"),
        _optimizer("FusedSGD", te, "torch.optim.SGD"),
        _multi_tensor("multi_tensor_l2norm", te, kernels, "megatron.core.utils.local_multi_tensor_l2_norm"),
        _multi_tensor("multi_tensor_scale", te, kernels, "megatron.core.utils.local_multi_tensor_scale"),
        _layer_norm(),
        _persistent_layer_norm(),
        _weight_gradient(te),
    ]


def line() -> str:
    """The table as one line for the start of a run."""
    rows = "; ".join(f"{row.feature}: {row.taken}{f' ({row.note})' if row.note else ''}" for row in status())
    return f"NVIDIA Apex: {state().value}. {rows}."


def _optimizer(feature: str, te: bool, torch: str) -> Row:
    if te:
        return Row(feature, f"transformer_engine.pytorch.optimizers.{feature}")
    if not located("apex.optimizers"):
        return Row(feature, torch)
    taken = f"apex.optimizers.{feature}"
    if located("amp_C"):
        return Row(feature, taken)
    return Row(feature, taken, usable=False, note="Apex was built without --cuda_ext; rebuild or uninstall it")


def _multi_tensor(feature: str, te: bool, kernels: bool, local: str) -> Row:
    if te:
        return Row(feature, f"transformer_engine.pytorch.optimizers.{feature}")
    return Row(feature, f"amp_C.{feature}" if kernels else local)


def _layer_norm() -> Row:
    """LayerNorm of the local layer spec; with the TE spec it is TE's."""
    feature = "local-spec LayerNorm"
    if not located("apex"):
        return Row(feature, "torch.nn.LayerNorm")
    taken = "megatron.core.fusions.fused_layer_norm.FusedLayerNorm"
    if located("apex.normalization.fused_layer_norm"):
        return Row(feature, taken)
    return Row(feature, taken, usable=False, note="`apex` here has no fused LayerNorm; uninstall it to use torch's")


def _persistent_layer_norm() -> Row:
    feature = "persistent LayerNorm"
    if located("apex.contrib.layer_norm.layer_norm") and located("fast_layer_norm"):
        return Row(feature, "apex.contrib.layer_norm.layer_norm.FastLayerNormFN")
    return Row(feature, "none", note="as --no-persist-layer-norm")


def _weight_gradient(te: bool) -> Row:
    feature = "gradient accumulation fusion"
    if located("fused_weight_gradient_mlp_cuda"):
        return Row(feature, "fused_weight_gradient_mlp_cuda")
    if te:
        return Row(feature, "transformer_engine", note="not in the local spec, which needs Apex for it")
    return Row(feature, "none", usable=False, note="needs --no-gradient-accumulation-fusion")
