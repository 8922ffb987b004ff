"""Which local names are bound at a place of a function, on every path that leads there."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from megatron_stability.megatron.patching.anchor.pattern import SCOPES

type Function = ast.FunctionDef | ast.AsyncFunctionDef
type Bound = frozenset[str] | None  # None: no path comes here

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def bound_before(function: Function, place: ast.stmt, loops_run: bool) -> frozenset[str]:
    """The names of a function's own scope that have a value whenever a statement begins.

    Args:
        function: holds the statement in its own scope.
        place: the statement.
        loops_run: count what the body of a loop binds as bound after it, as if every loop ran once.

    Returns:
        Parameters among them; nothing where no path leads to the statement.
    """
    return _Paths(place, loops_run).find(function.body, parameters(function))


def bound_after(function: Function, place: ast.stmt, loops_run: bool) -> frozenset[str]:
    """As `bound_before`, whenever a simple statement has ended."""
    return bound_before(function, place, loops_run) | _bound_by(place)


def parameters(function: Function) -> frozenset[str]:
    """The names of a function's parameters."""
    args = function.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, *(a for a in (args.vararg, args.kwarg) if a)]
    return frozenset(arg.arg for arg in every)


def local_names(function: Function) -> frozenset[str]:
    """Every name that a function binds in its own scope, on some path; those it declares global aside."""
    names, outer = set(parameters(function)), set[str]()
    for node in _own_nodes(function.body):
        if isinstance(node, ast.Global | ast.Nonlocal):
            outer.update(node.names)
        elif isinstance(node, ast.stmt):
            names |= _bound_by(node)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.NamedExpr):
            names.add(node.target.id)
    return frozenset(names - outer)


def names_of(node: ast.AST) -> frozenset[str]:
    """Every name that occurs in a node, in nested scopes too."""
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return frozenset(names | {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)})


def _own_nodes(body: Iterable[ast.AST]) -> Iterable[ast.AST]:
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (*SCOPES, *_COMPREHENSIONS)):
            waiting += ast.iter_child_nodes(node)


def _bound_by(statement: ast.stmt) -> frozenset[str]:
    """What a statement itself binds for certain (of a compound one its header); `:=` may be passed by."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return frozenset({statement.name})
        case ast.Import() | ast.ImportFrom():
            return frozenset(alias.asname or alias.name.split(".")[0] for alias in statement.names)
        case ast.Assign():
            return _stored(statement.targets)
        case ast.AnnAssign():
            return _stored([statement.target]) if statement.value else frozenset()
        case ast.AugAssign() | ast.For() | ast.AsyncFor():
            return _stored([statement.target])
        case ast.With() | ast.AsyncWith():
            return _stored(item.optional_vars for item in statement.items if item.optional_vars)
    return frozenset()


def _stored(targets: Iterable[ast.expr]) -> frozenset[str]:
    nodes = (node for target in targets for node in ast.walk(target))
    return frozenset(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


def _meet(paths: Iterable[Bound]) -> Bound:
    """What is bound where paths join."""
    alive = [path for path in paths if path is not None]
    return frozenset.intersection(*alive) if alive else None


class _Paths:
    """One walk along every path of a function, up to a place."""

    def __init__(self, place: ast.stmt, loops_run: bool) -> None:
        self._place, self._loops_run = place, loops_run
        self._there: Bound = None
        self._breaks: list[list[Bound]] = []

    def find(self, body: Sequence[ast.stmt], bound: frozenset[str]) -> frozenset[str]:
        self._block(body, bound)
        return self._there or frozenset()

    def _block(self, body: Sequence[ast.stmt], bound: Bound) -> Bound:
        for statement in body:
            if statement is self._place:
                self._there = bound
            bound = None if bound is None else self._statement(statement, bound)
        return bound

    def _statement(self, statement: ast.stmt, bound: frozenset[str]) -> Bound:
        after = bound | _bound_by(statement)
        match statement:
            case ast.Return() | ast.Raise() | ast.Continue():
                return None
            case ast.Break():
                self._breaks[-1].append(bound)
                return None
            case ast.Delete():
                return bound - {target.id for target in statement.targets if isinstance(target, ast.Name)}
            case ast.If():
                return _meet([self._block(statement.body, after), self._block(statement.orelse, after)])
            case ast.While() | ast.For() | ast.AsyncFor():
                return self._loop(statement, bound, after)
            case ast.With() | ast.AsyncWith():
                return self._block(statement.body, after)
            case ast.Try() | ast.TryStar():
                return self._try(statement, bound)
            case ast.Match():
                ways = [self._block(case.body, after) for case in statement.cases]
                return _meet([*ways, after])
        return after

    def _loop(self, loop: ast.While | ast.For | ast.AsyncFor, bound: frozenset[str], inside: frozenset[str]) -> Bound:
        self._breaks.append([])
        end = self._block(loop.body, inside)
        broken = self._breaks.pop()
        for_ever = isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant) and bool(loop.test.value)
        if for_ever:
            return _meet(broken)
        never = inside if isinstance(loop, ast.While) else bound
        ran_out = end if self._loops_run and end is not None else never
        return _meet([self._block(loop.orelse, ran_out), *broken])

    def _try(self, statement: ast.Try | ast.TryStar, bound: frozenset[str]) -> Bound:
        ways = [self._block(statement.orelse, self._block(statement.body, bound))]
        for handler in statement.handlers:
            caught = bound | ({handler.name} if handler.name else frozenset())
            end = self._block(handler.body, caught)
            ways.append(None if end is None else end - {handler.name or ""})
        joined = _meet(ways)
        at_last = self._block(statement.finalbody, bound)
        if joined is None or (statement.finalbody and at_last is None):
            return None
        return joined | (at_last or frozenset())
