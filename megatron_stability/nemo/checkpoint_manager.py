"""Bridge's checkpoints, proven: its own manager, with our state beside what it writes, a manifest after it, and no load
without one.

    iter_0000100/                 Bridge's files
      stability_state/            ours, a small checkpoint of its own: stock Bridge does not look at it
      stability_manifest.json     as under Megatron
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megatron.bridge.training.checkpointing import (
    CheckpointLoadContext,
    CheckpointSaveContext,
    DefaultCheckpointManager,
)
from megatron.bridge.training.config import CheckpointConfig
from megatron.bridge.training.utils.checkpoint_utils import checkpoint_exists
from megatron.core import dist_checkpointing
from megatron.core.utils import unwrap_model
from megatron.training import print_rank_0

from megatron_stability.checkpoints import generations
from megatron_stability.megatron import seams
from megatron_stability.megatron.access import collectives, handle
from megatron_stability.megatron.runtime import Runtime
from megatron_stability.nemo.bridge_args import BridgeArgs
from megatron_stability.nemo.loop import BridgeHost

OWN = "stability_state"


class _Save:
    """A save under way and what is to be done once it is written, in the form of Megatron's asynchronous requests."""

    def __init__(self) -> None:
        self.finalize_fns: list[Callable[[], None]] = []

    def add_finalize_fn(self, function: Callable[[], None]) -> None:
        self.finalize_fns.append(function)

    def written(self) -> None:
        for function in self.finalize_fns:
            function()


class StabilityCheckpointManager(DefaultCheckpointManager):
    """`checkpoint.custom_manager_class`; finds the installed runtime."""

    def __init__(self, checkpoint_config: CheckpointConfig) -> None:
        """Bridge gives its section of the container."""
        super().__init__(checkpoint_config)
        runtime = handle.installed()
        assert isinstance(runtime, Runtime), "attach() installs runtime and manager"
        assert isinstance(runtime.host, BridgeHost)
        self._runtime: Runtime = runtime
        self._args: BridgeArgs = runtime.host.args
        self._under_way: deque[_Save] = deque()
        self.loaded = False
        runtime.host.manager = self
        if checkpoint_config.load is not None:
            collectives.from_rank_0(partial(_show, Path(checkpoint_config.load)))

    def save(self, ctx: CheckpointSaveContext, callback_manager: Any) -> None:
        """Bridge's files, ours beside them, and the manifest once all are written. Collective."""
        self._args.state = ctx.state
        step = int(ctx.state.train_state.step)
        folder = generations.folder_of(Path(str(self.checkpoint_config.save)), step)
        own: dict[str, Any] = {"iteration": step}
        seams.save_begins(str(folder.parent), step)
        seams.add_checkpoint_state(own)  # as it is now

        def bridges() -> bool:
            super(StabilityCheckpointManager, self).save(ctx, callback_manager)
            return True

        def ours() -> None:
            collectives.from_rank_0(partial((folder / OWN).mkdir, parents=True, exist_ok=True))
            dist_checkpointing.save({name: own[name] for name in own if name != "iteration"}, str(folder / OWN))

        if seams.checkpoint_write(bridges)():  # else the disk is full, and what is there goes away
            seams.checkpoint_write(ours)()
        request = _Save() if self.checkpoint_config.async_save else None
        seams.checkpoint_saved(str(folder.parent), step, request)
        if request is not None:
            self._under_way.append(request)

    def written(self) -> None:
        """Bridge says that all bytes of its oldest save under way are on disk. Every rank."""
        if self._under_way:
            self._under_way.popleft().written()

    def load(self, ctx: CheckpointLoadContext) -> tuple[int, int]:
        """A verified checkpoint, or none. Collective."""
        self._args.state = ctx.state
        self.loaded = True
        folder = self.checkpoint_config.load
        if not checkpoint_exists(folder):
            print_rank_0("> megatron-stability: checkpoint.pretrained_checkpoint is loaded without being verified")
            return self._load(ctx)
        seams.load_begins(folder, ctx.optimizer)
        found = self._load(ctx)
        own = generations.folder_of(Path(str(folder)), found[0]) / OWN
        state: dict[str, Any] = {}
        seams.add_checkpoint_state(state)
        wanted = {name: value for name, value in state.items() if not isinstance(value, str)}
        read = dist_checkpointing.load if wanted else lambda _, path: dist_checkpointing.load_common_state_dict(path)
        seams.load_checkpoint_state(read(wanted, str(own)) if _is_there(own) else {})
        return found

    def _load(self, ctx: CheckpointLoadContext) -> tuple[int, int]:
        try:
            with _strictly(unwrap_model(ctx.model)):
                return super().load(ctx)
        except SystemExit as ending:  # `sys.exit()` of Bridge's own means code 0: a scheduler takes it for the end
            if not ending.code:
                raise SystemExit(seams.failed_load_code()) from ending
            raise


def _show(root: Path) -> None:
    """Rank 0: show Bridge a complete checkpoint whose trackers are lost, for it would train afresh."""
    found = [] if checkpoint_exists(str(root)) else generations.candidates(root)
    if found:
        generations.write_tracker(root, found[0].step)


def _is_there(folder: Path) -> bool:
    return bool(collectives.from_rank_0(folder.is_dir))


@contextlib.contextmanager
def _strictly(chunks: list[Any]) -> Iterator[None]:
    """Bridge repeats a failed strict load with strict=False and a log line; here that is for `_extra_state` only."""
    for chunk in chunks:
        chunk.load_state_dict = partial(_load_state_dict, chunk.load_state_dict, [])
    try:
        yield
    finally:
        for chunk in chunks:
            del chunk.load_state_dict


def _load_state_dict(load: Callable[..., Any], failed: list[Exception], state: Any, strict: bool = True) -> Any:
    if strict:
        try:
            return load(state, strict=True)
        except Exception as error:
            failed.append(error)
            raise
    found = load(state, strict=False)
    missing = [name for name in (*found.missing_keys, *found.unexpected_keys) if not name.endswith("_extra_state")]
    if failed and missing:
        seams.strict_load_failed(failed[-1])
    return found
