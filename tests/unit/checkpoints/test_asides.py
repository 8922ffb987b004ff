"""A complete checkpoint whose step is saved again: at every moment one of the two is complete and found."""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron_stability.checkpoints import asides, generations, manifest
from tests.unit.checkpoints.checkpoint_maker import complete, save


def states(root: Path) -> dict[str, str]:
    return {each.folder.name: each.state for each in generations.generations(root, full=True)}


def test_set_aside_it_is_complete_until_the_new_one_is(tmp_path: Path) -> None:
    folder = complete(tmp_path, 8)
    assert asides.set_aside(folder) == tmp_path / "iter_0000008.aside"
    assert states(tmp_path) == {"iter_0000008.aside": "complete"}
    save(tmp_path, 8)
    assert states(tmp_path) == {"iter_0000008": "incomplete", "iter_0000008.aside": "complete"}
    good = generations.newest_good(tmp_path)
    assert good is not None
    assert good.folder.name == "iter_0000008.aside"
    shutil.rmtree(folder)
    complete(tmp_path, 8)
    assert states(tmp_path) == {"iter_0000008": "complete", "iter_0000008.aside": "suspect"}


def test_it_is_put_back_where_the_new_one_is_not_whole(tmp_path: Path) -> None:
    marker = complete(tmp_path, 8) / manifest.MARKER
    before = marker.read_bytes()
    for remains in ("nothing", "files", "evidence", "damage"):
        asides.set_aside(tmp_path / "iter_0000008")
        if remains == "files":
            save(tmp_path, 8)
        elif remains == "evidence":
            generations.mark_suspect(complete(tmp_path, 8), "NaN")
        elif remains == "damage":
            (complete(tmp_path, 8) / "common.pt").write_bytes(b"x")
        assert asides.put_back(tmp_path) == [tmp_path / "iter_0000008"]
        assert marker.read_bytes() == before
        assert states(tmp_path)["iter_0000008"] == "complete"
    assert set(states(tmp_path)) == {"iter_0000008", "iter_0000008.suspect-1", "iter_0000008.suspect-2"}
    assert not list(tmp_path.glob(".*"))


def test_it_is_kept_where_the_new_one_is_whole(tmp_path: Path) -> None:
    asides.set_aside(complete(tmp_path, 8))
    complete(tmp_path, 8)
    assert asides.put_back(tmp_path) == []
    assert states(tmp_path) == {"iter_0000008.suspect-1": "suspect", "iter_0000008": "complete"}


def test_two_deaths_in_the_same_save_lose_nothing(tmp_path: Path) -> None:
    folder = complete(tmp_path, 8)
    asides.set_aside(folder)
    save(tmp_path, 8)
    assert asides.set_aside(folder) is None
    good = generations.newest_good(tmp_path)
    assert good is not None
    assert good.step == 8
