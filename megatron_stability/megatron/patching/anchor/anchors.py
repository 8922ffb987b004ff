"""A seam as data: where it belongs, in words of the code, and what is inserted there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Where(StrEnum):
    """How the inserted text stands to the anchor."""

    BEFORE = "before"  # its comments go with the anchor
    AFTER = "after"
    FIRST = "first in"  # the first statement in the anchor's body, or in the function's, after its docstring
    LAST = "last in the block of"
    UNDER = "under an if"  # the text is the if's header; the anchor moves in by one level
    AROUND = "around"  # an expression of the anchor, between two pieces of text
    INTO = "into every"  # each call without arguments that has the form of `expression`; none is fine
    IMPORT = "after the first import of megatron"


@dataclass(frozen=True)
class Seam:
    """One insertion into Megatron's source.

    Attributes:
        name: what it is called in tables; once in the whole table.
        patch: the number of the patch that it belongs to.
        path: the file, relative to the tree's root.
        function: its qualified name, such as "ChainedOptimizer.step"; "" for the module itself.
        where: how the text stands to the anchor.
        anchor: a pattern of the statement, or of an expression in it; "" for the function's own body.
        text: the lines to insert, or for AROUND what comes before the expression.
        behind: for AROUND what comes behind the expression.
        expression: a pattern of the expression, for AROUND and INTO.
        holds: a pattern that must stand inside the anchor.
        context: the compound statements around the anchor, outermost first: "if TEST", "else TEST", "while TEST",
            "for TARGET in ITERABLE", "try", "except", "finally"; `with` is not counted.
        beside: a pattern that must stand elsewhere in the function, for what the text relies on.
        by_loops: names that the text reads and that only a loop's body binds; Megatron reads them there as well.
    """

    name: str
    patch: int
    path: str
    function: str
    where: Where
    anchor: str
    text: str
    behind: str = ""
    expression: str = ""
    holds: str = ""
    context: tuple[str, ...] = ()
    beside: str = ""
    by_loops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Header:
    """The header of one patch: its file's name without suffix, and why it is there."""

    name: str
    what: str
    why: str
    upstream: str
    remove_when: str
