"""The bytes that a seam inserts, and where."""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_stability.megatron.patching.anchor.anchors import Seam, Where
from megatron_stability.megatron.patching.anchor.pattern import matches, own_expressions, parse
from megatron_stability.megatron.patching.anchor.source import Scope, Site, Source

HOLE = "__"
_LEVEL = "    "


class PlaceError(Exception):
    """A seam's place is there in a form that can't be used; `line` is where."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True)
class Insertion:
    """Text that goes in at a byte offset of the stock file."""

    offset: int
    text: str


@functools.cache
def parsed(seam: Seam) -> ast.AST:
    """The syntax tree of what a seam inserts; HOLE stands for the expression that it goes around."""
    if seam.where is Where.AROUND:
        return ast.parse(f"{seam.text}{HOLE}{seam.behind}".strip(), mode="eval")
    return ast.parse(seam.text + (f"{_LEVEL}pass" if seam.where is Where.UNDER else ""))


def first_of(body: Sequence[ast.stmt]) -> ast.stmt:
    """The first statement of a block that is no docstring."""
    head = body[0]
    is_text = isinstance(head, ast.Expr) and isinstance(head.value, ast.Constant) and isinstance(head.value.value, str)
    if is_text and len(body) == 1:
        raise PlaceError("the body is a docstring alone", head.lineno)
    return body[1] if is_text else head


def of(source: Source, seam: Seam, scope: Scope, site: Site) -> tuple[tuple[Insertion, ...], int]:
    """What a seam inserts at its place.

    Returns:
        The insertions, in order, and the line of the first in the stock file.

    Raises:
        PlaceError: the statement shares a line with another, or its expression is not there once.
    """
    match seam.where:
        case Where.BEFORE:
            return before(source, site, seam.text)
        case Where.AFTER:
            end = site.statement.end_lineno or site.statement.lineno
            return after(source, site.statement, seam.text), end + 1
        case Where.LAST:
            last = site.block[-1]
            return after(source, last, seam.text), (last.end_lineno or last.lineno) + 1
        case Where.FIRST:
            return _first(source, seam, scope, site)
        case Where.UNDER:
            return _under(source, site.statement, seam.text), site.statement.lineno
        case Where.AROUND:
            return _around(source, seam, site.statement)
    raise AssertionError(seam.where)


def before(source: Source, site: Site, text: str) -> tuple[tuple[Insertion, ...], int]:
    """Text before a statement and the comments that stand right above it."""
    statement = site.statement
    indent = _own_line(source, statement)
    number, floor = statement.lineno, _floor(site)
    while number - 1 > floor and _is_comment(source.line(number - 1), indent):
        number -= 1
    return (_block(source, source.start_of_line(number), indent, text, statement.lineno),), number


def after(source: Source, statement: ast.stmt, text: str) -> tuple[Insertion, ...]:
    """Text on the line behind a statement."""
    indent = _own_line(source, statement)
    number = statement.end_lineno or statement.lineno
    return (_block(source, source.start_of_line(number + 1), indent, text, statement.lineno),)


def _first(source: Source, seam: Seam, scope: Scope, site: Site) -> tuple[tuple[Insertion, ...], int]:
    body = site.statement.body if seam.anchor else scope.body  # type: ignore[attr-defined]
    head = first_of(body)
    holder = site.statement if seam.anchor else scope.node
    assert holder is not None
    return before(source, Site(head, body, (), (holder,)), seam.text)


def _under(source: Source, statement: ast.stmt, header: str) -> tuple[Insertion, ...]:
    indent = _own_line(source, statement)
    level = "\t" if "\t" in indent else _LEVEL
    for node in ast.walk(statement):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.lineno != node.end_lineno:
            raise PlaceError("a string in it goes on over several lines, so it can't be moved in", node.lineno)
    pieces = [_block(source, source.start_of_line(statement.lineno), indent, header, statement.lineno)]
    for number in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
        line = source.line(number)
        if line.strip():
            deep = len(indent) if line.startswith(indent.encode()) else 0
            pieces.append(Insertion(source.start_of_line(number) + deep, level))
    return tuple(pieces)


def _around(source: Source, seam: Seam, statement: ast.stmt) -> tuple[tuple[Insertion, ...], int]:
    form = parse(seam.expression)
    found = [node for node in own_expressions(statement) if matches(form, node)]
    if len(found) != 1:
        raise PlaceError(f"it holds `{seam.expression}` {len(found)} times", statement.lineno)
    ends = ((source.start(found[0]), seam.text), (source.end(found[0]), seam.behind))
    return tuple(Insertion(offset, text) for offset, text in ends if text), found[0].lineno


def _own_line(source: Source, statement: ast.stmt) -> str:
    """The indentation of a statement that has its lines for itself."""
    if getattr(statement, "decorator_list", None):
        raise PlaceError("it has a decorator", statement.lineno)
    start = source.start_of_line(statement.lineno)
    indent = source.data[start : source.start(statement)]
    end = statement.end_lineno or statement.lineno
    rest = source.data[source.end(statement) : source.start_of_line(end + 1)]
    if indent.strip() or not (rest.strip() == b"" or rest.lstrip().startswith(b"#")):
        raise PlaceError("it shares its line with another statement", statement.lineno)
    return indent.decode()


def _floor(site: Site) -> int:
    """The last line that belongs to what comes before a statement."""
    if site.previous is not None:
        return site.previous.end_lineno or site.previous.lineno
    holder = site.parents[-1] if site.parents else None
    if holder is None:
        return 0
    own = [n.end_lineno or 0 for n in ast.walk(holder) if isinstance(n, ast.expr | ast.arg) and _above(n, site)]
    return max([getattr(holder, "lineno", 0), *own])


def _above(node: ast.expr | ast.arg, site: Site) -> bool:
    return (node.end_lineno or node.lineno) < site.statement.lineno


def _is_comment(line: bytes, indent: str) -> bool:
    return line.startswith(indent.encode() + b"#")


def _block(source: Source, offset: int, indent: str, text: str, near: int) -> Insertion:
    """Lines of text at the start of a line, with the file's own indentation and line ends."""
    newline = "\r\n" if source.line(near).endswith(b"\r\n") else "\n"
    lines = text.splitlines()
    if "\t" in indent:
        lines = [line.replace(_LEVEL, "\t") for line in lines]
    whole = "".join(f"{indent}{line}{newline}" for line in lines)
    if offset == len(source.data) and not source.data.endswith(b"\n"):
        whole = newline + whole.removesuffix(newline)
    return Insertion(offset, whole)
