"""Preloaded by the fork server that Megatron's checkpoint worker comes from, so that the worker has the backend."""

from megatron_stability.megatron import cpu

cpu.install(banner=False)
