"""What Bridge's merge would drop, revert or misread without stopping, found before it is merged.

Bridge logs an unknown key and goes on; puts a field that holds code back to the recipe's value; sets a plain mapping
where a configuration object belongs; and takes text where a number belongs. Each is an error here.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch
from megatron.bridge.training.mixed_precision import MIXED_PRECISION_RECIPES
from megatron.bridge.utils.activation_map import ACTIVATION_FUNC_MAP, str_to_callable, str_to_dtype
from megatron.bridge.utils.instantiate_utils import InstantiationException, _locate, _validate_target_prefix

from megatron_stability.echo import brief
from megatron_stability.errors import UsageError

TARGET: Final = "_target_"
INSTANTIATION: Final = (TARGET, "_args_", "_call_", "_partial_", "_name_")  # words of the instantiation itself
# A field that Bridge overwrites from another one.
OVERWRITTEN: Final = {("dataset", "sequence_length"): "dataset.seq_length"}


def check(values: Mapping[Any, Any], container: Any, place: str, excluded: Collection[str]) -> None:
    """Check the overrides of one place against the recipe that they change.

    Args:
        values: nested mappings, resolved.
        container: the recipe's `ConfigContainer`.
        place: what an error names.
        excluded: dotted paths of the fields that Bridge restores after a merge, as `root.model.init_method`.

    Raises:
        UsageError: an unknown key, a wrong type, a field that holds code, or a `_target_` that is not allowed.
    """
    _Check(place, frozenset(path.removeprefix("root.") for path in excluded)).section(values, container, ())


def meant(annotation: Any, value: Any) -> Any:
    """The enumeration's member or the dtype that a text names, by the field's type; Bridge would leave the text.

    Args:
        annotation: the field's type.
        value: what the merge has left there.

    Returns:
        The member, the dtype, or the value as it is.
    """
    for kind in _alternatives(annotation) if isinstance(value, str) else ():
        if isinstance(kind, type) and issubclass(kind, Enum) and value in kind.__members__:
            return kind[value]
        if kind is torch.dtype:
            return str_to_dtype(value)
    return value


def field_types(owner: type) -> dict[str, Any]:
    """The types of a dataclass's fields; of one whose annotations can't be evaluated, nothing is known."""
    try:
        return typing.get_type_hints(owner)
    except (NameError, TypeError, AttributeError):
        return {}


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?`, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean `{near[0]}`?" if near else ""


@dataclasses.dataclass(frozen=True)
class _Check:
    place: str
    excluded: frozenset[str]

    def fail(self, path: tuple[str, ...], what: str) -> typing.NoReturn:
        raise UsageError(f"{self.place}: {'.'.join(path)} {what}")

    def section(self, values: Mapping[Any, Any], owner: Any, above: tuple[str, ...]) -> None:
        """One dataclass of the recipe and the mapping that overrides it."""
        hints = field_types(type(owner))
        known = _settable(owner)
        for key, value in values.items():
            path = (*above, str(key))
            if key == TARGET:
                self.target(value, path)
                continue
            if key not in known:
                self.fail(path, self.unknown(str(key), owner, known, above))
            if path in OVERWRITTEN:
                self.fail(path, f"is overwritten by Bridge from {OVERWRITTEN[path]}; set that")
            if ".".join(path) in self.excluded:
                self.holds_code(path)
            current = getattr(owner, key)
            if dataclasses.is_dataclass(current) and isinstance(value, Mapping):
                self.section(value, current, path)
            else:
                self.leaf(value, current, hints.get(key, Any), path)

    def holds_code(self, path: tuple[str, ...]) -> typing.NoReturn:
        if path[-1] == "transformer_layer_spec":
            self.fail(
                path, "is code, which Bridge puts back silently; choose norms and softcaps under `stability.model`"
            )
        self.fail(path, "is code in this recipe, which Bridge puts back silently; change it in a recipe function")

    def unknown(self, key: str, owner: Any, known: Collection[str], above: tuple[str, ...]) -> str:
        hint = suggestion(key, known)
        if not above and "." in key:
            section, _, rest = key.partition(".")
            hint = f"; in a file sections are mappings, as {section}: {{{rest}: ...}}"
        if not hint:
            elsewhere = [
                f"{name}.{key}"
                for name, part in vars(owner).items()
                if dataclasses.is_dataclass(part) and key in _settable(part)
            ]
            hint = f"; did you mean `{elsewhere[0]}`?" if elsewhere else ""
        if not above and not hint:
            hint = f"; the sections are recipe, stability, scale_down, {', '.join(sorted(known))}"
        return f"is not a key of {'a recipe' if not above else type(owner).__name__}{hint}"

    def target(self, value: Any, path: tuple[str, ...]) -> None:
        if not isinstance(value, str):
            self.fail(path, f"= {brief(value)}: must be the dotted name of a class or function")
        try:
            _validate_target_prefix(target=value, full_key=".".join(path[:-1]))
        except InstantiationException as error:
            self.fail(path, f"= {value}: {str(error).splitlines()[0]}")

    def leaf(self, value: Any, current: Any, annotation: Any, path: tuple[str, ...]) -> None:
        """A value that is set as it is, or built from its `_target_`."""
        if isinstance(value, Mapping) and TARGET in value:
            self.target(value[TARGET], (*path, TARGET))
            self.arguments(value, path)
            return
        if value is None and current is None:  # some defaults of Megatron's are null whatever their type says
            return
        kinds = _alternatives(annotation)
        if path == ("mixed_precision",):
            self.mixed_precision(value, path)
        elif path[-1] == "activation_func" and isinstance(value, str):
            self.activation(value, path)
        elif isinstance(value, str) and (isinstance(current, torch.dtype) or torch.dtype in kinds):
            self.dtype(value, path)
        elif not any(_fits(meant(annotation, value), kind) for kind in kinds):
            self.fail(path, f"= {brief(value)}: must be {_described(kinds, value)}")

    def arguments(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> None:
        """Of a `_target_`, which Bridge calls with the keys that it knows and without the others."""
        try:
            parameters = inspect.signature(_locate(value[TARGET])).parameters
        except (InstantiationException, ImportError, TypeError, ValueError) as error:
            self.fail((*path, TARGET), f"= {value[TARGET]}: {str(error).splitlines()[0]}")
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        for key, item in value.items():
            if not open_ended and key not in parameters and key not in INSTANTIATION:
                self.fail((*path, str(key)), f"is not an argument of {value[TARGET]}{suggestion(str(key), parameters)}")
            if isinstance(item, Mapping) and TARGET in item:
                self.leaf(item, None, Any, (*path, str(key)))

    def mixed_precision(self, value: Any, path: tuple[str, ...]) -> None:
        if isinstance(value, Mapping):
            self.fail(path, "is a mapping: name a recipe, or give `_target_: "
                            "megatron.bridge.training.mixed_precision.MixedPrecisionConfig`")  # fmt: skip
        if value is not None and str(value).replace("-", "_") not in MIXED_PRECISION_RECIPES:
            hint = suggestion(str(value), MIXED_PRECISION_RECIPES)
            self.fail(path, f"= {brief(value)}: is not a mixed-precision recipe of Bridge{hint}")

    def activation(self, value: str, path: tuple[str, ...]) -> None:
        try:
            str_to_callable(value)
        except ValueError:
            names = [name for name in ACTIVATION_FUNC_MAP if "." not in name]
            self.fail(path, f"= {brief(value)}: is not an activation; Bridge knows {', '.join(names)}")

    def dtype(self, value: str, path: tuple[str, ...]) -> None:
        try:
            str_to_dtype(value)
        except ValueError:
            self.fail(path, f"= {brief(value)}: is not a dtype, e.g. torch.bfloat16")


def _settable(owner: Any) -> set[str]:
    fields = {field.name for field in dataclasses.fields(owner)}
    return {name for name in fields | set(vars(owner)) if not name.startswith("_")}


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, flat; an alias's value; `Any` for what we don't judge."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(kind for part in typing.get_args(annotation) for kind in _alternatives(part))
    if typing.get_origin(annotation) is typing.Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    return (annotation,)


def _fits(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    if kind is Any or isinstance(kind, typing.TypeVar):
        return True
    if kind in (None, types.NoneType):
        return value is None
    if origin is typing.Literal:
        return any(value == known and type(value) is type(known) for known in typing.get_args(kind))
    if origin is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin in (bool, str):
        return isinstance(value, origin)
    if origin is Path:
        return isinstance(value, (str, Path))
    if origin in (list, tuple, set, frozenset) or (isinstance(origin, type) and issubclass(origin, (list, tuple))):
        return isinstance(value, (list, tuple))
    if isinstance(origin, type) and (origin is dict or issubclass(origin, Mapping)):
        return isinstance(value, Mapping)
    if isinstance(origin, type) and issubclass(origin, Enum):
        return isinstance(value, origin)
    return isinstance(origin, type) and isinstance(value, origin)


def _described(kinds: tuple[Any, ...], value: Any) -> str:
    names = []
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            names += [repr(choice) for choice in typing.get_args(kind)]
        elif isinstance(kind, type) and issubclass(kind, Enum):
            names += list(kind.__members__)
        elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
            names.append(f"a mapping with `_target_: {kind.__module__}.{kind.__qualname__}`")
        elif typing.get_origin(kind) is Callable or kind is Callable or not isinstance(kind, type):
            names.append(str(kind).removeprefix("typing.") if typing.get_origin(kind) is not None else "code")
        else:
            names.append("null" if kind is types.NoneType else kind.__name__)
    if isinstance(value, str) and _as_float(value):
        return f"{' or '.join(names)}, and this is text: YAML wants a decimal point or no quotes, e.g. 1.0e-4"
    return " or ".join(names)


def _as_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
