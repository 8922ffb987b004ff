"""Settings of what is measured, and of QK-clip, which needs one of the measurements."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_stability.section import Section


class Attention(Section):
    """Attention logits and entropy, with or without QK-clip."""

    enabled: bool = Field(False, description="measure attention logits and entropy also where qk_clip is off")
    every: int = Field(100, ge=1, description="steps between two entropies and two tables of all layers and heads")


class Norms(Section):
    """Norms of layers and parameters: passes over all gradients or weights, so only now and then."""

    layers_every: int = Field(100, ge=0, description="steps between two gradient norms of every layer; 0: never")
    params_every: int = Field(200, ge=0, description="steps between two norms of parameters and embedding; 0: never")


class Moe(Section):
    """Balance of the experts."""

    every: int = Field(10, ge=0, description="steps between two measures of loads, drops and router logits; 0: never")


class Replicas(Section):
    """What data-parallel replicas must have in common to the bit; the digests travel in the step's one collective."""

    weights_every: int = Field(
        1000, ge=0, description="steps between two digests of the weights, taken before each planned save too; 0: never"
    )
    compute_every: int = Field(
        0, ge=0, description="steps between two checks of what replicas make of a fixed micro-batch; 0: never"
    )

    def weights_due(self, step: int, *, saves: bool) -> bool:
        """Whether this step compares digests of the weights; `saves`: a checkpoint is planned after it.

        A rank that went apart gives to every rank's gradients, and no one finds that once all ranks resume alike.
        """
        return self.weights_every > 0 and (saves or step % self.weights_every == 0)


class Sketch(Section):
    """Projections of each layer's weights and gradient, by which `compare` tells how alike two runs' updates are."""

    every: int = Field(
        0, ge=0, description="steps between two sketches of weights and gradients, beside steps 1 and 2; 0: never"
    )


class Batch(Section):
    """Scores of the tokens of each batch."""

    enabled: bool = Field(True, description="score repeated n-grams and token entropy of every batch")
    ngram: int = Field(8, ge=2, le=64, description="tokens of the n-grams whose repetitions are counted")


class Observe(Section):
    """Optional measurements."""

    attention: Attention = Attention()
    norms: Norms = Norms()
    moe: Moe = Moe()
    replicas: Replicas = Replicas()
    sketch: Sketch = Sketch()
    batch: Batch = Batch()


class QKClip(Section):
    """MuonClip's clip of the query and key projections (`numerics/qk_clip.py`)."""

    enabled: bool = Field(False, description="scale q and k of heads whose largest logit is above tau, after a step")
    tau: float = Field(100.0, gt=0, description="largest attention logit; 100 is a backstop, 30 an early warning")
    headroom: float = Field(0.0, ge=0, lt=1, description="h: the clip's limit is (1-h) tau; h is what a step may add")
    alpha: float = Field(0.5, ge=0, le=1, description="the query's share of the factor's exponent")
    measure: Literal["forward", "probe"] = Field(
        "forward",
        description="forward: what the step's attention computes anyway; probe: a pass of our own with the updated "
        "weights over one sequence, for kernels that return nothing",
    )
    every: int = Field(1, ge=1, description="steps between two measurements, and so between two clips")
