"""What the base install leaves out, and how this installation gets it: from a checkout, a wheel, a VCS or an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import unquote, urlsplit

NAME: Final = "megatron-stability"

#: Packages that the base install leaves out, and the extra that brings each.
EXTRAS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "torch": "megatron",
        "megatron": "megatron",
        "megatron.core": "megatron",
        "megatron.training": "megatron",
        "omegaconf": "nemo",
        "hydra": "nemo",
        "modelopt": "modelopt",
        "plotly": "report",
        "jinja2": "report",
        "tensorboard": "report",
        "tokenizers": "tokenizers",
        "sentencepiece": "tokenizers",
        "charset_normalizer": "audit",
        "pyarrow": "audit",
        "rensa": "audit",
        "apprise": "alerts",
        "prometheus_client": "alerts",
    }
)


def command(extra: str) -> str:
    """The command that brings an extra into this environment.

    Args:
        extra: its name.

    Returns:
        `pip install …`, of the place that this installation came from; of an index only if it came from one.
    """
    place = _place()
    return f"pip install '{place}[{extra}]'" if " @ " not in place else f"pip install '{_with(place, extra)}'"


def _with(place: str, extra: str) -> str:
    name, _, url = place.partition(" @ ")
    return f"{name}[{extra}] @ {url}"


def _place() -> str:
    """What pip takes for where this installation came from."""
    root = Path(__file__).resolve().parents[1]
    if (root / "setup.py").is_file():
        return str(root)  # run from its sources, whatever stands in site-packages
    try:
        said = metadata.distribution(NAME).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return NAME
    return NAME if said is None else _of_url(json.loads(said))


def _of_url(said: Mapping[str, Any]) -> str:
    """By PEP 610's record of an installation."""
    url = str(said["url"])
    if "vcs_info" in said:
        return f"{NAME} @ {said['vcs_info']['vcs']}+{url}@{said['vcs_info']['commit_id']}"
    if url.startswith("file:"):
        return unquote(urlsplit(url).path)
    return f"{NAME} @ {url}"
