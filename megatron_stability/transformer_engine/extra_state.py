"""What a TE module's `_extra_state` in a checkpoint holds, told without unpickling it.

TE saves a byte tensor: empty where a module never ran in FP8, and from 2.16.1 on for stateless recipes; otherwise a
pickle of a dictionary with the recipe and, for delayed scaling, `scale_fwd`, `scale_bwd` and their amax histories
(`pytorch/module/base.py get_extra_state`; `pytorch/_extra_state.py` where TE itself looks before it unpickles). A
pickle's opcodes can be walked without running it, and its strings tell what it is.
"""

from __future__ import annotations

import importlib.util
import io
import os
import pickletools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

Kind = Literal["missing", "empty", "stateless", "delayed", "damaged"]
SUFFIX = "_extra_state"
ALLOW = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
_DELAYED = {"scale_fwd", "scale_bwd", "amax_history_fwd", "amax_history_bwd"}


def kind(state: Any) -> Kind:
    """What a module's extra state is.

    Args:
        state: what the checkpoint has: TE's byte tensor, `io.BytesIO` (TE 1.x), or None.

    Returns:
        missing: nothing; empty: no bytes; stateless: a recipe without scales; delayed: scales and amax histories;
        damaged: neither a tensor of bytes nor a whole pickle.
    """
    if state is None:
        return "missing"
    if isinstance(state, io.BytesIO):
        data = state.getvalue()
    elif isinstance(state, torch.Tensor) and state.dtype == torch.uint8:
        data = state.detach().cpu().contiguous().numpy().tobytes()
    else:
        return "damaged"
    if not data:
        return "empty"
    try:
        strings = {argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)}
    except ValueError:  # cut off, or no pickle: genops says which, and neither can be read
        return "damaged"
    return "delayed" if strings >= _DELAYED else "stateless"


def survey(state_dict: Mapping[str, Any]) -> dict[str, Kind]:
    """The kind of every extra state in what Megatron read: {"model.NAME" or "model0.NAME", ...: kind}.

    Args:
        state_dict: a checkpoint's, with "model", or "model0", "model1" where the pipeline is virtual.
    """
    return {
        f"{part}.{key}": kind(value)
        for part, entries in state_dict.items()
        if part.startswith("model") and isinstance(entries, Mapping)
        for key, value in _leaves(entries)
    }


def needs_permission() -> bool:
    """Whether this TE will refuse to load the pickle of delayed scaling as the environment stands."""
    looks_first = importlib.util.find_spec("transformer_engine.pytorch._extra_state") is not None
    return looks_first and os.environ.get(ALLOW, "0") != "1"


def _leaves(entries: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in entries.items():
        if key.rstrip("0123456789").endswith(SUFFIX):
            yield key, value
