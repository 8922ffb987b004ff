"""The only configuration tree: one YAML file, the same names as flags, validated once.

    stability.yaml                          flag
    mode: act                               --stability-mode act
    detect:
      grad_norm_spike: {ratio: 10}          --stability-detect-grad-norm-spike-ratio 10

Precedence: flag > file > default. Unknown keys, wrong types and impossible values are one sentence each, with a
suggestion where a known name is near.
"""

from __future__ import annotations

import argparse
import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from megatron_stability import files, yaml_text
from megatron_stability.decide.config import Decide
from megatron_stability.detect.config import Detect
from megatron_stability.echo import brief
from megatron_stability.errors import UsageError
from megatron_stability.numerics.config import Model
from megatron_stability.numerics.fp8.config import Fp8
from megatron_stability.observe.config import Observe, QKClip
from megatron_stability.section import Section

PREFIX = "--stability"
#: Further names of flags; of Megatron's own `--fp8-...` none has these.
ALIASES = {
    ("detect", "expect", "announced"): "--stability-expect",
    ("fp8", "emulate"): "--fp8-emulate",
    ("record", "writer_tags"): "--stability-writer-tags",
    ("fp8", "recalibrate"): "--fp8-recalibrate",
}


class Record(Section):
    """Where the ledger and the incident bundles go."""

    dir: Path | None = Field(
        None, description="folder of the ledger and incident bundles; default: SAVE/stability, else ./stability"
    )
    max_bundles: int = Field(100, ge=0, description="incident bundles kept, the latest; 0: none is written")
    max_bundle_mb: float = Field(64.0, gt=0, description="MB (1e6 bytes) of one bundle; what exceeds it is left out")
    batch: bool = Field(True, description="a bundle holds the step's tokens, sample indexes and generators")
    heartbeat_seconds: float = Field(10.0, ge=0, description="between heartbeats of a node; below 10 it is 10; 0: none")
    tensorboard: bool = Field(True, description="write scalars through Megatron's own writers")
    writer_tags: Literal["run", "layers", "heads"] = Field(
        "run", description="what those writers get: of the run alone, of each layer too, of each head too"
    )


class Checkpoint(Section):
    """How checkpoints are proven, and which one a run resumes from."""

    manifest: bool = Field(True, description="write a manifest and a completion marker, and load nothing without them")
    threads: int = Field(4, ge=1, description="files that a rank hashes at once; memory: 4 MiB each")
    strict: bool = Field(False, description="a corrupt checkpoint stops the run; else the next older good one is used")
    allow_fresh_start: bool = Field(False, description="train from the start where --load holds no checkpoint")
    new_lineage: bool = Field(
        False, description="a start from the beginning may save beside a run's checkpoints, which become suspect"
    )
    allow_unverified: bool = Field(False, description="load a checkpoint that was saved without a manifest")
    allow_partial_load: bool = Field(False, description="let Megatron repeat a failed strict load with strict=False")
    allow_changes: tuple[str, ...] = Field(
        (), description="arguments that may differ from the checkpoint's, e.g. lr,train_iters"
    )
    data_positions_itself: bool = Field(
        False, description="with --dataloader-type external: the script puts its iterator where a resume goes on"
    )
    keep: int = Field(0, ge=0, description="complete checkpoints kept, suspect ones aside; 0: all")
    suspect_steps: int = Field(0, ge=0, description="a halt marks checkpoints of so many steps before it as suspect")

    @field_validator("allow_changes", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return tuple(name.strip() for name in value.split(",") if name.strip()) if isinstance(value, str) else value


class Data(Section):
    """What of the training data is left out."""

    skip_list: Path | None = Field(
        None, description="documents that are not trained on, as audit-data lists them: they keep their places, masked"
    )


class StabilityConfig(Section):
    """The whole tree."""

    mode: Literal["off", "observe", "act"] = Field(
        "act", description="off: stock Megatron; observe: log what would be done; act: do it"
    )
    detect: Detect = Detect()
    decide: Decide = Decide()
    model: Model = Model()
    fp8: Fp8 = Fp8()
    observe: Observe = Observe()
    qk_clip: QKClip = QKClip()
    record: Record = Record()
    checkpoint: Checkpoint = Checkpoint()
    data: Data = Data()

    @field_validator("mode", mode="before")
    @classmethod
    def _yaml_off_is_false(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML 1.1 reads a bare `off` as a boolean


def leaves(
    model: type[BaseModel] = StabilityConfig, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every leaf of the tree as (path, field), in the order of the file."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield from leaves(info.annotation, (*path, name))
        else:
            yield (*path, name), info


def flag(path: Sequence[str]) -> str:
    """The command-line flag of a leaf, e.g. ("detect", "loss_spike", "k") -> --stability-detect-loss-spike-k."""
    return "-".join([PREFIX, *path]).replace("_", "-")


def dest(path: Sequence[str]) -> str:
    """The attribute of the argparse namespace that holds a leaf's flag."""
    return flag(path).lstrip("-").replace("-", "_")


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--stability-config` and one flag a leaf.

    Values stay text until `load` validates them; what is not given is not in the namespace, for Megatron prints it all.
    """
    group = parser.add_argument_group("megatron_stability")
    group.add_argument(
        "--stability-config", type=str, default=argparse.SUPPRESS, metavar="FILE", help="YAML file of the tree"
    )
    for path, info in leaves():
        names = [flag(path), *([ALIASES[path]] if path in ALIASES else [])]
        group.add_argument(*names, type=str, default=argparse.SUPPRESS, metavar=path[-1].upper(), help=_help(info))
    return parser


def _help(info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=True)
    text = f"{info.description or ''} (default: {default})"
    return text.strip().replace("%", "%%")


def load(file: str | Path | None = None, overrides: Mapping[str, str | None] | None = None) -> StabilityConfig:
    """The tree from a YAML file and flag values by `dest` name.

    Args:
        file: a YAML file, or None for `overrides["stability_config"]`, or defaults.
        overrides: `vars(namespace)`; only this tree's own names are read, None means not given.

    Returns:
        The validated, frozen tree.

    Raises:
        UsageError: unreadable file, unknown key, wrong type or impossible value; names the flag or file and key.
    """
    overrides = overrides or {}
    for name, path in (("stability_config", ()), *((dest(path), path) for path, _ in leaves())):
        if overrides.get(name) == "":  # an unset variable of a launch script, most often
            raise UsageError(f"{flag(path) if path else '--stability-config'} is empty; give a value or drop the flag")
    file = file or overrides.get("stability_config")
    tree = _read(Path(file)) if file else {}
    given: set[tuple[str, ...]] = set()
    for path, info in leaves():
        value = overrides.get(dest(path))
        if value is None:
            continue
        given.add(path)
        _put(tree, path, _from_text(value, path, info))
    try:
        return StabilityConfig.model_validate(tree)
    except ValidationError as error:
        raise UsageError(_sentence(error, f"--stability-config {file}: " if file else "", given)) from None


def from_section(section: Any, name: str = "stability") -> StabilityConfig:
    """The tree from a section of a larger file, which its owner has read.

    Args:
        section: the section's value; None for an empty one.
        name: what the section is called there.

    Raises:
        UsageError: as `load`; names the key by its place in the larger file.
    """
    if section is not None and not isinstance(section, dict):
        raise UsageError(f"{name}: holds a {type(section).__name__}, not a mapping of sections")
    try:
        return StabilityConfig.model_validate(section or {})
    except ValidationError as error:
        raise UsageError(_sentence(error, f"{name}.", set())) from None


def _read(file: Path) -> dict[str, Any]:
    try:
        tree = yaml_text.parse(files.read_bytes(file, yaml_text.LARGEST).decode())
    except OSError as error:
        raise UsageError(
            f"--stability-config {file}: cannot be read ({error.strerror}); give a readable YAML file"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where, why = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f", line {where.line + 1}" if where else ""
        reason = f" ({why})" if why else ""
        raise UsageError(f"--stability-config {file}{line}: is not valid YAML{reason}; mend the file") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UsageError(f"--stability-config {file}: holds a {type(tree).__name__}, not a mapping of sections")
    return typing.cast(dict[str, Any], tree.get("stability", tree) if set(tree) == {"stability"} else tree)


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        node = tree.setdefault(name, {})
        if not isinstance(node, dict):
            raise UsageError(
                f"{flag(path)}: the file's `{name}` is not a section, so the flag has no place; mend the file"
            )
        tree = node
    tree[path[-1]] = value


def _from_text(text: Any, path: tuple[str, ...], info: FieldInfo) -> Any:
    if not isinstance(text, str) or info.annotation in (str, Path, Path | None):
        return text
    try:
        return yaml_text.parse(text)  # numbers, booleans and lists as the file spells them
    except yaml.YAMLError:
        raise UsageError(f"{flag(path)} {brief(text)}: is not a valid value") from None


def _sentence(error: ValidationError, place: str, given: set[tuple[str, ...]]) -> str:
    first = error.errors()[0]
    path = tuple(str(part) for part in first["loc"])
    named = next((flag(p) for p in given if path[: len(p)] == p), None)
    where = named or place + ".".join(path)
    if first["type"] == "extra_forbidden":
        return f"{where} is not a known key{_suggestion(path)}"
    return f"{where} = {brief(first['input'])}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _suggestion(path: tuple[str, ...]) -> str:
    model: Any = StabilityConfig
    for name in path[:-1]:
        info = getattr(model, "model_fields", {}).get(name)
        model = info.annotation if info else None
    names = list(getattr(model, "model_fields", {}))
    near = difflib.get_close_matches(path[-1], names, n=1)
    everywhere = [".".join(p) for p, _ in leaves() if p[-1] == path[-1]]
    if near:
        return f"; did you mean `{'.'.join((*path[:-1], near[0]))}`?"
    return f"; did you mean `{everywhere[0]}`?" if everywhere else f"; known here: {', '.join(names)}"
