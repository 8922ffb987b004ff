"""Names of the places in a model that a signal can point at; torch-free, since detectors read them."""

from __future__ import annotations

from dataclasses import dataclass

TENSORS = ("input", "weight", "grad_output")
MODULES = (
    *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "linear_q_proj", "linear_q_down_proj"),
    *("linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "eh_proj", "other"),
)


@dataclass(frozen=True, order=True)
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
    def code(self) -> float:
        """The site as a number that travels with a signal (exact in float64); `decode` is the inverse."""
        place = MODULES.index(self.module) * len(TENSORS) + TENSORS.index(self.tensor)
        return float((self.layer * 4096 + self.expert + 2) * 64 + place)

    @classmethod
    def decode(cls, code: float) -> Site:
        """The inverse of `code`."""
        rest, place = divmod(int(code), 64)
        layer, expert = divmod(rest, 4096)
        return cls(layer, MODULES[place // len(TENSORS)], TENSORS[place % len(TENSORS)], expert - 2)
