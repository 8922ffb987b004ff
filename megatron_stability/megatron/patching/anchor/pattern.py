"""Patterns of Python code: a statement or an expression, compared on the syntax tree.

Indentation, comments, quotes and line breaks don't matter. `__` stands for any expression, `...` at the end of a
call's arguments for whatever else it is given, and `...` as a body for any body.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

ANY = "__"
_IGNORED = frozenset({"ctx", "kind", "type_comment", "lineno", "col_offset", "end_lineno", "end_col_offset"})
_BODIES = frozenset({"body", "orelse", "handlers", "finalbody"})
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.ClassDef, ast.Lambda)


@functools.cache
def parse(pattern: str) -> ast.AST:
    """The node of a pattern: an expression where it is one alone, else a statement."""
    (statement,) = ast.parse(pattern).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def matches(pattern: ast.AST, node: ast.AST) -> bool:
    """Whether a node has the form of a pattern."""
    if isinstance(pattern, ast.Name) and pattern.id == ANY:
        return isinstance(node, ast.expr)
    if isinstance(pattern, ast.expr) and isinstance(node, ast.Expr):
        return matches(pattern, node.value)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Call) and isinstance(node, ast.Call) and _is_ellipsis(pattern.args[-1:]):
        return _matches_call(pattern, node)
    open_body = _is_ellipsis(getattr(pattern, "body", None))
    return all(
        _same(getattr(pattern, name), getattr(node, name))
        for name in pattern._fields
        if name not in _IGNORED and not (open_body and name in _BODIES)
    )


def found_in(pattern: ast.AST, node: ast.AST) -> bool:
    """Whether a pattern stands anywhere in a node."""
    return any(matches(pattern, inner) for inner in ast.walk(node))


def own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Every expression of a statement itself: of a compound one its header, without lambdas' bodies."""
    waiting: list[ast.AST] = [
        child
        for child in ast.iter_child_nodes(statement)
        if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case)
    ]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.expr):
            yield node
        if not isinstance(node, ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _is_ellipsis(nodes: object) -> bool:
    """Whether a list of nodes is `...` alone."""
    if not isinstance(nodes, list) or len(nodes) != 1:
        return False
    node = nodes[0].value if isinstance(nodes[0], ast.Expr) else nodes[0]
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def _matches_call(pattern: ast.Call, node: ast.Call) -> bool:
    asked = pattern.args[:-1]
    return (
        matches(pattern.func, node.func)
        and len(node.args) >= len(asked)
        and all(map(matches, asked, node.args))
        and all(any(matches(keyword, given) for given in node.keywords) for keyword in pattern.keywords)
    )


def _same(pattern: object, value: object) -> bool:
    if isinstance(pattern, ast.AST):
        return isinstance(value, ast.AST) and matches(pattern, value)
    if isinstance(pattern, list):
        return isinstance(value, list) and len(pattern) == len(value) and all(map(_same, pattern, value))
    return type(pattern) is type(value) and pattern == value
