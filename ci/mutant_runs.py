"""Draws mutants by seed, runs the fitting tests on each, and writes the kill rate of each room as a table.

`ci/mutants.toml` says which files are a room and which tests fit it. A run that was stopped goes on where it was: each
result is a line of the results file, and counts as long as neither the mutated file nor, where a mutant survived, the
room's tests have changed. Trees are never edited in place: each job has a copy of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import Any

from mutants import Mutant, mutants

ROOT = Path(__file__).resolve().parent.parent
LINKS = (".venv", ".nemo")  # environments: shared, not copied
OF_TIMEOUT = (124, 137)  # exit codes of `timeout`


@dataclass(frozen=True, kw_only=True)
class Room:
    """One row of `ci/mutants.toml`."""

    name: str
    sources: tuple[str, ...]  # globs of files
    tests: tuple[str, ...]  # what pytest is given

    def files(self, root: Path) -> list[str]:
        """The room's files, sorted."""
        found = {path.relative_to(root).as_posix() for source in self.sources for path in root.glob(source)}
        if not found:
            raise SystemExit(f"ci/mutants.toml, room {self.name}: no file is called {', '.join(self.sources)}")
        return sorted(found)

    def digest(self, root: Path) -> str:
        """Of the room's tests."""
        paths = [root / test.partition("::")[0] for test in self.tests]
        files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
        return _digest(*(file.read_bytes() for file in files))


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A mutant that is to be run."""

    room: Room
    file: str
    mutant: Mutant
    source: str  # digest of the file
    tests: str  # digest of the room's tests

    @property
    def key(self) -> str:
        """What it is known by in the results."""
        one = self.mutant
        return _digest(f"{self.room.name} {self.file} {self.source} {one.start} {one.stop} {one.after}".encode())


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).hexdigest()


def rooms(root: Path) -> tuple[dict[str, Room], list[dict[str, str]]]:
    """The table of rooms, and the mutants that are known to change nothing."""
    table = tomllib.loads((root / "ci/mutants.toml").read_text())
    found = {
        name: Room(name=name, sources=tuple(row["sources"]), tests=tuple(row["tests"]))
        for name, row in table["rooms"].items()
    }
    return found, table.get("equivalent", [])


def draw(root: Path, room: Room, seed: int, number: int) -> tuple[list[Drawn], int]:
    """`number` of the room's mutants, and how many there are."""
    tests = room.digest(root)
    every = []
    for file in room.files(root):
        text = (root / file).read_bytes()
        source = _digest(text)
        every += [Drawn(room=room, file=file, mutant=m, source=source, tests=tests) for m in mutants(text)]
    chosen = random.Random(f"{seed} {room.name}").sample(every, min(number, len(every)))
    return chosen, len(every)


class Results:
    """The lines so far; the last one of a key counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        lines = path.read_text().splitlines() if path.exists() else []
        self.known: dict[str, dict[str, Any]] = {line["key"]: line for line in map(json.loads, lines)}

    def of(self, drawn: Drawn) -> dict[str, Any] | None:
        """What is known of a mutant, unless its room's tests have changed since it survived."""
        line = self.known.get(drawn.key)
        return line if line and (line["outcome"] != "survived" or line["tests"] == drawn.tests) else None

    def add(self, drawn: Drawn, outcome: str, seconds: float) -> dict[str, Any]:
        """One more line."""
        line = {
            "key": drawn.key,
            "room": drawn.room.name,
            "file": drawn.file,
            "line": drawn.mutant.line,
            "scope": drawn.mutant.scope,
            "operator": drawn.mutant.operator,
            "before": drawn.mutant.before,
            "after": drawn.mutant.after,
            "tests": drawn.tests,
            "outcome": outcome,
            "seconds": round(seconds, 1),
        }
        with self._lock, self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            self.known[drawn.key] = line
        return line


class Copies:
    """Copies of the tree, one a job."""

    def __init__(self, root: Path, number: int, prefix: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mutants-")
        self._free: Queue[Path] = Queue()
        self._prefix = prefix
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            check=True,
        )
        names = [name for name in os.fsdecode(listed.stdout).split("\0") if name and name not in LINKS]
        for at in range(number):
            copy = Path(self._folder.name) / str(at)
            for name in names:
                if (root / name).is_file():
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(root / name, copy / name)
            for link in LINKS:
                if (root / link).exists():
                    (copy / link).symlink_to((root / link).resolve())
            self._free.put(copy)

    def close(self) -> None:
        """Remove them."""
        self._folder.cleanup()

    @contextmanager
    def one(self) -> Iterator[Path]:
        """A copy that nobody else uses meanwhile."""
        copy = self._free.get()
        try:
            yield copy
        finally:
            self._free.put(copy)

    def run(self, copy: Path, tests: Sequence[str], seconds: float) -> tuple[int, float, str]:
        """Exit code of the tests, how long they took, and the end of what they said."""
        env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONNOUSERSITE": "1"}
        command = [".venv/bin/python", "-m", "pytest", "-x", "-q", "-W", "ignore", *tests]
        began = time.monotonic()
        done = subprocess.run(
            [*self._prefix, "timeout", "-k", "5", f"{seconds:.0f}", *command],
            cwd=copy,
            env=env,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        return done.returncode, time.monotonic() - began, (done.stdout + done.stderr)[-2000:]

    def outcome(self, drawn: Drawn, seconds: float) -> tuple[str, float]:
        """killed, timed out or survived."""
        with self.one() as copy:
            path = copy / drawn.file
            original = path.read_bytes()
            try:
                _put(path, drawn.mutant.applied(original))
                code, took, _ = self.run(copy, drawn.room.tests, seconds)
            finally:
                _put(path, original)
        return ("survived" if code == 0 else "timed out" if code in OF_TIMEOUT else "killed"), took


def _put(path: Path, text: bytes) -> None:
    """Bytecode is taken for current by whole seconds and size, so it goes."""
    for cache in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cache.unlink()
    path.write_bytes(text)


def healthy(copies: Copies, room: Room) -> float:
    """Seconds that the room's tests take on the code as it is.

    Raises:
        SystemExit: they fail, or test other code than the copy's.
    """
    with copies.one() as copy:
        where = "import megatron_stability as m; print(m.__file__)"
        env = {**os.environ, "PYTHONPATH": str(copy)}
        file = subprocess.check_output([".venv/bin/python", "-c", where], cwd=copy, env=env, text=True).strip()
        if not Path(file).resolve().is_relative_to(copy.resolve()):
            raise SystemExit(f"the tests would import {file}, not the copy in {copy}")
        code, took, said = copies.run(copy, room.tests, 1200)
    if code:
        raise SystemExit(f"room {room.name}: its tests fail without any mutant (exit code {code})\n{said}")
    return took


def run_room(copies: Copies, jobs: int, chosen: list[Drawn], results: Results) -> None:
    """Run what is not known yet."""
    todo = [drawn for drawn in chosen if results.of(drawn) is None]
    if not todo:
        return
    took = healthy(copies, todo[0].room)
    print(f"{todo[0].room.name}: {len(todo)} mutants, {took:.0f} s without", flush=True)

    def attempt(drawn: Drawn) -> None:
        outcome, seconds = copies.outcome(drawn, 30 + 3 * took)
        line = results.add(drawn, outcome, seconds)
        print(f"  {outcome:9} {line['file']}:{line['line']} {drawn.mutant}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(attempt, todo))


def table(of: dict[str, tuple[list[Drawn], int]], results: Results, equivalent: list[dict[str, str]], head: str) -> str:
    """Markdown: one row a room, then what survived."""
    known = {tuple(row[field] for field in ("file", "scope", "before", "after")): row["proof"] for row in equivalent}
    rows, survivors, proofs = [], [], []
    for name, (chosen, every) in of.items():
        count = Counter[str]()
        for drawn in chosen:
            line = results.of(drawn)
            if line is None:
                continue
            proof = known.get((line["file"], line["scope"], line["before"], line["after"]))
            survived = line["outcome"] == "survived"
            count["equivalent" if survived and proof else line["outcome"]] += 1
            if survived:
                where = f"- `{line['file']}` {line['scope']}: {drawn.mutant}"
                (proofs if proof else survivors).append(where + (f". {proof}" if proof else ""))
        caught = count["killed"] + count["timed out"]
        judged = caught + count["survived"]
        rate = f"{100 * caught / judged:.0f} %" if judged else "–"
        figures = (every, sum(count.values()), caught, count["timed out"], count["equivalent"], count["survived"], rate)
        rows.append(f"| {name} | " + " | ".join(map(str, figures)) + " |")
    text = [head, "", "| Room | mutants | drawn | caught | of them by time | equivalent | survived | rate |"]
    text += ["|---|--:|--:|--:|--:|--:|--:|--:|", *rows, ""]
    for title, lines in (("Survived", survivors), ("Equivalent, and why", proofs)):
        text += [f"## {title}", "", *(lines or ["none"]), ""]
    return "\n".join(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every room at or above its rate; 1: one below."""
    parser = argparse.ArgumentParser(prog="ci/mutants.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--rooms", help="names with commas between them; default: all of ci/mutants.toml")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-room", type=int, default=40)
    parser.add_argument("--total", type=int, help="so many over all rooms together, in place of --per-room")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--results", type=Path, default=ROOT / ".mutants.jsonl")
    parser.add_argument("--table", type=Path, help="write the table there as well")
    parser.add_argument("--prefix", default="", help="a command put before each run, such as 'nice'")
    given = parser.parse_args(arguments)
    every, equivalent = rooms(ROOT)
    names = given.rooms.split(",") if given.rooms else list(every)
    if unknown := [name for name in names if name not in every]:
        parser.error(f"no such room: {', '.join(unknown)}; there are {', '.join(every)}")
    of = {name: draw(ROOT, every[name], given.seed, given.per_room) for name in names}
    if given.total is not None:
        pairs = [(name, drawn) for name, (chosen, _) in of.items() for drawn in chosen]
        kept = random.Random(given.seed).sample(pairs, min(given.total, len(pairs)))
        of = {name: ([drawn for room, drawn in kept if room == name], count) for name, (_, count) in of.items()}
    given.results.parent.mkdir(parents=True, exist_ok=True)
    results = Results(given.results)
    copies = Copies(ROOT, given.jobs, shlex.split(given.prefix))
    try:
        for chosen, _ in of.values():
            run_room(copies, given.jobs, chosen, results)
    finally:
        copies.close()
    text = table(of, results, equivalent, f"# Mutants\n\n`bash ci/mutants.sh {shlex.join(arguments or sys.argv[1:])}`")
    print(text)
    if given.table:
        given.table.write_text(text)
    return int("## Survived\n\nnone" not in text)


if __name__ == "__main__":
    sys.exit(main())
