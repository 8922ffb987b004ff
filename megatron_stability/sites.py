"""Names of the places in a model that a signal can point at; torch-free, since detectors read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TENSORS = ("input", "weight", "grad_output")
MODULES = (
    *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "linear_q_proj", "linear_q_down_proj"),
    *("linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "eh_proj", "other"),
)

_BACKWARD = 2.0**40  # beyond twice every forward order


@dataclass(frozen=True)
class Site:
    """One tensor of one linear layer.

    Attributes:
        layer: 1-based number in the whole model.
        module: its name in the layer, of `MODULES`.
        tensor: of `TENSORS`.
        expert: 0-based local expert; -1 outside of experts, -2 in shared experts.
    """

    layer: int
    module: str
    tensor: str
    expert: int = -1

    def __str__(self) -> str:
        """As it is shown: layer 3 linear_fc1 input."""
        expert = {-1: "", -2: " shared expert"}.get(self.expert, f" expert {self.expert}")
        return f"layer {self.layer}{expert} {self.module} {self.tensor}"

    @property
    def order(self) -> float:
        """The site as a number that travels with a signal, exact in float64; `at` is the inverse.

        Smaller is earlier in a step: inputs and weights layer by layer, then gradients from the last layer back.
        """
        place = MODULES.index(self.module) * len(TENSORS) + TENSORS.index(self.tensor)
        forward = float((self.layer * 4096 + self.expert + 2) * 64 + place)
        return forward if self.tensor != "grad_output" else _BACKWARD - forward

    @classmethod
    def at(cls, order: float) -> Site:
        """The inverse of `order`."""
        rest, place = divmod(int(order if order < _BACKWARD / 2 else _BACKWARD - order), 64)
        layer, expert = divmod(rest, 4096)
        return cls(layer, MODULES[place // len(TENSORS)], TENSORS[place % len(TENSORS)], expert - 2)

    @classmethod
    def of(cls, name: str, layer_numbers: Mapping[str, int]) -> Site:
        """The site of a linear's input.

        Args:
            name: the linear's qualified name in its model chunk.
            layer_numbers: 1-based number of each transformer layer in the whole model, by the layer's qualified name.

        Returns:
            The site; layer 0 outside of every layer, module "other" for a name that is not in `MODULES`.
        """
        parts = name.split(".")
        prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        layer = next((layer_numbers[prefix] for prefix in prefixes if prefix in layer_numbers), 0)
        expert = int(parts[parts.index("local_experts") + 1]) if "local_experts" in parts else -1
        expert = -2 if "shared_experts" in parts else expert
        return cls(layer, parts[-1] if parts[-1] in MODULES else "other", TENSORS[0], expert)
