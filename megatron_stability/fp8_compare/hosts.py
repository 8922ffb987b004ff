"""How each of the two hosts is told what `compare` gives its runs: Megatron's flags, or a NeMo recipe and its words."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import yaml

from megatron_stability import yaml_text
from megatron_stability.errors import UsageError
from megatron_stability.fp8_compare.gates import LONG_HISTORY

SAMPLES: Final = 50  # about, over a run
EVALUATIONS: Final = 5  # of the held-out loss, over a run
EVAL_ITERS: Final = 4  # batches of each
_COMMAND: Final = (sys.executable, "-m", "megatron_stability.cli")
_FOLDER: Final = "each run has a folder of its own in --out"
_NOT_SHARED: Final = "it would turn the control into an FP8 run; give --emulate"


class Host(Protocol):
    """What starts a run, in its own words."""

    own: ClassVar[Mapping[str, str]]  # words that `compare` gives each run, and why they can't be shared
    length: ClassVar[str]  # the word that says how long a run is

    def steps(self) -> int | None:
        """Of each run, where the words say so."""

    def command(self, folder: Path, ranks: int, cpu: bool, more: Sequence[str]) -> list[str]:
        """One run that measures all that the gates judge; what the user says of the same wins, and `more` over that."""

    def fp8(self, emulate: str) -> list[str]:
        """Words that turn a run into an FP8 run; "none": that of Transformer Engine, whose samples are to be taken."""

    def seed(self, seed: int) -> list[str]:
        """Words that give a run another seed."""


def host_of(words: Sequence[str]) -> Host:
    """By the first word after `--`: `nemo RECIPE key=value ...`, or pretrain's flags.

    Raises:
        UsageError: `nemo` without a recipe that can be read.
    """
    if words and words[0] == "nemo":
        if len(words) < 2 or words[1].startswith("-"):
            raise UsageError("nemo after --: give the BF16 control's recipe, as in -- nemo RECIPE.yaml key=value")
        end = words.index("--") if "--" in words else len(words)
        return Nemo(Path(words[1]), tuple(words[2:end]), tuple(words[end:]))
    return Megatron(tuple(words))


@dataclass(frozen=True)
class Megatron:
    """`megatron-stability pretrain`."""

    flags: tuple[str, ...]
    own: ClassVar[Mapping[str, str]] = {
        "--stability-record-dir": _FOLDER,
        "--tensorboard-dir": _FOLDER,
        "--stability-fp8-emulate": _NOT_SHARED,
        "--fp8-emulate": _NOT_SHARED,
        "--fp8-format": "it would turn the control into an FP8 run; give it in --fp8-flags, with --emulate none",
        "--save": "the second run would write over the first one's checkpoints",
        "--spec": "compare gives its own",
    }
    length: ClassVar[str] = "--train-iters"

    def steps(self) -> int | None:
        """See `Host`."""
        text = next((flag.partition("=")[2] for flag in self.flags if flag.startswith("--train-iters=")), "")
        if "--train-iters" in self.flags[:-1]:
            text = self.flags[self.flags.index("--train-iters") + 1]
        return int(text) if text.isdecimal() else None

    def command(self, folder: Path, ranks: int, cpu: bool, more: Sequence[str]) -> list[str]:
        """See `Host`."""
        steps, every = self.steps(), str(_every(self.steps()))
        measured = ["--stability-observe-sketch-every", every, "--stability-fp8-sample-every", every]
        if steps is not None:
            measured += ["--eval-interval", str(max(1, steps // EVALUATIONS)), "--eval-iters", str(EVAL_ITERS)]
        words = [*_COMMAND, "pretrain", "--nproc", str(ranks), *(["--cpu"] if cpu else []), *measured, *self.flags]
        words += ["--spec", "megatron_stability", "--stability-record-dir", str(folder)]
        return [*words, "--tensorboard-dir", str(folder / "tensorboard"), *more]

    def fp8(self, emulate: str) -> list[str]:
        """See `Host`; Megatron's default history of one step saturates whatever grows."""
        if emulate == "none":
            return ["--stability-fp8-inspect", "true"]
        words = ["--stability-fp8-emulate", emulate]
        for flag, value in zip(("--fp8-amax-history-len", "--fp8-amax-compute-algo"), LONG_HISTORY, strict=True):
            given = any(word.split("=")[0] == flag for word in self.flags)
            words += [] if given or emulate != "delayed" else [flag, str(value)]
        return words

    def seed(self, seed: int) -> list[str]:
        """See `Host`."""
        return ["--seed", str(seed)]


@dataclass(frozen=True)
class Nemo:
    """`megatron-stability nemo RECIPE key=value ... [-- torchrun ...]`; the recipe is the BF16 control's."""

    recipe: Path
    words: tuple[str, ...]
    starter: tuple[str, ...] = ()  # from `--` on: what starts the ranks
    own: ClassVar[Mapping[str, str]] = {
        "stability.record.dir": _FOLDER,
        "logger.tensorboard_dir": _FOLDER,
        "stability.fp8.emulate": _NOT_SHARED,
        "checkpoint.save": "the second run would write over the first one's checkpoints",
    }
    length: ClassVar[str] = "train.train_iters"

    def steps(self) -> int | None:
        """See `Host`."""
        steps = self._value("train", "train_iters")
        return steps if isinstance(steps, int) else None

    def command(self, folder: Path, ranks: int, cpu: bool, more: Sequence[str]) -> list[str]:
        """See `Host`; without a CUDA device the recipe runs on CPUs by itself."""
        steps, every = self.steps(), _every(self.steps())
        measured = [f"stability.observe.sketch.every={every}", f"stability.fp8.sample_every={every}"]
        interval = self._value("validation", "eval_interval")
        seldom = steps is not None and not (isinstance(interval, int) and interval <= steps)
        if seldom or not self._value("validation", "eval_iters"):
            measured += [f"validation.eval_interval={max(1, (steps or SAMPLES) // EVALUATIONS)}"]
            measured += [f"validation.eval_iters={EVAL_ITERS}"]
        saved = ["checkpoint.load=null"]  # of the recipe's own folder, which all runs would share
        saved += [f"checkpoint.save={folder / 'checkpoints'}"] if self._value("checkpoint", "save") else []
        words = [*_COMMAND, "nemo", str(self.recipe), "--nproc-per-node", str(ranks), *saved, *measured, *self.words]
        words += [f"stability.record.dir={folder}", f"logger.tensorboard_dir={folder / 'tensorboard'}", *more]
        return [*words, *self.starter]

    def fp8(self, emulate: str) -> list[str]:
        """See `Host`; as for `Megatron`."""
        if emulate == "none":
            return ["stability.fp8.inspect=true"]
        words = [f"stability.fp8.emulate={emulate}"]
        for key, value in zip(("fp8_amax_history_len", "fp8_amax_compute_algo"), LONG_HISTORY, strict=True):
            given = self._value("model", key) is not None
            words += [] if given or emulate != "delayed" else [f"model.{key}={value}"]
        return words

    def seed(self, seed: int) -> list[str]:
        """See `Host`."""
        return [f"rng.seed={seed}"]

    def _value(self, section: str, key: str) -> Any:
        """What words, `scale_down` and file say, in this order; None: the recipe function's, which is not asked."""
        for word in reversed(self.words):
            name, _, text = word.lstrip("+").partition("=")
            if name == f"{section}.{key}":
                return yaml.safe_load(text)
        tree = self._tree()
        small = tree.get("scale_down") if "--scale-down" in self.words else None
        for part in (small, tree):
            values = part.get(section) if isinstance(part, dict) else None
            if isinstance(values, dict) and key in values:
                return values[key]
        return None

    def _tree(self) -> dict[str, Any]:
        """The recipe's faults are `nemo`'s to tell, but for a file that is not there."""
        try:
            tree = yaml.safe_load(yaml_text.read(self.recipe))
        except OSError as error:
            raise UsageError(f"{self.recipe}: cannot be read ({error.strerror}); give a readable recipe") from None
        except (yaml.YAMLError, UnicodeDecodeError):
            raise UsageError(f"{self.recipe}: is not valid YAML; mend the file") from None
        return tree if isinstance(tree, dict) else {}


def _every(steps: int | None) -> int:
    """Steps between two sketches and two samples."""
    return SAMPLES if steps is None else max(1, steps // SAMPLES)
