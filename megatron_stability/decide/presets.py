"""Named policies: YAML files of this room, each a part of the `decide` section that what is given goes before."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path
from typing import Any

from megatron_stability import files, yaml_text

FOLDER = Path(__file__).with_name("presets")
NAMES = ("watch", "safe", "field", "fp8", "muon")  # from the least that acts to the most
DEFAULT = "safe"


def text(name: str) -> str:
    """A preset as it stands in its file.

    Args:
        name: one of `NAMES`.

    Raises:
        ValueError: there is no such preset; the message suggests the nearest.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(NAMES)}"
        raise ValueError(f"no such preset: {name}; {hint}")
    return files.read_bytes(FOLDER / f"{name}.yaml", yaml_text.LARGEST).decode()


@cache
def _settings(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = yaml_text.parse(text(name))
    return settings


def settings(name: str) -> dict[str, Any]:
    """A preset's part of the `decide` section.

    Raises:
        ValueError: as `text`.
    """
    return dict(_settings(name))


def about(name: str) -> str:
    """The comment at a preset's head, in one line."""
    lines = text(name).splitlines()
    head = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    return " ".join(line.removeprefix("#").strip() for line in head)
