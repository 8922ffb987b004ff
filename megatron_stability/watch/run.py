"""What is known of one run, from its files alone; `look` brings it up to date."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from megatron_stability.checkpoints import generations, manifest
from megatron_stability.ledger.entries import (
    AnyEntry,
    EndEntry,
    EpisodeEntry,
    RunEntry,
    SaveEntry,
    StepEntry,
    UndoEntry,
)
from megatron_stability.records import PASSED_OVER, Change
from megatron_stability.watch.follow import Follower
from megatron_stability.watch.heartbeat import Beat, beats

RECENT = 2000  # lines kept, of which incidents are made
CLOCKS = 60.0  # seconds by which clocks of nodes may differ
TIMED = 64  # steps of which a median is taken


@dataclass(frozen=True, slots=True)
class Space:
    """Of the file system that holds the run: free bytes, and percent of bytes and of inodes that are free."""

    free: int
    percent: float


class WatchedRun:
    """One run's files.

    Ages are by the watcher's own clock, from when it saw a change; at its first look by the time that is written there.

    Args:
        name: as the user gave it.
        folder: of the ledger.
        checkpoints: the `--save` folder; None: the ledger's parent.

    Attributes:
        steps: the last that are known, of the surviving trajectory.
        recent: the last lines.
        open: episodes that are open, by detector.
        process: the last `run` line.
        end: why its process left, if it said so.
        saves: steps of checkpoints that were begun, the latest last.
        beats: by node, of the present process; those of an earlier one are left out.
        space: None: unknown.
        problem: why the last look failed; empty: it did not.
    """

    def __init__(self, name: str, folder: Path, checkpoints: Path | None = None) -> None:
        self.name, self.folder = name, folder
        self.checkpoints = checkpoints or folder.parent
        self._follower = Follower(folder)
        self._looked = False
        self._line_seen: float | None = None  # monotonic
        self._beat_seen: dict[str, tuple[Beat, float]] = {}
        self.steps: deque[StepEntry] = deque(maxlen=TIMED + 1)
        self.recent: deque[AnyEntry] = deque(maxlen=RECENT)
        self.open: dict[str, EpisodeEntry] = {}
        self.process: RunEntry | None = None
        self.end: EndEntry | None = None
        self.saves: deque[SaveEntry] = deque(maxlen=TIMED)
        self.beats: Mapping[str, Beat] = {}
        self.space: Space | None = None
        self.problem = ""
        self.tokens = 0.0  # of the steps that were seen

    def look(self) -> None:
        """Read what is new. An unreadable file is a `problem`, and what was known stands."""
        self.problem = ""
        try:
            for entry in self._follower.new():
                self._take(entry)
            self._looked = True
            self._see_beats()
            found = os.statvfs(self.folder)
            share = [found.f_bavail / found.f_blocks] if found.f_blocks else []
            share += [found.f_favail / found.f_files] if found.f_files else []
            self.space = Space(found.f_bavail * found.f_frsize, 100 * min(share, default=1.0))
        except OSError as error:
            self.problem = f"{error.filename or self.folder} can't be read ({error.strerror})"

    @property
    def damaged(self) -> int:
        """Lines of the ledger with a wrong checksum."""
        return self._follower.damaged

    @property
    def step(self) -> int:
        """The last that ended; where none is known, the one that the process began after."""
        if self.steps:
            return self.steps[-1].step
        return self.process.resumed_step if self.process else 0

    @property
    def line_age(self) -> float:
        """Seconds since the ledger grew."""
        return 0.0 if self._line_seen is None else max(0.0, time.monotonic() - self._line_seen)

    def beat_age(self, node: str) -> float:
        """Seconds since a node's file changed."""
        return max(0.0, time.monotonic() - self._beat_seen[node][1])

    @property
    def over(self) -> bool:
        """The process left, by what the ledger or every node says, or one that failed."""
        states = {beat.state for beat in self.beats.values()}
        return self.end is not None or "failed" in states or states == {"ended"}

    @property
    def step_seconds(self) -> list[float]:
        """What the last steps of this process took; those around a save, too."""
        generation = self.process.generation if self.process else 0
        steps = [each for each in self.steps if each.generation == generation and each.time]
        return [later.time - earlier.time for earlier, later in pairwise(steps) if later.time >= earlier.time]

    @property
    def tokens_per_second(self) -> float | None:
        """Over the last steps; None where their times are not known."""
        seconds = self.step_seconds
        if not seconds or not median(seconds):
            return None
        return self.steps[-1].tokens / median(seconds)

    @property
    def seconds_left(self) -> float | None:
        """Until `--train-iters`, at the median step; None where either is not known."""
        seconds = self.step_seconds
        last = self.process.settings.get("train_iters") if self.process else None
        if not isinstance(last, int | float) or not seconds:
            return None
        return max(0.0, (last - self.step) * median(seconds))

    @property
    def saving(self) -> SaveEntry | None:
        """The newest checkpoint that was begun and is not complete."""
        save = self.saves[-1] if self.saves else None
        return None if save is None or self._is_complete(save.step) else save

    @property
    def save_steps(self) -> int | None:
        """Steps between checkpoints, as they came; None before the third."""
        gaps = [later.step - earlier.step for earlier, later in pairwise(self.saves) if later.step > earlier.step]
        return round(median(gaps)) if len(gaps) >= 2 else None

    def _is_complete(self, step: int) -> bool:
        """By its marker; by Megatron's tracker where there is no manifest."""
        folder = generations.folder_of(self.checkpoints, step)
        if (folder / manifest.MARKER).exists():
            return True
        if (folder / manifest.MANIFEST).exists():
            return False
        try:
            return int((self.checkpoints / generations.TRACKER).read_text()) >= step
        except (OSError, ValueError):
            return False

    def _take(self, entry: AnyEntry) -> None:
        self._line_seen = time.monotonic() if self._looked else self._since(entry.time)
        self.recent.append(entry)
        if isinstance(entry, RunEntry):
            self.process, self.end = entry, None
            self._drop(entry.resumed_step)
        elif isinstance(entry, UndoEntry):
            self._drop(entry.from_step)
            self.open = {name: each for name, each in self.open.items() if each.first_step <= entry.from_step}
        elif isinstance(entry, StepEntry):
            self.tokens += entry.tokens if PASSED_OVER not in entry.parameters else 0.0
            self.steps.append(entry)
        elif isinstance(entry, SaveEntry):
            self.saves.append(entry)
        elif isinstance(entry, EndEntry):
            self.end = entry
        elif isinstance(entry, EpisodeEntry):
            self.open[entry.detector] = entry
            if entry.change is Change.CLOSED:
                self.open.pop(entry.detector)

    def _drop(self, step: int) -> None:
        while self.steps and self.steps[-1].step > step:
            self.steps.pop()
        while self.saves and self.saves[-1].step > step:
            self.saves.pop()

    def _see_beats(self) -> None:
        begun = self.process.time - CLOCKS if self.process else 0.0
        self.beats = {node: beat for node, beat in beats(self.folder).items() if beat.time >= begun}
        for node, beat in self.beats.items():
            before = self._beat_seen.get(node)
            if before is None:
                self._beat_seen[node] = beat, self._since(beat.time)
            elif before[0] != beat:
                self._beat_seen[node] = beat, time.monotonic()

    @staticmethod
    def _since(written: float) -> float:
        """A time that is written there, on the watcher's monotonic clock; what is in its future is now."""
        return time.monotonic() - max(0.0, time.time() - written) if written else time.monotonic()
