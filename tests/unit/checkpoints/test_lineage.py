"""Which checkpoint comes next: outcomes written by hand. Saves are named `step@counter`, legacy ones by their step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_stability.checkpoints import generations, history
from megatron_stability.checkpoints.lineage import Branch, History, Lineage, Place, Save
from megatron_stability.errors import UsageError
from tests.unit.checkpoints.checkpoint_maker import complete


def place(name: str | int) -> Place:
    step, _, counter = str(name).partition("@")
    return Place(int(counter or 0), int(step))


def save(name: str | int, parent: str | int | None = None, **more: Any) -> Save:
    """Applied up to its own step, unless it says otherwise."""
    at = place(name)
    return Save(place=at, parent=None if parent is None else place(parent), **({"applied": at.step} | more))


def branch(counter: int, to: str | int | None, why: str = "somebody") -> Branch:
    return Branch(counter=counter, to=None if to is None else place(to), why=why)


def lineage(saves: Sequence[Save], *branches: Branch, **more: Any) -> Lineage:
    for key in ("proven", "failed"):
        more[key] = tuple(place(name) for name in more.get(key, ()))
    return Lineage(saves, History(branches=branches, **more))


THREE_SIX = (save("3@1"), save("6@2", "3@1"))
ROLLED_BACK = (*THREE_SIX, save("4@4", "3@1"))  # branch 3 went to 3@1
BACK = branch(3, "3@1", "a start from step 3 (--ckpt-step 3)")
LEGACY = (save(3), save(6))
STREAK = (save("5@1"), save("10@2", "5@1"), save("15@3", "10@2", applied=10, withheld=5))

# (what it is about, saves, branches, history, question, steps to try in order)
OUTCOMES: list[tuple[str, Sequence[Save], Sequence[Branch], dict[str, Any], dict[str, Any], list[int]]] = [
    ("nothing there", (), (), {}, {}, []),
    ("the newest of one line", THREE_SIX, (), {}, {}, [6, 3]),
    ("legacy, by step", LEGACY, (), {}, {}, [6, 3]),
    ("legacy, asked for", LEGACY, (), {}, {"ckpt_step": 3}, [3]),
    ("legacy, and a tracker that lags: as ever", LEGACY, (), {}, {"tracker": 3}, [6, 3]),
    ("asked for", THREE_SIX, (), {}, {"ckpt_step": 3}, [3]),
    ("asked for and not there", THREE_SIX, (), {}, {"ckpt_step": 5}, []),
    ("rolled back, no save yet", THREE_SIX, (BACK,), {}, {}, [3]),
    ("rolled back and saved: step 4 is newer than step 6", ROLLED_BACK, (BACK,), {}, {}, [4, 3]),
    ("the same, its history lost: parents say it", ROLLED_BACK, (), {}, {}, [4, 3]),
    ("taken back by --ckpt-step 6", ROLLED_BACK, (BACK,), {}, {"ckpt_step": 6}, [6]),
    ("taken back, after its first step", ROLLED_BACK, (BACK, branch(5, "6@2")), {}, {}, [6, 3]),
    (
        "taken back and saved",
        (*ROLLED_BACK, save("9@6", "6@2")),
        (BACK, branch(5, "6@2")),
        {},
        {},
        [9, 6, 3],
    ),
    ("a tracker edited to step 3", THREE_SIX, (), {"tracker": 6}, {"tracker": 3}, [3]),
    ("a tracker that lags: death before it moved", THREE_SIX, (), {"tracker": 3}, {"tracker": 3}, [6, 3]),
    ("a tracker ahead of what was noted", THREE_SIX, (), {"tracker": 3}, {"tracker": 6}, [6, 3]),
    ("a tracker edited to what was left behind", ROLLED_BACK, (BACK,), {"tracker": 4}, {"tracker": 6}, [6, 3]),
    ("a tracker edited to an unsound one", (save("3@1"), save("6@2", "3@1", sound=False), save("9@3", "6@2")), (),
     {"tracker": 9}, {"tracker": 6}, [3]),
    ("a tracker edited to a step without a manifest", (*THREE_SIX, save("9@3", "6@2")), (),
     {"tracker": 9}, {"tracker": 8}, [6, 3]),
    ("a tracker edited to a step beyond all", THREE_SIX, (), {"tracker": 6}, {"tracker": 99}, [6, 3]),
    ("a tracker that is gone", THREE_SIX, (), {"tracker": 6}, {}, [6, 3]),
    ("--ckpt-step wins over an edited tracker", THREE_SIX, (), {"tracker": 6}, {"tracker": 3, "ckpt_step": 6}, [6]),
    ("the newest is unsound", (save("3@1"), save("6@2", "3@1", sound=False)), (), {}, {}, [3]),
    ("unsound and asked for", (save("3@1"), save("6@2", "3@1", sound=False)), (), {}, {"ckpt_step": 6}, []),
    ("one in the middle was deleted", (save("3@1"), save("9@3", "6@2")), (), {}, {}, [9, 3]),
    ("the branch's own save was deleted: step 6 stays behind", THREE_SIX, (BACK,), {"counter": 4}, {}, [3]),
    ("where the branch went was deleted", (save("1@1"), save("6@3", "3@2")), (branch(4, "3@2"),), {}, {}, [1]),
    ("the newest was deleted", (save("3@1"),), (), {"counter": 2, "tracker": 6}, {"tracker": 6}, [3]),
    ("from the beginning, nothing saved yet", THREE_SIX, (branch(3, None),), {"tracker": None}, {}, []),
    ("from the beginning, saved", (*THREE_SIX, save("2@4")), (branch(3, None),), {}, {}, [2]),
    ("from the beginning, and taken back", (*THREE_SIX, save("2@4")), (branch(3, None),), {}, {"ckpt_step": 6}, [6]),
    ("from the beginning, and a tracker written by hand", THREE_SIX, (branch(3, None),), {"tracker": None},
     {"tracker": 6}, [6, 3]),
    ("legacy, then counted", (*LEGACY, save("9@1", 6)), (), {}, {}, [9, 6, 3]),
    ("legacy, rolled back, counted", (*LEGACY, save("4@2", 3)), (branch(1, 3),), {}, {}, [4, 3]),
    ("legacy, rolled back, nothing saved", LEGACY, (branch(1, 3),), {}, {}, [3]),
    ("legacy, and the first counted one was deleted", (*LEGACY, save("12@2", "9@1")), (), {}, {}, [12, 6, 3]),
    ("step 6 saved again on another line", (save("3@1"), save("6@2", "3@1", here=False), save("6@4", "3@1")),
     (BACK,), {}, {}, [6, 3]),
    ("asked for where two have the step", (save("3@1"), save("6@2", "3@1", here=False), save("6@4", "3@1")),
     (BACK,), {}, {"ckpt_step": 6}, [6]),
    ("unproven is tried first", STREAK, (), {}, {}, [15, 10, 5]),
    ("a start from 10 was in vain, and what it saved with it", STREAK, (), {"failed": ("10@2", "15@3")}, {}, [5]),
    ("in vain, and asked for all the same", STREAK, (), {"failed": ("10@2", "15@3")}, {"ckpt_step": 10}, [10]),
    ("in vain, and the tracker edited to it", STREAK, (), {"failed": ("10@2", "15@3"), "tracker": 5},
     {"tracker": 10}, [10, 5]),
    ("a rewind to 3, restarted", ROLLED_BACK[:2], (branch(3, "3@1", "a rewind from step 8 to step 3"),),
     {"tracker": 3}, {"tracker": 3}, [3]),
    ("rewound twice", (save("2@1"), save("4@2", "2@1"), save("6@4", "4@2")), (branch(3, "4@2"), branch(5, "2@1")),
     {}, {}, [2]),
    ("a parent that is not before it is none", (save("3@1"), save("6@2", "9@7")), (), {}, {}, [6]),
]  # fmt: skip


@pytest.mark.parametrize(("saves", "branches", "known", "asked", "steps"), [row[1:] for row in OUTCOMES],
                         ids=[row[0] for row in OUTCOMES])  # fmt: skip
def test_which_comes_next(
    saves: Sequence[Save], branches: Sequence[Branch], known: dict[str, Any], asked: dict[str, Any], steps: list[int]
) -> None:
    found = lineage(saves, *branches, **known)
    assert [each.step for each in found.choose(**asked).places] == steps
    backwards = lineage(saves[::-1], *branches, **known)
    assert backwards.choose(**asked) == found.choose(**asked)


def test_the_choice_says_why_it_is_not_the_newest() -> None:
    found = lineage(THREE_SIX, tracker=6)
    assert found.choose().why == ""
    assert found.choose(tracker=6).why == ""
    assert found.choose(tracker=3).why == "a tracker that was set to step 3 by hand"
    assert found.choose(ckpt_step=3).why == "--ckpt-step 3"
    assert lineage(ROLLED_BACK, BACK).objection(place("6@2")) == f"left behind by {BACK.why}"
    assert lineage(ROLLED_BACK).objection(place("6@2")) == "not on the surviving trajectory"
    assert lineage(ROLLED_BACK, BACK).objection(place("4@4")) is None


@pytest.mark.parametrize(
    ("saves", "known", "keep", "gone"),
    [
        (THREE_SIX, {}, 1, [3]),
        (THREE_SIX, {}, 2, []),
        ((*ROLLED_BACK, save("5@5", "4@4")), {}, 1, [4, 3]),  # what was left behind is evidence
        (STREAK, {}, 1, []),  # 15 is unproven, and so is 10, after which no update came: 5 is the one that is kept
        ((save(2), save("5@1", 2), *STREAK[1:]), {}, 1, [2]),
        (STREAK, {"proven": ("10@2",)}, 1, [5]),
        (STREAK, {"proven": ("15@3", "10@2")}, 1, [10, 5]),
        ((*STREAK, save("20@4", "15@3")), {}, 1, [15, 10, 5]),
        ((*STREAK, save("20@4", "15@3", applied=10, withheld=10)), {}, 1, []),
        ((save("3@1", applied=0, withheld=3),), {}, 1, []),
    ],
)
def test_retention_keeps_the_newest_of_the_trajectory_and_does_not_count_the_unproven(
    saves: Sequence[Save], known: dict[str, Any], keep: int, gone: list[int]
) -> None:
    assert [each.step for each in lineage(saves, **known).retired(keep)] == gone


@pytest.mark.parametrize(
    ("saves", "known", "start", "condemned"),
    [
        (STREAK, {}, "10@2", [10, 15]),  # no update ever came after 10
        (STREAK, {}, "15@3", [15]),
        (STREAK, {}, "5@1", [15, 10]),  # 5 is proven by 10
        (STREAK, {}, None, [15, 10]),
        (STREAK, {"proven": ("15@3",)}, "15@3", []),
        (THREE_SIX, {}, "6@2", [6]),
        (THREE_SIX, {}, "3@1", []),
        (LEGACY, {}, 6, [6]),
        (LEGACY, {}, 3, []),
    ],
)
def test_what_a_start_in_vain_speaks_against(
    saves: Sequence[Save], known: dict[str, Any], start: str | int | None, condemned: list[int]
) -> None:
    found = lineage(saves, **known).condemned(None if start is None else place(start))
    assert [each.step for each in found] == condemned


def test_an_update_takes_a_condemnation_back_from_all_that_lead_to_it() -> None:
    found = lineage(STREAK, failed=("10@2", "15@3"), proven=("15@3",))
    assert [each.step for each in found.candidates] == [15, 10, 5]
    found = lineage(STREAK, failed=("10@2", "15@3"), proven=("10@2",))
    assert [each.step for each in found.candidates] == [10, 5]


# --- on disk ----------------------------------------------------------------------------------------------------------


def test_a_damaged_history_is_named_and_nothing_is_chosen(tmp_path: Path) -> None:
    complete(tmp_path, 5)
    for text in ("", "[]", '{"branches": [{"counter": 1, "to": [1, 5], "why": "x"}]}', '{"schema_version": 99}'):
        (tmp_path / history.FILE).write_text(text)
        with pytest.raises(UsageError, match=history.FILE):
            generations.candidates(tmp_path)
    (tmp_path / history.FILE).unlink()
    assert [each.step for each in generations.candidates(tmp_path)] == [5]


def test_one_folder_is_judged_in_the_light_of_those_beside_it(tmp_path: Path) -> None:
    for step in (3, 6):
        complete(tmp_path, step)
    known = History(branches=(branch(1, 3, "a start from step 3"),), counter=1, tracker=3)
    history.write(tmp_path, known)
    assert history.read(tmp_path) == known
    found = generations.generation(tmp_path / "iter_0000006")
    assert str(found) == "iter_0000006 is suspect: left behind by a start from step 3"
    good = generations.newest_good(tmp_path)
    assert good is not None
    assert good.step == 3
    assert generations.retire(tmp_path, keep=1) == []


def test_a_repaired_tracker_is_ours(tmp_path: Path) -> None:
    for step in (3, 6):
        complete(tmp_path, step)
    history.write(tmp_path, History(tracker=6))
    generations.write_tracker(tmp_path, 3)  # by hand
    assert generations.Survey(tmp_path).lineage.edited(3)
    assert generations.repair_tracker(tmp_path) == ("3", 6)
    assert not generations.Survey(tmp_path).lineage.edited(6)
    history.write(tmp_path, History(tracker=3))
    generations.repair_tracker(tmp_path)
    assert history.read(tmp_path).tracker == 6
