"""A NeMo YAML recipe and `key=value` words, read before anything of Megatron is imported.

    recipe: vanilla_gpt_pretrain_config     # any recipe function of megatron.bridge.recipes
    stability: {mode: act, ...}             # the tree of `megatron_stability.config`; absent: stock Bridge
    scale_down: {model: {...}, ...}         # merged over the rest with --scale-down: the same recipe, small
    model: ...                              # all else: Bridge's own sections

Parsed by the libraries that Bridge parses with, OmegaConf and Hydra, so that a word means the same here and there.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_stability import config as tree
from megatron_stability import yaml_text
from megatron_stability.config import StabilityConfig
from megatron_stability.echo import brief
from megatron_stability.errors import UsageError

DEFAULT_RECIPE: Final = "vanilla_gpt_pretrain_config"
OWN: Final = ("recipe", "stability", "scale_down")  # top-level keys that are not Bridge's


@dataclass(frozen=True)
class Layer:
    """Overrides from one place, as nested mappings.

    Attributes:
        place: what an error names, e.g. `recipe.yaml`.
        values: Bridge's sections, unresolved.
    """

    place: str
    values: DictConfig


@dataclass(frozen=True)
class RecipeFile:
    """What the user wrote.

    Attributes:
        recipe: name of a function of `megatron.bridge.recipes`.
        stability: our tree.
        layers: overrides from files, the later the stronger.
        unused: the `scale_down` section where it is not merged; it is checked all the same.
        words: `key=value` words for Bridge's sections, stronger than every layer, in Hydra's grammar.
        word_layer: the same words as mappings, for checking.
        save: `checkpoint.save`, where the file or a word gives it.
    """

    recipe: str
    stability: StabilityConfig
    layers: tuple[Layer, ...]
    unused: Layer | None
    words: tuple[str, ...]
    word_layer: Layer
    save: Path | None


def read(file: Path | None, words: Sequence[str] = (), scale_down: bool = False) -> RecipeFile:
    """Read a recipe.

    Args:
        file: the YAML file, or None for the words alone.
        words: `key=value`, `+key=value`, in Hydra's grammar.
        scale_down: whether the file's `scale_down` section is merged over the rest.

    Returns:
        The recipe, with our own keys taken out of Bridge's.

    Raises:
        UsageError: unreadable, not YAML, a key twice, a word that is none, or an unusable `stability` section.
    """
    conf = _load(file) if file is not None else OmegaConf.create()
    _refuse_unwritten(file, conf)
    small = conf.pop("scale_down", OmegaConf.create())
    if not isinstance(small, DictConfig) or (scale_down and not small):
        raise UsageError(f"{file}: has no scale_down section of keys; write one, or drop --scale-down")
    _refuse_unwritten(f"{file}: scale_down", small)
    parsed = [_parse(word) for word in words]
    own, theirs = OmegaConf.create(), OmegaConf.create()
    for override in parsed:
        _put(own if _section(override) in OWN else theirs, override)
    for part in (own, theirs):
        _refuse_unwritten("the command line", part)
    if "scale_down" in own:
        raise UsageError("scale_down is a section of the file; on the command line give the keys themselves")
    base, reduced = Layer(str(file), conf), Layer(f"{file}: scale_down", small)
    used = (base, reduced) if scale_down else (base,)
    _stability(file, conf, small, own)  # in small or not, both are to be right
    merged = _merge(file, *(layer.values for layer in used), own, theirs)
    save = OmegaConf.select(merged, "checkpoint.save", throw_on_resolution_failure=False)
    return RecipeFile(
        recipe=_name(merged.get("recipe", DEFAULT_RECIPE)),
        stability=_stability(file, *(layer.values for layer in used), own),
        layers=tuple(_bridges(layer) for layer in used),
        unused=None if scale_down else _bridges(reduced),
        words=tuple(word for word, override in zip(words, parsed, strict=True) if _section(override) not in OWN),
        word_layer=Layer("the command line", theirs),
        save=Path(save) if isinstance(save, str) else None,
    )


def _refuse_unwritten(place: Path | str | None, conf: DictConfig) -> None:
    """A section has to stand where it is named: a reference or `???` would fall to the recipe's, or to none."""
    for key in conf:
        if OmegaConf.is_interpolation(conf, key) or OmegaConf.is_missing(conf, key):
            raise UsageError(f"{place}: {key} is a reference or `???`; write its value there")
        if isinstance(conf[key], ListConfig):
            raise UsageError(f"{place}: {key} is a list; write a mapping, e.g. model: {{num_layers: 2}}")


def _merge(file: Path | None, *parts: DictConfig) -> DictConfig:
    try:
        merged = OmegaConf.merge(*parts)
    except OmegaConfBaseException as error:
        raise UsageError(f"{file}: {_first_line(error)}") from None
    assert isinstance(merged, DictConfig)
    return merged


def _stability(file: Path | None, *parts: DictConfig) -> StabilityConfig:
    """Our tree; without any section of that name, off."""
    merged = _merge(file, *parts)
    if "stability" not in merged:
        return StabilityConfig(mode="off")
    try:
        section = merged.stability
        return tree.from_section(
            OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section
        )
    except OmegaConfBaseException as error:
        raise UsageError(f"{file}: stability: {_first_line(error)}") from None


def _load(file: Path) -> DictConfig:
    try:
        conf = OmegaConf.load(io.StringIO(yaml_text.read(file)))
    except OSError as error:
        if error.errno is None:  # OmegaConf's, for a file of one number
            raise UsageError(f"{file}: holds one value, not a mapping of sections") from None
        raise UsageError(f"{file}: cannot be read ({error.strerror}); give a readable YAML recipe") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError, OmegaConfBaseException) as error:
        mark, why = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{file}{line}: is not valid YAML ({why or _first_line(error)}); mend the file") from None
    if not isinstance(conf, DictConfig):
        raise UsageError(f"{file}: holds a list, not a mapping of sections")
    return conf


def _parse(word: str) -> Override:
    if word.startswith("-"):
        raise UsageError(f"unknown flag {word}; overrides are written key=value, e.g. train.train_iters=100")
    try:
        override = OverridesParser.create().parse_override(word)
    except (HydraException, RecursionError) as error:
        raise UsageError(f"{brief(word)} is not key=value: {_first_line(error)}") from None
    if override.is_delete():
        raise UsageError(f"{word!r}: a key of a recipe can't be deleted (Bridge would keep its value); set it to null")
    if override.is_sweep_override():
        raise UsageError(f"{word!r} is a sweep, of which a run can take one value; write a list as key=[a,b]")
    if override.package is not None:
        raise UsageError(f"{word!r}: `@` names a package of Hydra's config groups, and a recipe has none")
    return override


def _put(into: DictConfig, override: Override) -> None:
    try:
        OmegaConf.update(into, str(override.key_or_group), override.value(), force_add=True)
    except (OmegaConfBaseException, ValueError, KeyError) as error:
        raise UsageError(f"{override.input_line!r}: {_first_line(error)}") from None


def _section(override: Override) -> str:
    return str(override.key_or_group).split(".")[0]


def _bridges(layer: Layer) -> Layer:
    return Layer(layer.place, OmegaConf.masked_copy(layer.values, [key for key in layer.values if key not in OWN]))


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"recipe: {brief(value)} is not the name of a recipe function, e.g. {DEFAULT_RECIPE}")
    return value


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
