"""What a rank looks at in a folder of many ranks' files: its own, whatever the number of the others."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_stability.checkpoints import manifest, parts
from megatron_stability.megatron.checkpoint import shares

CALLS = ("stat", "lstat", "open", "scandir", "listdir")


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Calls to the file system, by name."""
    calls: Counter[str] = Counter()

    def counting(name: str, call: Any) -> Any:
        def counted_call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return call(*args, **kwargs)

        return counted_call

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, counting(name, getattr(os, name)))
        yield calls


def _folder(root: Path, world: int, files_a_rank: int = 2) -> Path:
    """As Megatron's writers leave it, `common.pt` and the metadata with it, and a rank's fingerprints."""
    folder = root / f"of-{world}" / "iter_0000010"
    folder.mkdir(parents=True)
    for rank in range(world):
        for number in range(files_a_rank):
            (folder / f"__{rank}_{number}.distcp").write_bytes(b"%d" % rank)
        (folder / manifest.fingerprints_name(rank)).write_bytes(b"{}")
    for name in (".metadata", "common.pt", "metadata.json"):
        (folder / name).write_bytes(b"x")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("worlds")
    return {world: _folder(root, world) for world in (8, 2048)}


def test_a_rank_finds_its_files_and_looks_at_as_many_names_in_a_large_world(
    folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}
    for world, folder in folders.items():
        with counted(monkeypatch) as calls:
            names = parts.own_names(folder, 7)
            manifest.hash_files(folder, names, threads=1)
        assert names == ["__7_0.distcp", "__7_1.distcp", "__7_stability.json"]
        seen[world] = dict(calls)
    assert seen[8] == seen[2048]
    assert sum(seen[8].values()) <= 12
    assert not seen[8].get("scandir")


def test_what_ranks_find_and_what_is_left_over_is_every_file_once(folders: dict[int, Path]) -> None:
    folder = folders[8]
    (folder / "ema__3_0.distcp").write_bytes(b"e")
    (folder / "__3_7.distcp").write_bytes(b"behind a gap")
    claimed = [name for rank in range(8) for name in parts.own_names(folder, rank)]
    rest = parts.left_over(folder, claimed)
    assert rest == [".metadata", "__3_7.distcp", "common.pt", "ema__3_0.distcp", "metadata.json"]
    assert sorted(claimed + rest) == manifest.file_names(folder)
    assert len(set(claimed)) == len(claimed)


def test_a_part_is_verified_without_a_look_at_the_others(
    folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}
    for world, folder in folders.items():
        entries = manifest.hash_files(folder, manifest.file_names(folder))
        mine = parts.parts(entries, world)[5]
        with counted(monkeypatch) as calls:
            assert manifest.verify_files(folder, mine, threads=1) == []
        seen[world] = dict(calls)
    assert seen[8] == seen[2048]
    assert sum(seen[8].values()) <= 12


def test_parts_are_the_shares_of_all_ranks(folders: dict[int, Path]) -> None:
    names = [*manifest.file_names(folders[8]), "mp_rank_00/model_optim_rng.pt"]
    entries = dict.fromkeys(names, manifest.FileEntry(size=1, xxh3_128="0" * 32))
    for world in (1, 3, 8):
        found = parts.parts(entries, world)
        assert [sorted(part) for part in found] == [parts.share(names, rank, world) for rank in range(world)]


@pytest.mark.parametrize("damage", ["missing", "size", "checksum"])
def test_a_damaged_file_of_a_part_is_named(tmp_path: Path, damage: str) -> None:
    folder = _folder(tmp_path, 2)
    entries = manifest.hash_files(folder, parts.own_names(folder, 1))
    path = folder / "__1_0.distcp"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"1" * 9 if damage == "size" else b"2")
    assert [(each.kind, each.file) for each in manifest.verify_files(folder, entries)] == [(damage, path.name)]


def test_rank_0_looks_for_one_share_at_a_time_and_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, now, pauses = 64, [0.0], []
    for rank in range(world):
        shares.path(tmp_path, rank).write_text(json.dumps({"rank": rank}))
    late = shares.path(tmp_path, 40)
    late.rename(tmp_path / "late")

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds
        if now[0] > 30:
            (tmp_path / "late").rename(late)

    monkeypatch.setattr(shares.time, "sleep", sleep)
    monkeypatch.setattr(shares.time, "monotonic", lambda: now[0])
    with counted(monkeypatch) as calls:
        told = shares.gather(tmp_path, world)
    assert [each["rank"] for each in told] == list(range(world))
    assert pauses[:3] == [0.02, 0.04, 0.08]
    assert max(pauses) == shares.LAST_LOOK_S
    assert calls["stat"] <= world + len(pauses) + 1
    assert len(pauses) < 40
    assert list(tmp_path.iterdir()) == []


def test_a_share_that_never_comes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(shares.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(shares.time, "monotonic", lambda: now[0])
    with pytest.raises(shares.UsageError, match=r"\.stability-share-0\.json did not come in 1800 s"):
        shares.gather(tmp_path, 2)
