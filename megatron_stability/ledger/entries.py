"""What the ledger's lines say, and how they are read: see `ledger.py` for how they are written.

{"kind":"run", ...,"x":"<xxh64 of the bytes before ,"x">"}    a process began, as generation g
{"kind":"step", ...,"x":"..."}    a step ended: trained, skipped or halted
{"kind":"undo", ...,"x":"..."}    a resume or rewind undid what came after
{"kind":"save", ...,"x":"..."}    a checkpoint of a step is about to be written
{"kind":"end", ...,"x":"..."}    the process leaves the loop before its last step
{"kind":"episode", ...,"x":"..."}    verdicts of a detector that belong together: opened, worse, or over
{"kind":"attention", ...,"x":"..."}    largest logit, entropy and clip of every layer and head after a step
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from megatron_stability import files
from megatron_stability.echo import masked, said
from megatron_stability.errors import UsageError
from megatron_stability.records import PASSED_OVER, Action, Change, Decision, StepRecord, Tier, Verdict, encode_float

SCHEMA = 1
FILE = "ledger.jsonl"
_MARK = b',"x":"'
_CHECKSUM_LENGTH = len(_MARK) + 16 + len(b'"}')

Said = Annotated[str, AfterValidator(said)]  # shown to people: short, without control characters and secrets
Fate = Literal["trained", "skipped", "halted"]


class Entry(BaseModel):
    """What every line carries. Generations count from 1; a resume or a rewind begins a new one."""

    model_config = ConfigDict(frozen=True)

    generation: int = Field(ge=1)
    time: float = 0.0  # Unix time in seconds, of the writing; 0: from before lines had it


class RunEntry(Entry):
    """A process opened the ledger, having resumed after `resumed_step` (0: from the start)."""

    kind: Literal["run"] = "run"
    schema_version: int
    resumed_step: int
    resumed_sample: int
    mode: Said = ""
    versions: dict[str, Said] = {}
    layout: dict[str, int] = {}
    data: dict[str, Said] = {}  # seed, and what identifies the data; equal for runs that may be compared
    settings: dict[str, JsonValue] = {}  # what decides what is learnt, by Megatron's names and ours, where not default
    trimmed_bytes: int = 0  # of a torn last line, removed at this opening


class StepEntry(Entry):
    """One finished step; the fields of `StepRecord` and `Decision`, and the fate of its samples.

    A halted step (HALT, REWIND) leaves its samples without a fate: they are read again after the resume.
    """

    kind: Literal["step"] = "step"
    step: int
    first_sample: int
    samples: int = Field(ge=0)
    tokens: float
    loss: float
    grad_norm: float
    learning_rate: float
    fate: Fate
    action: Action
    advised: Action
    reason: Said = ""
    parameters: dict[str, float] = {}
    verdicts: tuple[Verdict, ...] = ()
    nonfinite_losses: int = 0
    nonfinite_grads: int = 0
    overflow: bool = False
    disagreeing_ranks: tuple[int, ...] = ()
    culprit_ranks: tuple[int, ...] = ()
    signals: dict[str, float] = {}

    @property
    def last_sample(self) -> int:
        """The sample index just past this step's."""
        return self.first_sample + self.samples

    @property
    def computed(self) -> bool:
        """There was a forward: the samples were not passed over, for a window or for their scores."""
        return PASSED_OVER not in self.parameters

    @property
    def eventful(self) -> bool:
        """Something other than a plain APPLY was done, or would have been in `act` mode."""
        return self.action is not Action.APPLY or self.advised is not Action.APPLY or self.fate != "trained"


class UndoEntry(Entry):
    """Every step after `from_step` written before this line was undone; training goes on at `from_sample`."""

    kind: Literal["undo"] = "undo"
    from_step: int
    from_sample: int
    reason: Said = ""


class SaveEntry(Entry):
    """After this step training stops for a save, or for as long as an asynchronous one needs it to."""

    kind: Literal["save"] = "save"
    step: int


class EndEntry(Entry):
    """The process leaves the loop early: a halt, a rewind by restart, or Megatron's own reason; `step` stands."""

    kind: Literal["end"] = "end"
    step: int
    code: int
    reason: Said


class AttentionEntry(Entry):
    """Every layer and head after one step; the fields of `AttentionTable`."""

    kind: Literal["attention"] = "attention"
    step: int
    layers: tuple[str, ...]
    max_logit_lh: tuple[tuple[float, ...], ...]
    entropy_lh: tuple[tuple[float, ...], ...]
    factor_lh: tuple[tuple[float, ...], ...]
    clips_lh: tuple[tuple[float, ...], ...]
    growth_lh: tuple[tuple[float, ...], ...]
    max_gain_l: tuple[float, ...]


class EpisodeEntry(Entry):
    """An episode as it is after a change; the fields of `Episode`."""

    kind: Literal["episode"] = "episode"
    change: Change
    incident: int
    detector: str
    first_step: int
    last_step: int
    tier: Tier
    value: float
    threshold: float
    verdicts: int
    grave: int = 0  # absent: written before it was counted
    reason: Said


AnyEntry = RunEntry | StepEntry | UndoEntry | SaveEntry | EndEntry | AttentionEntry | EpisodeEntry
_ENTRIES: TypeAdapter[AnyEntry] = TypeAdapter(Annotated[AnyEntry, Field(discriminator="kind")])


@dataclass(frozen=True)
class LedgerView:
    """The whole lines of a ledger, in the order in which they were written."""

    entries: tuple[AnyEntry, ...]
    torn_bytes: int = 0  # of an incomplete last line, ignored

    @cached_property
    def runs(self) -> tuple[RunEntry, ...]:
        """The processes that wrote here."""
        return tuple(entry for entry in self.entries if isinstance(entry, RunEntry))

    @cached_property
    def steps(self) -> tuple[StepEntry, ...]:
        """Every step, undone ones too."""
        return tuple(entry for entry in self.entries if isinstance(entry, StepEntry))

    @cached_property
    def ends(self) -> tuple[EndEntry, ...]:
        """Why processes left before their last step."""
        return tuple(entry for entry in self.entries if isinstance(entry, EndEntry))

    @cached_property
    def attention(self) -> tuple[AttentionEntry, ...]:
        """The tables of all layers and heads."""
        return tuple(entry for entry in self.entries if isinstance(entry, AttentionEntry))

    @cached_property
    def episodes(self) -> tuple[EpisodeEntry, ...]:
        """Each episode as it was last, in the order in which they opened; undone ones too."""
        last = {(e.incident, e.detector, e.first_step): e for e in self.entries if isinstance(e, EpisodeEntry)}
        return tuple(last.values())

    @cached_property
    def surviving(self) -> tuple[StepEntry, ...]:
        """The steps of the surviving trajectory: those that no resume or rewind undid."""
        return _fold(self.entries)[0]

    @cached_property
    def undone(self) -> tuple[StepEntry, ...]:
        """The steps that a resume or rewind undid."""
        return _fold(self.entries)[1]

    @cached_property
    def decisions(self) -> tuple[StepEntry, ...]:
        """Every step, undone ones too, on which something other than a plain APPLY was done or advised."""
        return tuple(step for step in self.steps if step.eventful)

    @property
    def generation(self) -> int:
        """The last generation; 0 for an empty ledger."""
        return max((entry.generation for entry in self.entries), default=0)

    @property
    def origin(self) -> int:
        """The first sample this ledger answers for: the earliest that a run began, or was taken back, at."""
        begins = [e.resumed_sample for e in self.entries if isinstance(e, RunEntry)]
        return min(begins + [e.from_sample for e in self.entries if isinstance(e, UndoEntry)], default=0)


def _fold(entries: Sequence[AnyEntry]) -> tuple[tuple[StepEntry, ...], tuple[StepEntry, ...]]:
    live: list[StepEntry] = []
    undone: list[StepEntry] = []
    for entry in entries:
        if isinstance(entry, StepEntry):
            live.append(entry)
        elif isinstance(entry, UndoEntry):
            undone += [step for step in live if step.step > entry.from_step]
            live = [step for step in live if step.step <= entry.from_step]
    return tuple(live), tuple(undone)


def home(folder: str | Path) -> Path:
    """Where a run's ledger lies: in the folder itself, or in its subfolder `stability`.

    Args:
        folder: a run's folder.
    """
    folder = Path(folder)
    nested = folder / "stability"
    return nested if not (folder / FILE).exists() and (nested / FILE).exists() else folder


def read(folder: str | Path) -> LedgerView:
    """The ledger in `folder`, also while a run writes it.

    Args:
        folder: the folder that holds `ledger.jsonl`.

    Returns:
        Its whole lines.

    Raises:
        UsageError: no readable ledger there, or a damaged line that is not the last.
    """
    path = Path(folder) / FILE
    try:
        data = files.read_bytes(path, sys.maxsize)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); name the folder of a run's ledger") from None
    entries, whole = parse(data, path)
    return LedgerView(entries, len(data) - whole)


def step_entry(record: StepRecord, decision: Decision, generation: int) -> StepEntry:
    """The ledger's line for a finished step.

    Args:
        record: the step as all ranks saw it.
        decision: what was done with it.
        generation: the writer's generation.

    Returns:
        The entry; its reason is left out for a plain APPLY without verdicts.
    """
    plain = decision.action is decision.advised is Action.APPLY and not decision.verdicts
    if decision.action.updates_weights:
        # fp16: the optimizer was called but its loss scaler withheld the update
        fate: Fate = "skipped" if record.overflow else "trained"
    else:
        fate = "skipped" if decision.action is Action.SKIP else "halted"
    reason = "fp16 overflow: the loss scaler withheld the update" if plain and record.overflow else decision.reason
    return StepEntry(
        generation=generation,
        step=record.step,
        first_sample=record.first_sample,
        samples=record.samples,
        tokens=record.tokens,
        loss=record.loss,
        grad_norm=record.grad_norm,
        learning_rate=record.learning_rate,
        fate=fate,
        action=decision.action,
        advised=decision.advised,
        reason="" if plain and not record.overflow else reason,
        parameters=dict(decision.parameters),
        verdicts=decision.verdicts,
        nonfinite_losses=record.nonfinite_losses,
        nonfinite_grads=record.nonfinite_grads,
        overflow=record.overflow,
        disagreeing_ranks=record.disagreeing_ranks,
        culprit_ranks=record.culprit_ranks,
        signals=dict(record.signals),
    )


def strict(value: Any) -> Any:
    """A value for strict JSON, at any depth: without secrets, floats through `encode_float`, texts as valid Unicode."""
    return _strict(masked(value))


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return encode_float(value)
    if isinstance(value, str):
        return strict_text(value)
    if isinstance(value, dict):
        return {_strict(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value


def strict_text(value: str) -> str:
    """Without lone surrogates, as in an undecodable path: they are not JSON."""
    return value.encode(errors="replace").decode()


def line_of(entry: AnyEntry) -> bytes:
    """An entry's line: compact JSON, a checksum, a line feed."""
    fields = strict(entry.model_dump(exclude_defaults=True))
    return _sealed(json.dumps({"kind": entry.kind, **fields}, separators=(",", ":"), allow_nan=False).encode()[:-1])


def _sealed(body: bytes) -> bytes:
    return body + _MARK + xxhash.xxh64_hexdigest(body).encode() + b'"}\n'


def parse(data: bytes, path: Path) -> tuple[tuple[AnyEntry, ...], int]:
    """The entries of a ledger's bytes, and the number of bytes in its whole lines.

    A last line whose line feed alone is missing counts as whole.

    Args:
        data: the file's bytes.
        path: named in errors.

    Returns:
        The entries, and how many leading bytes hold them; what follows is a torn line.

    Raises:
        UsageError: a damaged line that is not the last.
    """
    entries: list[AnyEntry] = []
    start = 0
    while start < len(data):
        stop = data.find(b"\n", start) + 1 or len(data)
        line = data[start:stop].removesuffix(b"\n")
        if line + b"\n" != _sealed(line[:-_CHECKSUM_LENGTH]):
            if stop == len(data):
                break
            raise UsageError(
                f"{path}, line {len(entries) + 1}: is damaged (wrong checksum); restore the file from a copy, or move "
                "it away to begin a new ledger"
            )
        entries.append(_validated(line, path, len(entries) + 1))
        start = stop
    return tuple(entries), start


def _validated(line: bytes, path: Path, number: int) -> AnyEntry:
    try:
        entry = _ENTRIES.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{path}, line {number}: is not a ledger line ({where}: {first['msg']})") from None
    if isinstance(entry, RunEntry) and entry.schema_version > SCHEMA:
        raise UsageError(
            f"{path}, line {number}: has schema {entry.schema_version}, and this version reads up to {SCHEMA}; "
            "install a newer megatron-stability"
        )
    return entry
