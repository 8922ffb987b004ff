"""What Megatron-Bridge's source says of recipes and their keys, read as text: a slip is told in a second, not after the
20 that Bridge's import takes.

Only what is certain is refused here: a name that stands nowhere in Bridge's recipes, a key that no class of its
configuration has and that is near one of its section's. All else is judged on the real recipe (`strict`).
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from omegaconf import DictConfig

from megatron_stability.errors import UsageError
from megatron_stability.nemo.recipe.recipe_file import DEFAULT_RECIPE, Layer, RecipeFile

_KEY: Final = re.compile(r"^    (?:def )?(\w+)[:(=]|\bself\.(?=\w)(\w+)", re.MULTILINE)
_RECIPE: Final = re.compile(r"^def (\w+_config)\(|\bas (\w+_config)\b", re.MULTILINE)
# Where the classes of a container's sections are.
_CONFIGURATION: Final = (
    *("bridge/training/*.py", "bridge/models/*.py", "bridge/models/**/*provider*.py", "bridge/data/**/*.py"),
    *("bridge/peft/*.py", "training/config/*.py", "core/optimizer/*config*.py", "core/distributed/*config*.py"),
    *("core/transformer/*config*.py", "core/model_parallel_config.py", "core/datasets/*.py"),
)
_HUB: Final = ("from_hf_pretrained", "from_hf_config", "AutoConfig", "from_pretrained")


def refuse_unknown_recipe(name: str) -> None:
    """Raise where no recipe of Bridge has the name; where Bridge's source is not found, its import tells.

    Raises:
        UsageError: with the nearest names.
    """
    known = recipes()
    if known and name not in known:
        raise UsageError(
            f"recipe: there is no recipe `{name}` in megatron.bridge.recipes{nearest(name, known)}; "
            "`megatron-stability nemo --list` has those that need no model hub"
        )


def refuse_typos(wanted: RecipeFile) -> None:
    """Raise for a key that no class of Bridge's configuration has and that is nearly one of its section's.

    Args:
        wanted: what the user wrote.

    Raises:
        UsageError: names place, key and the key that is meant.
    """
    names = dict(_annotations())
    for layer in (*wanted.layers, *([wanted.unused] if wanted.unused else []), wanted.word_layer) if names else ():
        for section, keys in _plain(layer).items():
            if section not in names and (hint := _near(section, names)):
                raise UsageError(f"{layer.place}: {section} is not a key of a recipe; did you mean `{hint}`?")
            for key in keys if section in names and "_target_" not in keys else ():
                if key not in _any_key() and (hint := _near(key, _keys(names[section]))):
                    raise UsageError(
                        f"{layer.place}: {section}.{key} is not a key of {section}; did you mean `{hint}`?"
                    )


@cache
def recipes() -> Mapping[str, Path]:
    """Every recipe function's name, with the file that defines or renames it; empty where Bridge is not installed."""
    found: dict[str, Path] = {}
    for file in sorted(_files(("bridge/recipes/**/*.py",))):
        for match in _RECIPE.finditer(file.read_text(encoding="utf-8", errors="replace")):
            name = match[1] or match[2]
            if not name.startswith("_") and (match[1] or name not in found):
                found[name] = file
    return found


def hub_free() -> list[str]:
    """Names of the pretraining recipes that ask no model hub, as their source has it."""
    return [name for name in sorted(recipes()) if "pretrain" in name and not asks_hub(name)]


@cache
def asks_hub(name: str) -> bool:
    """Whether the recipe's function, or one that it calls by name, loads something from a model hub."""
    return name != DEFAULT_RECIPE and _asks(name, frozenset())  # which costs no reading of all recipes


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` with the name that is nearly this one, or with the shortest of the same family."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    family = name.split("_")[0].rstrip("0123456789")
    kin = sorted((each for each in names if each.startswith(family) and "pretrain" in each), key=lambda n: (len(n), n))
    meant = near or (kin[:3] if len(family) > 2 else []) or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {' or '.join(f'`{each}`' for each in meant)}?" if meant else ""


def _asks(name: str, seen: frozenset[str]) -> bool:
    definition = _definitions().get(name)
    if definition is None or name in seen:
        return False
    for node in ast.walk(definition):
        word = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if word in _HUB or (word and word in _definitions() and _asks(word, seen | {name})):
            return True
    return False


@cache
def _definitions() -> Mapping[str, ast.AST]:
    """Every function of the recipes' files, also under the names that other files give it."""
    found: dict[str, ast.AST] = {}
    renamed: dict[str, str] = {}
    for file in sorted(_files(("bridge/recipes/**/*.py",))):
        for node in ast.parse(file.read_text(encoding="utf-8", errors="replace")).body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = node
            elif isinstance(node, ast.ImportFrom):
                renamed |= {alias.asname: alias.name for alias in node.names if alias.asname}
    return found | {new: found[old] for new, old in renamed.items() if old in found and new not in found}


@cache
def _classes() -> Mapping[str, tuple[frozenset[str], tuple[str, ...]]]:
    """(own fields and attributes, bases) of every class that may be a section; of one name, all together."""
    found: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {}
    for file in sorted(_files(_CONFIGURATION)):
        for node in ast.parse(file.read_text(encoding="utf-8", errors="replace")).body:
            if isinstance(node, ast.ClassDef):
                fields, bases = found.get(node.name, (frozenset(), ()))
                found[node.name] = fields | set(_attributes(node)), (*bases, *map(_last, node.bases))
    return found


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
            yield each.attr
        elif isinstance(each, ast.FunctionDef):
            yield each.name


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _annotations() -> Iterator[tuple[str, ast.expr]]:
    """Every section of a recipe and what it may be; nothing where Bridge is not installed."""
    for file in _files(("bridge/training/config.py",)):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == "ConfigContainer":
                for each in node.body:
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                        yield each.target.id, each.annotation


def _keys(annotation: ast.expr) -> Iterator[str]:
    """Of all classes that a section's annotation names, and of their bases."""
    for part in ast.walk(annotation):
        if isinstance(part, (ast.Name, ast.Attribute)):
            yield from (key for key in _fields(_last(part), frozenset()) if not key.startswith("_"))


def _fields(name: str, seen: frozenset[str]) -> frozenset[str]:
    fields, bases = _classes().get(name, (frozenset(), ()))
    return fields.union(*(_fields(base, seen | {name}) for base in bases if base not in seen))


@cache
def _any_key() -> frozenset[str]:
    """Every word that may be a key of some section; more than are, since it is read without parsing."""
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in _files(_CONFIGURATION))
    return frozenset(word for text in texts for pair in _KEY.findall(text) for word in pair)


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
    return near[0] if near else ""


def _files(patterns: Iterable[str]) -> Iterator[Path]:
    for folder in _roots():
        for pattern in patterns:
            yield from folder.glob(pattern)


def _roots() -> list[Path]:
    """Folders of the installed megatron packages, found without importing them."""
    spec = find_spec("megatron")
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def _plain(layer: Layer) -> dict[str, list[str]]:
    """Keys of each section, unresolved."""
    sections = layer.values.items_ex(resolve=False)
    return {str(name): [str(key) for key in part] if isinstance(part, DictConfig) else [] for name, part in sections}
