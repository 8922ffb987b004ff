"""The `model` section of the configuration tree: what prevents instability inside the model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_stability.section import Section


class Init(Section):
    """Standard deviations at initialisation; `megatron` leaves Megatron's rule.

    Residual output projections need no setting: Megatron's own default is σ/sqrt(2L), as the field advises.
    """

    embedding: Literal["megatron", "d_model"] = Field(
        "megatron", description="word embedding: --embedding-init-method-std, or hidden_size^-0.5"
    )
    qk: Literal["megatron", "d_model"] = Field(
        "megatron", description="query and key rows of linear_qkv: --init-method-std, or hidden_size^-0.5"
    )
    report: bool = Field(False, description="print measured against expected std of every weight at the first step")


class Model(Section):
    """Prevention in the model. Needs `--spec megatron_stability` (our `pretrain` sets it) and a mode other than off."""

    qk_norm: Literal["none", "rmsnorm", "layernorm", "rms_no_gain", "rmsnorm_whole"] = Field(
        "none", description="norm of queries and keys: per head, per head without gain, or over the whole projection"
    )
    qk_norm_scale: float = Field(1.0, gt=0, description="fixed factor on normalised q and k; logits get its square")
    attention_softcap: float | None = Field(None, gt=0, description="c of c·tanh(x/c) on attention logits, e.g. 50")
    attention_softcap_kernel: Literal["auto", "dense", "flex"] = Field(
        "auto", description="auto: Transformer Engine's own under its spec, else dense; flex: FlexAttention"
    )
    final_softcap: float | None = Field(None, gt=0, description="c of c·tanh(x/c) on the head's logits, e.g. 30")
    z_loss: float = Field(0.0, ge=0, le=1, description="β of β·mean(log-Z²) at the language-model head, e.g. 1e-4")
    embedding_norm_clip: float | None = Field(
        None, gt=0, description="largest L2 norm of a word-embedding row after a step"
    )
    init: Init = Init()

    def active(self) -> tuple[str, ...]:
        """Names of the settings that differ from their default, in the order of the section."""
        default = type(self)()
        return tuple(name for name in type(self).model_fields if getattr(self, name) != getattr(default, name))

    @property
    def needs_spec(self) -> bool:
        """Whether a setting acts through the layer spec."""
        return self.qk_norm != "none" or self.attention_softcap is not None or self.init.qk != "megatron"

    @property
    def changes_loss(self) -> bool:
        """Whether a setting acts through the loss."""
        return self.final_softcap is not None or self.z_loss > 0
