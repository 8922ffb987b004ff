"""The mutants of one source file: the usual operators on the syntax tree, each one edit of the text.

Compared with what a person would try, nothing here knows which lines matter. Left alone are annotations, decorators,
docstrings, texts, `assert` and what is raised (its words), and assignments to plain names, whose deletion any test
would notice.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_TEXT = (ast.JoinedStr, ast.FormattedValue)


@dataclass(frozen=True, slots=True, order=True)
class Mutant:
    """One edit: bytes `start` to `stop` of the file become `after`."""

    start: int
    stop: int
    line: int
    operator: str
    scope: str  # the function or class around it
    before: str
    after: str

    def applied(self, source: bytes) -> bytes:
        """The file with this edit."""
        return source[: self.start] + self.after.encode() + source[self.stop :]

    def __str__(self) -> str:
        return f"{self.operator}: {_short(self.before)} -> {_short(self.after)}"


def _short(text: str) -> str:
    one = " ".join(text.split())
    return one if len(one) <= 90 else f"{one[:87]}..."


def mutants(source: bytes) -> list[Mutant]:
    """All of a file's, in the order of its text.

    Args:
        source: the file, UTF-8.

    Returns:
        Edits that leave it valid Python, no two alike.
    """
    tree = ast.parse(source)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = set()
    for node, operator, replacement, scope in _Walk().of(tree):
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[node.end_lineno - 1] + node.end_col_offset
        before = source[start:stop].decode()
        after = replacement if isinstance(replacement, str) else _text(replacement)
        one = Mutant(start, stop, node.lineno, operator, scope, before, after)
        if _valid(one.applied(source)):
            found.add(one)
    return sorted(found)


def _valid(source: bytes) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _text(node: ast.AST) -> str:
    text = ast.unparse(node)
    return f"({text})" if isinstance(node, ast.expr) and not isinstance(node, ast.Constant) else text


type Found = tuple[ast.AST, str, ast.AST | str, str]


class _Walk:
    """Every node that may change, with what it may become."""

    def __init__(self) -> None:
        self.scope: list[str] = []

    def of(self, node: ast.AST) -> Iterator[Found]:
        """The node's own, then those below it."""
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if named:
            self.scope.append(node.name)
        for operator, replacement in _replacements(node):
            yield node, operator, replacement, ".".join(self.scope)
        if isinstance(node, ast.If | ast.While) and _is_condition(node.test):
            yield node.test, "negation", ast.UnaryOp(ast.Not(), node.test), ".".join(self.scope)
        for below in _below(node):
            yield from self.of(below)
        if named:
            self.scope.pop()


def _is_condition(test: ast.expr) -> bool:
    """Whether it is worth its negation: comparisons and `not` have mutants of their own."""
    return not isinstance(test, ast.Compare | ast.UnaryOp | ast.Constant) and ast.unparse(test) != "TYPE_CHECKING"


def _below(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Assert | ast.Raise | ast.Import | ast.ImportFrom | ast.TypeAlias):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        if isinstance(node, ast.FormattedValue) and name == "format_spec":
            continue
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("Literal", "list")
        ):
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                yield item


def _replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST | str]]:
    match node:
        case ast.Compare():
            yield from _comparisons(node)
        case ast.BoolOp():
            other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
            yield "boolean", ast.BoolOp(other, node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield "negation", node.operand
        case ast.UnaryOp(op=ast.USub()) if not isinstance(node.operand, ast.Constant):
            yield "arithmetic", node.operand
        case ast.BinOp() if type(node.op) in ARITHMETIC and not _is_text(node):
            yield "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
        case ast.AugAssign() if type(node.op) in ARITHMETIC and not isinstance(node.value, _TEXT):
            yield "arithmetic", ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value)
            yield "deleted statement", "pass"
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", ast.Constant(value + 1 if isinstance(value, int) or value == 0 else value * 2)
        case ast.IfExp() if not isinstance(node.test, ast.UnaryOp):
            yield "negation", ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield "return value", "return None"
        case ast.Call(args=[ast.expr() as only], keywords=[]) if _may_be_removed(node, only):
            yield "removed call", only
        case _:
            yield from _statements(node)


def _statements(node: ast.AST) -> Iterator[tuple[str, ast.AST | str]]:
    match node:
        case ast.Expr(value=ast.Call() | ast.Await() | ast.Yield()):
            yield "removed call", "pass"
        case ast.Assign() if not all(isinstance(target, ast.Name | ast.Tuple) for target in node.targets):
            yield "deleted statement", "pass"
        case ast.Raise() | ast.Delete() | ast.Continue() | ast.Break():
            yield "deleted statement", "pass"


def _comparisons(node: ast.Compare) -> Iterator[tuple[str, ast.AST]]:
    for at, op in enumerate(node.ops):
        for other in COMPARISONS[type(op)]:
            yield "comparison", ast.Compare(node.left, [*node.ops[:at], other(), *node.ops[at + 1 :]], node.comparators)


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, _TEXT) or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in (node.left, node.right)
    )


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _may_be_removed(call: ast.Call, only: ast.expr) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return bool(name) and not name[0].isupper() and not isinstance(only, ast.Starred | ast.GeneratorExp | ast.Constant)
