"""The probe keeps one sequence of a layer's input until the step ends, and not the activations of all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.megatron


def test_what_the_probe_keeps_has_one_sequence_s_memory() -> None:
    from megatron_stability.megatron.attention.monitor import LayerMonitor

    monitor = object.__new__(LayerMonitor)
    monitor.active, monitor._inputs, monitor._probing = True, None, False
    hidden = torch.randn(32, 4, 16)
    monitor._keep(SimpleNamespace(training=True), (hidden, None), {})
    assert monitor._inputs is not None
    kept = monitor._inputs["hidden_states"]
    assert torch.equal(kept, hidden[:, :1])
    assert kept.untyped_storage().nbytes() == hidden.untyped_storage().nbytes() // 4
