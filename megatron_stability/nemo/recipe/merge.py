"""From a recipe's name and its overrides to Bridge's `ConfigContainer`: command line > CPU > YAML > recipe."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

import megatron.bridge.recipes as recipes
from hydra.errors import HydraException
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
from megatron.bridge.training.config import ConfigContainer, GPTDatasetConfig, MockGPTDatasetConfig
from megatron.bridge.training.mixed_precision import get_mixed_precision_config
from megatron.bridge.training.utils.omegaconf_utils import (
    OverridesError,
    apply_overrides,
    create_omegaconf_dict_config,
    parse_hydra_overrides,
)
from megatron.bridge.utils.instantiate_utils import InstantiationException, instantiate
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_stability.errors import UsageError
from megatron_stability.nemo.recipe import hub, source, strict
from megatron_stability.nemo.recipe.recipe_file import Layer, RecipeFile

# What a CPU can't do: each line turns off a CUDA kernel, NCCL or Transformer Engine. Set where the recipe has the key.
CPU: Final[Mapping[str, Mapping[str, Any] | None]] = {
    "dist": {"distributed_backend": "gloo"},
    "model": {
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "cross_entropy_loss_fusion": False,
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "moe_router_fusion": False,
        "tp_comm_overlap": False,
        "cuda_graph_impl": "none",
    },
    "optimizer": {"use_precision_aware_optimizer": False},
    "comm_overlap": None,
}
_FP8: Final = ("fp8_", "first_last_layers_bf16", "num_layers_at_")  # fields of the model that precisions have too


def build(wanted: RecipeFile, cpu: bool) -> tuple[ConfigContainer, list[str]]:
    """The merged recipe.

    Args:
        wanted: the recipe's name and overrides.
        cpu: whether this process is on the CPU backend.

    Returns:
        A container as Bridge's `pretrain` takes it, not yet finalized; and what the CPU backend changed in it.

    Raises:
        UsageError: no such recipe, or an override that Bridge would drop, revert or misread.
    """
    container = recipe(wanted.recipe)()
    base, excluded = create_omegaconf_dict_config(container)
    layers, merged, notes = wanted.layers, _merge(base, wanted.layers), []
    if cpu:
        notes = list(_changes(layer := cpu_layer(container), merged))
        layers, merged = (*layers, layer), _merge(merged, (layer,))
    for layer in (*layers, *([wanted.unused] if wanted.unused else []), wanted.word_layer):
        strict.check(_resolved(layer, merged), container, layer.place, excluded)
    try:
        merged = parse_hydra_overrides(merged, list(wanted.words)) if wanted.words else merged
        final = OmegaConf.to_container(merged, resolve=True)
    except (OverridesError, HydraException, OmegaConfBaseException) as error:
        raise UsageError(f"{wanted.word_layer.place}: {_sentence(error)}") from None
    apply_overrides(container, final, excluded)
    for layer in (*layers, wanted.word_layer):
        _refuse_unbuilt(container, layer)
    for layer in (*layers, wanted.word_layer):
        for path in _leaves(OmegaConf.to_container(layer.values, resolve=False)):
            _settle(container, path, layer.place)
    _keep_fp8(container, (*layers, wanted.word_layer))
    if cpu:
        if not isinstance(container.model, GPTModelProvider):
            raise UsageError(
                f"recipe {wanted.recipe}: the CPU backend trains GPTs, and this is a {type(container.model).__name__}"
            )
        container.model.transformer_layer_spec = local_layer_spec
    return container, notes


def recipe(name: str) -> Any:
    """The recipe function of that name; it takes no argument.

    Raises:
        UsageError: there is none, with the nearest name; or it wants arguments.
    """
    known = [other for other in dir(recipes) if other.endswith("_config") and callable(getattr(recipes, other))]
    if name not in known:
        hint = source.nearest(name, known) or f"; there are {len(known)}, e.g. vanilla_gpt_pretrain_config"
        raise UsageError(f"recipe: there is no recipe `{name}` in megatron.bridge.recipes{hint}")
    function = getattr(recipes, name)
    wanted = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind < 2]
    if wanted:
        raise UsageError(f"recipe: {name} needs arguments ({', '.join(wanted)}), which YAML can't give")
    return functools.partial(_call, function, name)


def _call(function: Any, name: str) -> ConfigContainer:
    try:
        container = function()
    except (OSError, ValueError, RuntimeError, ImportError) as error:  # most often the hub, for a model's shape
        offline = f"; the model hub is not asked ({hub.OFFLINE}=1)" if os.environ.get(hub.OFFLINE) else ""
        hint = "; `megatron-stability nemo --list` names recipes that need none" if source.asks_hub(name) else ""
        raise UsageError(f"recipe {name} can't be built here: {_sentence(error)}{offline}{hint}") from error
    if not isinstance(container, ConfigContainer):
        raise UsageError(f"recipe {name} gives a {type(container).__name__}, not a ConfigContainer")
    return container


def refuse_no_data(dataset: Any) -> None:
    """Bridge takes mock data where a pretraining set names none, and where it names some beside `mock`.

    Args:
        dataset: the recipe's section.

    Raises:
        UsageError: the data that are trained on are not those that the recipe names.
    """
    if not isinstance(dataset, GPTDatasetConfig) or isinstance(dataset, MockGPTDatasetConfig):
        return
    named = dataset.data_path or dataset.blend or any(dataset.blend_per_split or ())
    if not named and not dataset.mock:
        raise UsageError(
            "dataset: no data; give dataset.data_path=PREFIX, which `megatron-stability prepare-data` makes, or "
            "dataset.mock=true for synthetic data"
        )
    if named and dataset.mock:
        raise UsageError("dataset.mock is true and data are named: Bridge would train on mock data; drop one")


def refuse_unlike_dtypes(container: ConfigContainer) -> None:
    """Without a mixed precision, which sets both, the recipe's optimizer may keep master weights of a model in fp32.

    Raises:
        UsageError: such a run trains, and fails in its first save.
    """
    for name in ("bf16", "fp16") if container.mixed_precision is None else ():
        model, optimizer = getattr(container.model, name), getattr(container.optimizer, name)
        if model != optimizer:
            raise UsageError(
                f"mixed_precision is null, model.{name} {str(model).lower()} and optimizer.{name} "
                f"{str(optimizer).lower()}: no checkpoint could be saved; set optimizer.{name}={str(model).lower()}"
            )


def cpu_layer(container: ConfigContainer) -> Layer:
    """Of `CPU`, what this recipe has and has otherwise."""
    values: dict[str, Any] = {}
    for section, wanted in CPU.items():
        owner = getattr(container, section)
        if wanted is None:
            values |= {section: None} if owner is not None else {}
        elif has := {key: value for key, value in wanted.items() if hasattr(owner, key)}:
            values[section] = has
    return Layer("the CPU backend", OmegaConf.create(values))


def _changes(layer: Layer, merged: DictConfig) -> Iterator[str]:
    for path in _leaves(OmegaConf.to_container(layer.values)):
        name = ".".join(path)
        before, after = OmegaConf.select(merged, name), OmegaConf.select(layer.values, name)
        if before != after:
            yield f"{name}: {after} (not {before})"


def _merge(base: DictConfig, layers: tuple[Layer, ...]) -> DictConfig:
    merged = base
    for layer in layers:
        try:
            merged = OmegaConf.merge(merged, layer.values)
        except OmegaConfBaseException as error:
            raise UsageError(f"{layer.place}: {_sentence(error)}") from None
    return merged


def _resolved(layer: Layer, merged: DictConfig) -> dict[str, Any]:
    """A layer as plain mappings, its `${...}` as the whole recipe resolves them."""

    def plain(node: Any, path: str) -> Any:
        if isinstance(node, dict):
            return {key: plain(value, f"{path}.{key}" if path else str(key)) for key, value in node.items()}
        if node == MISSING:
            raise UsageError(f"{layer.place}: {path} is `???`; give its value")
        if isinstance(node, str) and "${" in node:
            try:
                return OmegaConf.select(merged, path)
            except OmegaConfBaseException as error:
                raise UsageError(f"{layer.place}: {path}: {_sentence(error)}") from None
        return node

    resolved: dict[str, Any] = plain(OmegaConf.to_container(layer.values, resolve=False), "")
    return resolved


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(node, Mapping) and node and strict.TARGET not in node:
        for key, value in node.items():
            yield from _leaves(value, (*path, str(key)))
    elif path:
        yield path


def _settle(container: ConfigContainer, path: tuple[str, ...], place: str) -> None:
    """After the merge: names of members and dtypes become them; an object that Bridge failed to build is an error."""
    owner: Any = container
    for name in path[:-1]:
        owner = getattr(owner, name, None)
    if owner is None or not hasattr(owner, path[-1]):
        return  # inside a plain mapping, such as env_vars
    value = getattr(owner, path[-1])
    if isinstance(value, Mapping) and strict.TARGET in value:
        try:
            setattr(owner, path[-1], instantiate(dict(value)))
        except (InstantiationException, TypeError, ValueError) as error:
            raise UsageError(f"{place}: {'.'.join(path)} can't be built: {_sentence(error)}") from None
    elif (known := strict.meant(strict.field_types(type(owner)).get(path[-1]), value)) is not value:
        setattr(owner, path[-1], known)


def _keep_fp8(container: ConfigContainer, layers: tuple[Layer, ...]) -> None:
    """What a recipe says of `model.fp8_*` stays: a named mixed precision would put its own over it, silently."""
    named = {path[1] for layer in layers for path in _leaves(OmegaConf.to_container(layer.values, resolve=False))
             if path[0] == "model" and len(path) == 2 and path[1].startswith(_FP8)}  # fmt: skip
    if not named or container.mixed_precision is None:
        return
    if isinstance(container.mixed_precision, str):
        container.mixed_precision = get_mixed_precision_config(container.mixed_precision)
    for name in sorted(named):
        if hasattr(container.mixed_precision, name):
            setattr(container.mixed_precision, name, getattr(container.model, name))


def _refuse_unbuilt(container: ConfigContainer, layer: Layer) -> None:
    """Where a section's `_target_` can't be built, Bridge logs a line and keeps the recipe's object."""
    for section, values in layer.values.items():
        name = values.get(strict.TARGET) if isinstance(values, DictConfig) else None
        built = type(getattr(container, str(section)))
        if isinstance(name, str) and name.rpartition(".")[2] not in [base.__name__ for base in built.__mro__]:
            raise UsageError(
                f"{layer.place}: {section}._target_ {name} can't be built with this recipe's keys, and a "
                f"{built.__name__} would stay; leave it out, or choose a recipe that has it"
            )


def _sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
