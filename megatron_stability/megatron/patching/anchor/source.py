"""One Python file as bytes and as a syntax tree, with the way from the one to the other."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_stability.megatron.patching.anchor.bindings import Function
from megatron_stability.megatron.patching.anchor.pattern import FUNCTIONS
from megatron_stability.megatron.patching.diff import ContextError, to_bytes

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Site:
    """One statement in a function's own scope: its block, its place there, and what stands around it.

    `context` is the compound statements around it, as in `Seam.context` but as nodes: the kind, and the header's
    expressions.
    """

    statement: ast.stmt
    block: Sequence[ast.stmt]
    context: tuple[tuple[str, tuple[ast.expr, ...]], ...]
    parents: tuple[ast.AST, ...]

    @property
    def previous(self) -> ast.stmt | None:
        """The statement before it in its block."""
        at = next(i for i, statement in enumerate(self.block) if statement is self.statement)
        return self.block[at - 1] if at else None


@dataclass(frozen=True)
class Scope:
    """One function, with the functions that it is nested in, outermost first; none for the module itself."""

    name: str
    functions: tuple[Function, ...]
    body: Sequence[ast.stmt]

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """Every statement of the scope, in the order of the text."""
        return tuple(_sites(self.body, (), self.functions[-1:]))

    @property
    def node(self) -> Function | None:
        """The function's own node; None for the module."""
        return self.functions[-1] if self.functions else None


class Source:
    """A file that can be spliced.

    Args:
        path: what errors call it.
        text: from `read_text`.

    Raises:
        ContextError: it is not Python in UTF-8 with lines that end in "\\n" or "\\r\\n".
    """

    def __init__(self, path: str, text: str) -> None:
        self.path, self.data = path, to_bytes(text)
        if self.data.replace(b"\r\n", b"").find(b"\r") >= 0:
            raise ContextError(f"{path}: a line ends in a carriage return alone")
        try:
            self.data.decode("utf-8")
            self.tree = ast.parse(self.data)
        except (SyntaxError, ValueError) as error:  # ValueError: a byte 0, or no UTF-8
            raise ContextError(f"{path} is no Python in UTF-8: {error}") from None
        self.lines = self.data.splitlines(keepends=True)  # of bytes: at "\n" and "\r\n" alone
        self._starts = [len(_BOM) if self.data.startswith(_BOM) else 0]
        at = 0
        for line in self.lines:
            at += len(line)
            self._starts.append(at)

    @cached_property
    def scopes(self) -> dict[str, list[Scope]]:
        """Every function by its qualified name; the module itself by ""."""
        found: dict[str, list[Scope]] = {"": [Scope("", (), self.tree.body)]}
        for scope in _scopes(self.tree, "", ()):
            found.setdefault(scope.name, []).append(scope)
        return found

    def start_of_line(self, number: int) -> int:
        """The offset of a line's first byte, behind a byte order mark; lines count from 1."""
        return self._starts[number - 1]

    def start(self, node: ast.expr | ast.stmt) -> int:
        """The offset of a node's first byte, decorators aside."""
        return self._offset(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        """The offset behind a node's last byte."""
        assert node.end_lineno is not None and node.end_col_offset is not None  # noqa: PT018
        return self._offset(node.end_lineno, node.end_col_offset)

    def line(self, number: int) -> bytes:
        """One line with its end, b"" behind the last."""
        return self.lines[number - 1] if number <= len(self.lines) else b""

    def _offset(self, number: int, column: int) -> int:
        return self._starts[number - 1] + column


def _scopes(node: ast.AST, prefix: str, around: tuple[Function, ...]) -> Iterator[Scope]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            inside = (*around, child)
            yield Scope(prefix + child.name, inside, child.body)
            yield from _scopes(child, f"{prefix}{child.name}.", inside)
        elif isinstance(child, ast.ClassDef):
            yield from _scopes(child, f"{prefix}{child.name}.", around)
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _scopes(child, prefix, around)


def _sites(
    body: Sequence[ast.stmt],
    context: tuple[tuple[str, tuple[ast.expr, ...]], ...],
    parents: tuple[ast.AST, ...],
) -> Iterator[Site]:
    for statement in body:
        yield Site(statement, body, context, parents)
        for kind, header, block, holder in _blocks(statement):
            inside = (*context, (kind, header)) if kind else context
            yield from _sites(block, inside, (*parents, holder))


def _blocks(statement: ast.stmt) -> Iterator[tuple[str, tuple[ast.expr, ...], Sequence[ast.stmt], ast.AST]]:
    """The blocks of a compound statement: the kind, the header's expressions, the block and the node it hangs on."""
    match statement:
        case ast.If():
            yield "if", (statement.test,), statement.body, statement
            yield "else", (statement.test,), statement.orelse, statement
        case ast.While():
            yield "while", (statement.test,), statement.body, statement
            yield "after while", (statement.test,), statement.orelse, statement
        case ast.For() | ast.AsyncFor():
            yield "for", (statement.target, statement.iter), statement.body, statement
            yield "after for", (statement.target, statement.iter), statement.orelse, statement
        case ast.With() | ast.AsyncWith():
            yield "", (), statement.body, statement
        case ast.Try() | ast.TryStar():
            yield "try", (), statement.body, statement
            for handler in statement.handlers:
                yield "except", (), handler.body, handler
            yield "try's else", (), statement.orelse, statement
            yield "finally", (), statement.finalbody, statement
        case ast.Match():
            for case in statement.cases:
                yield "match", (), case.body, case
