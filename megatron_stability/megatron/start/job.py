"""What a rank does, in a form that reaches its process."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_stability.errors import UsageError


class Training(Protocol):
    """What a rank can be told to do."""

    def prepare(self) -> None:
        """Make the process ready to import Megatron, before any import of it."""

    def train(self) -> None:
        """Train to the end."""


@dataclass(frozen=True)
class Job:
    """What every rank does: Megatron's flags, and the script that reads them (None: our own pretraining)."""

    argv: tuple[str, ...]
    script: Path | None
    cpu: bool
    patched: bool

    def prepare(self) -> None:
        """Make this process ready to import Megatron: path, patches, backend. Before any import of megatron."""
        if self.script is not None:
            sys.path.insert(0, str(self.script.resolve().parent))  # as `python SCRIPT` does; a clone's megatron wins
        if self.patched:
            from megatron_stability.megatron.patching import in_memory

            in_memory.install()
        if self.cpu:
            from megatron_stability.megatron import cpu

            cpu.install()

    def train(self, on_model: Callable[[Any], None] | None = None) -> None:
        """Run to the end of training in this process, which is one rank.

        Args:
            on_model: told of each chunk of our own script's model as it is built.
        """
        from megatron_stability.megatron.access import handle

        sys.argv = [str(self.script or "megatron-stability pretrain"), *self.argv]
        try:
            if self.script is not None:
                runpy.run_path(str(self.script), run_name="__main__")
            else:
                from megatron_stability.megatron.start import pretrain_gpt as gpt

                provider = gpt.model_provider
                gpt.main(provider if on_model is None else _told_of(provider, on_model))
        finally:
            handle.uninstall()


def _told_of(provider: Callable[..., Any], on_model: Callable[[Any], None]) -> Callable[..., Any]:
    def build(*args: Any, **kwargs: Any) -> Any:
        model = provider(*args, **kwargs)
        on_model(model)
        return model

    return build


def rank_main(job: Training, prepared: bool, program: str = "megatron-stability") -> None:
    """What a rank's process does; bad input ends it with one sentence and its exit code.

    Args:
        job: prepared here unless a template was.
        prepared: by the template that this process was forked from.
        program: begins the sentence.
    """
    try:
        if not prepared:
            job.prepare()
        job.train()
    except UsageError as error:
        print(f"{program}: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
