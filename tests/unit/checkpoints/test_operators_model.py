"""The model that operators' sequences are compared with, pinned by outcomes written by hand.

A story is a list of words. `3`: a save at step 3 with its update. `w3`: a save at 3 whose last steps were withheld.
`+`: an update. `from 3`, `from -`: a start from step 3, or from the beginning, came to its first step. `vain`: the
start withheld all its steps and halted. `edit 3`, `hurt 3`, `gone 3`: the tracker, or the checkpoint of step 3.
`keep 1` before a save: with retention.
"""

from __future__ import annotations

import pytest

from tests.dist.checkpoint.operators import Expected, Made


class Story:
    """Tells the model a story."""

    def __init__(self, words: str) -> None:
        self.told, self.keep, self.applied, self.began = Expected(), 0, 0, None
        for part in words.split(", ") if words else ():
            self._tell(part)

    began: Made | None

    def _tell(self, part: str) -> None:
        told, (word, _, number) = self.told, part.partition(" ")
        if word == "from":
            self.began = None if number == "-" else told.plain[int(number)]
            self.applied = 0 if self.began is None else self.began.applied
            told.goes_on(self.began)
        elif word == "+":
            assert told.stands is not None
            self.applied = told.stands.step + 1
            told.updated()
        elif word == "vain":
            told.in_vain(self.began)
        elif word == "edit":
            told.tracker, told.edited = int(number), int(number) != told.noted
        elif word == "hurt":
            told.plain[int(number)].damaged = True
        elif word == "gone":
            told.removed(told.plain[int(number)])
        elif word == "keep":
            self.keep = int(number)
        else:
            step, withheld = int(word.lstrip("w")), int(word[0] == "w")
            if not withheld:
                self.applied = step
                told.updated()
            told.saved(word, step, self.applied, withheld, self.keep)


# (story, --ckpt-step, step that a start loads, steps of the survivors)
OUTCOMES: list[tuple[str, int | None, int | None, list[int]]] = [
    ("", None, None, []),
    ("", 3, None, []),
    ("3", None, 3, [3]),
    ("3, 6", None, 6, [6, 3]),
    ("3, 6", 3, 3, [6, 3]),
    ("3, 6", 5, None, [6, 3]),
    ("3, 6, from 3", None, 3, [3]),
    ("3, 6, from 3", 6, 6, [3]),
    ("3, 6, from 3, 4", None, 4, [4, 3]),
    ("3, 6, from 3, 4, from 6", None, 6, [6, 3]),
    ("3, 6, from 3, 4, from 6, 9", None, 9, [9, 6, 3]),
    ("3, 6, from 3, 6", None, 6, [6, 3]),
    ("3, 6, 9, from 3, 6", None, 6, [6, 3]),
    ("3, 6, 9, from 3, 6", 9, 9, [6, 3]),
    ("3, 6, edit 3", None, 3, [6, 3]),
    ("3, 6, edit 3", 6, 6, [6, 3]),
    ("3, 6, edit 3, from 3, 4", None, 4, [4, 3]),
    ("3, 6, edit 5", None, 3, [6, 3]),
    ("3, 6, edit 6", None, 6, [6, 3]),
    ("3, 6, from 3, 4, edit 6", None, 6, [4, 3]),
    ("3, 6, hurt 6", None, 3, [3]),
    ("3, 6, hurt 6", 6, None, [3]),
    ("3, 6, gone 6", None, 3, [3]),
    ("3, 6, gone 3, 9", None, 9, [9, 6]),
    ("3, 6, from -", None, None, []),
    ("3, 6, from -, 2", None, 2, [2]),
    ("3, 6, from -, 2", 6, 6, [2]),
    ("keep 1, 3, 6, 9", None, 9, [9]),
    ("keep 2, 3, 6, 9", None, 9, [9, 6]),
    ("keep 1, 3, 6, from 6, w9", None, 9, [9, 6]),
    ("keep 1, 3, 6, 9, w12, w15", None, 15, [15, 12, 9]),
    ("keep 1, 3, 6, 9, w12, +, 15", None, 15, [15]),
    ("3, 6, w9", None, 9, [9, 6, 3]),
    ("3, 6, w9, from 9, vain", None, 6, [6, 3]),
    ("3, 6, w9, from 9, vain", 9, 9, [6, 3]),
    ("3, 6, from 6, vain", None, 3, [3]),
    ("3, 6, from 3, vain", None, 3, [3]),
    ("3, 6, from 6, vain, from 3, vain", None, 3, [3]),
    ("3, 6, from 6, vain, from 6, +", None, 6, [6, 3]),
]


@pytest.mark.parametrize(("story", "ckpt_step", "loads", "survivors"), OUTCOMES)
def test_what_must_be_next(story: str, ckpt_step: int | None, loads: int | None, survivors: list[int]) -> None:
    told = Story(story).told
    found = told.next(ckpt_step)
    assert (None if found is None else found.step) == loads
    assert [made.step for made in told.survivors()] == survivors
