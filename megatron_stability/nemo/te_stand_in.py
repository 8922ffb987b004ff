"""Lets Megatron-Bridge be imported where Transformer Engine is not installed.

One module of Bridge, `megatron.bridge.peft.lora_layers`, imports it always, for annotations and for `isinstance` in
LoRA layers that pretraining never builds. A stand-in exists while that module's body runs and not a moment longer: left
in `sys.modules`, it would make megatron-core believe in Transformer Engine.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

NEEDS_IT: Final = "megatron.bridge.peft.lora_layers"
STAND_IN: Final = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ops")


def install() -> None:
    """Where Transformer Engine is missing, stand in for it in the one module; once, before Bridge is imported."""
    if importlib.util.find_spec("transformer_engine") is not None or NEEDS_IT in sys.modules:
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module as the others would, and wraps its loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by the import system for every import."""
        if fullname != NEEDS_IT:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        package, pytorch, ops = (ModuleType(name) for name in STAND_IN)
        package.pytorch, pytorch.ops = pytorch, ops  # type: ignore[attr-defined]
        ops.Sequential = type("Sequential", (), {})  # type: ignore[attr-defined]  # named in an annotation
        sys.modules.update(zip(STAND_IN, (package, pytorch, ops), strict=True))
        try:
            self._inner.exec_module(module)
        finally:
            for name in STAND_IN:
                del sys.modules[name]
