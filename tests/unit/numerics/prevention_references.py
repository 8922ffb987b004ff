"""Plain, unsharded PyTorch, written from the formulas; fp64 unless the caller says otherwise."""

from __future__ import annotations

import torch
from torch import Tensor


def norm(x: Tensor, variant: str, gain: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """QK-norm of [..., H, d_k]."""
    if variant == "rmsnorm_whole":
        flat = x.flatten(-2)
        return (flat / (flat.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain).view(x.shape)
    if variant == "layernorm":
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain + bias
    unit = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return unit if gain is None else unit * gain


def token_losses(
    logits: Tensor, target: Tensor, vocab_size: int, cap: float | None, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """(cross-entropy, log-Z) of each token, 0 where the target is negative; logits [..., padded vocabulary]."""
    y = logits[..., :vocab_size]
    if cap is not None:
        y = cap * torch.tanh(y / cap)
    log_z = y.exp().sum(-1).log()
    valid = target >= 0
    wanted = torch.full_like(y, label_smoothing / (vocab_size - 1))
    wanted.scatter_(-1, target.clamp(min=0).unsqueeze(-1), 1 - label_smoothing)
    cross_entropy = (wanted * (log_z.unsqueeze(-1) - y)).sum(-1)
    return cross_entropy * valid, log_z * valid


def relative(a: Tensor, b: Tensor) -> float:
    """‖a - b‖ / ‖b‖ in fp64; 0 where both are 0."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp(min=1e-300)) if b.numel() else 0.0
