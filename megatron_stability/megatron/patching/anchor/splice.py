"""A file's text with the seams of a series put in, and taken out again."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from megatron_stability.megatron.patching.anchor.anchors import Seam, Where
from megatron_stability.megatron.patching.anchor.insertions import Insertion, parsed
from megatron_stability.megatron.patching.anchor.pattern import matches, parse
from megatron_stability.megatron.patching.anchor.place import Placement, calls_of, is_anchor, place
from megatron_stability.megatron.patching.anchor.source import Scope, Source
from megatron_stability.megatron.patching.diff import ContextError, to_bytes

_LEVEL = (b"\t", b"    ")
type _Span = tuple[int, int]


def spliced(text: str, insertions: Iterable[Insertion]) -> str:
    """The text with everything inserted; at one offset in the order given."""
    data, out, at = to_bytes(text), list[bytes](), 0
    for piece in sorted(insertions, key=lambda piece: piece.offset):
        out += [data[at : piece.offset], to_bytes(piece.text)]
        at = piece.offset
    return b"".join([*out, data[at:]]).decode("utf-8", "surrogateescape")


def opened(path: str, text: str, seams: Sequence[Seam]) -> tuple[tuple[Placement, ...], str | None]:
    """The placements of a stock file's seams, and its patched text; None where one of them does not hold."""
    placements = place(Source(path, text), seams)
    if not all(placement.holds for placement in placements):
        return placements, None
    return placements, spliced(text, (piece for placement in placements for piece in placement.insertions))


def closed(path: str, text: str, seams: Sequence[Seam]) -> str:
    """The stock text of a patched file.

    Args:
        path: for errors.
        text: the file, with every seam in it.
        seams: as for `opened`.

    Returns:
        The text which `opened` makes this text of, to the byte.

    Raises:
        ContextError: a seam is missing or was changed; names it.
    """
    source = Source(path, text)
    spans: list[_Span] = []
    for seam in seams:
        mine = list(_spans(source, seam, source.scopes.get(seam.function, [])))
        if not mine and seam.where is not Where.INTO:
            raise ContextError(f"{path}: of the plugin's calls, {seam.name} is missing or was changed")
        spans += mine
    data, out, at = source.data, list[bytes](), 0
    for start, end in sorted(spans):
        out.append(data[at:start])
        at = end
    stock = b"".join([*out, data[at:]]).decode("utf-8", "surrogateescape")
    placements, again = opened(path, stock, seams)
    if again != text:
        first = next((p for p in placements if not p.holds), None)
        why = f"{first.seam.name}: {first.reason}" if first else "a call stands where it is not put, or in another form"
        raise ContextError(f"{path}: the plugin's calls in it can't be taken out ({why})")
    return stock


def _spans(source: Source, seam: Seam, scopes: Sequence[Scope]) -> Iterator[_Span]:
    """The bytes that a seam put in."""
    if seam.where is Where.AROUND:
        yield from _around(source, seam, scopes)
    elif seam.where is Where.INTO:
        call = seam.expression.removesuffix(")") + seam.text + ")"
        for node in calls_of(call, scopes):
            end = source.end(node) - 1
            yield end - len(seam.text), end
    elif seam.where is Where.UNDER:
        yield from _under(source, seam, scopes)
    else:
        yield from _blocks(source, seam, scopes)


def _around(source: Source, seam: Seam, scopes: Sequence[Scope]) -> Iterator[_Span]:
    whole = f"{seam.text}{seam.expression}{seam.behind}".strip()
    form = parse(seam.expression)
    for node in calls_of(whole, scopes):
        inner = [n for n in ast.walk(node) if isinstance(n, ast.expr) and matches(form, n)]
        first = min(inner, key=lambda n: (n.lineno, n.col_offset))
        start, end = source.start(first), source.end(first)
        if seam.text:
            yield start - len(seam.text), start
        if seam.behind:
            yield end, end + len(seam.behind)


def _blocks(source: Source, seam: Seam, scopes: Sequence[Scope]) -> Iterator[_Span]:
    asked = ast.parse(seam.text).body
    for scope in scopes:
        for site in scope.sites:
            at = next(i for i, statement in enumerate(site.block) if statement is site.statement)
            here = site.block[at : at + len(asked)]
            if len(here) == len(asked) and all(map(_is, asked, here)):
                yield _lines(source, here[0].lineno, here[-1].end_lineno or here[-1].lineno)


def _lines(source: Source, first: int, last: int) -> _Span:
    start, end = source.start_of_line(first), source.start_of_line(last + 1)
    if end == len(source.data) and not source.data.endswith(b"\n"):
        start -= len(b"\r\n") if source.line(first - 1).endswith(b"\r\n") else len(b"\n")
    return start, end


def _is(asked: ast.stmt, found: ast.stmt) -> bool:
    return ast.dump(asked) == ast.dump(found)


def _under(source: Source, seam: Seam, scopes: Sequence[Scope]) -> Iterator[_Span]:
    tree = parsed(seam)
    assert isinstance(tree, ast.Module)
    header = tree.body[0]
    assert isinstance(header, ast.If)
    for scope in scopes:
        for site in scope.sites:
            found = site.statement
            if isinstance(found, ast.If) and matches(header.test, found.test) and is_anchor(seam, found.body[0]):
                yield _lines(source, found.lineno, found.lineno)
                yield from _levels(source, found.body[0], source.start(found) - source.start_of_line(found.lineno))


def _levels(source: Source, statement: ast.stmt, deep: int) -> Iterator[_Span]:
    indent = source.line(statement.lineno)[:deep]
    level = _LEVEL[0] if b"\t" in indent else _LEVEL[1]
    for number in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
        line, start = source.line(number), source.start_of_line(number)
        at = start + (deep if line.startswith(indent) else 0)
        if line.strip() and source.data[at : at + len(level)] == level:
            yield at, at + len(level)
