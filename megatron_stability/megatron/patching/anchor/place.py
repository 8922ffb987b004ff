"""Where the seams of one file belong: found exactly once, in the right function and surroundings, or not at all.

Everything a placement does is to insert bytes, so that taking them out again gives the stock bytes back.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from megatron_stability.megatron.patching.anchor import insertions
from megatron_stability.megatron.patching.anchor.anchors import Seam, Where
from megatron_stability.megatron.patching.anchor.bindings import bound_after, bound_before, local_names, names_of
from megatron_stability.megatron.patching.anchor.insertions import Insertion, PlaceError
from megatron_stability.megatron.patching.anchor.pattern import found_in, matches, own_expressions, parse
from megatron_stability.megatron.patching.anchor.source import Scope, Site, Source

_SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr)


class State(StrEnum):
    """How a seam stands to a file."""

    PLACED = "placed"
    CHANGED = "changed"  # its place is there in another form
    GONE = "gone"
    UNNEEDED = "not needed"


@dataclass(frozen=True)
class Placement:
    """One seam in one file: where its text goes, or why it goes nowhere.

    `line` is the line it stands at in the stock file, None where it has none; `reason` is "" for one that is placed.
    """

    seam: Seam
    state: State
    line: int | None
    reason: str
    insertions: tuple[Insertion, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether nothing is missing."""
        return self.state in (State.PLACED, State.UNNEEDED)


class _GoneError(Exception):
    """What a seam stands at is not there."""


def place(source: Source, seams: Sequence[Seam]) -> tuple[Placement, ...]:
    """Finds the place of each seam of one file.

    Args:
        source: the stock file.
        seams: those of the file, in the order of the text within each function.

    Returns:
        As many placements, in the same order.
    """
    written: dict[str, frozenset[str]] = {}
    placements = []
    for seam in seams:
        before = written.get(seam.function, frozenset())
        placements.append(_place(source, seam, before))
        written[seam.function] = before | _stores(seam)
    return tuple(_in_order(placements))


def _place(source: Source, seam: Seam, written: frozenset[str]) -> Placement:
    scopes = source.scopes.get(seam.function)
    if scopes is None:
        return Placement(seam, State.GONE, None, f"there is no {seam.function}{_elsewhere(source, seam)}")
    try:
        if seam.where is Where.IMPORT:
            return _place_import(source, seam)
        if seam.where is Where.INTO:
            return _place_into_calls(source, seam, scopes)
        scope, site = _find(source, seam, scopes)
        _check_context(seam, site)
        _check_names(source, seam, scope, site, written)
        pieces, line = insertions.of(source, seam, scope, site)
    except _GoneError as reason:
        return Placement(seam, State.GONE, scopes[0].body[0].lineno, f"{reason}{_elsewhere(source, seam)}")
    except PlaceError as reason:
        return Placement(seam, State.CHANGED, reason.line or scopes[0].body[0].lineno, str(reason))
    return Placement(seam, State.PLACED, line, "", pieces)


def _place_import(source: Source, seam: Seam) -> Placement:
    if "seams" in _module_names(source):
        raise PlaceError("the module has a name `seams` already")
    imports = [node for node in source.tree.body if isinstance(node, ast.Import | ast.ImportFrom) and not _future(node)]
    if not imports:
        raise _GoneError("it imports nothing at its top level")
    anchor = next((node for node in imports if _of_megatron_core(node, source.path)), imports[-1])
    pieces = insertions.after(source, anchor, seam.text)
    return Placement(seam, State.PLACED, (anchor.end_lineno or anchor.lineno) + 1, "", pieces)


def _future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _of_megatron_core(node: ast.stmt, path: str) -> bool:
    if not isinstance(node, ast.ImportFrom):
        return False
    return path.startswith("megatron/core/") if node.level else (node.module or "").startswith("megatron.core")


def _place_into_calls(source: Source, seam: Seam, scopes: Sequence[Scope]) -> Placement:
    calls = calls_of(seam.expression, scopes)
    if not calls:
        return Placement(seam, State.UNNEEDED, None, f"{seam.function} holds no `{seam.expression}`")
    for scope in scopes:
        _check_own_name(source, scope)
    pieces = tuple(Insertion(source.end(call) - 1, seam.text) for call in calls)
    return Placement(seam, State.PLACED, calls[0].lineno, "", pieces)


def calls_of(pattern: str, scopes: Iterable[Scope]) -> list[ast.expr]:
    """Every expression of that form in the scopes' own statements, in the order of the text."""
    form = parse(pattern)
    found = [
        node
        for scope in scopes
        for site in scope.sites
        for node in own_expressions(site.statement)
        if matches(form, node)
    ]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def _find(source: Source, seam: Seam, scopes: Sequence[Scope]) -> tuple[Scope, Site]:
    """The one function and statement at which a seam stands."""
    if not seam.anchor:
        if len(scopes) > 1:
            raise PlaceError(f"{seam.function} stands {len(scopes)} times", scopes[1].body[0].lineno)
        return scopes[0], scopes[0].sites[0]
    found = [(scope, site) for scope in scopes for site in scope.sites if is_anchor(seam, site.statement)]
    if not found:
        raise _GoneError(f"{seam.function} holds no `{_said(seam)}`")
    if len(found) > 1:
        found = [(scope, site) for scope, site in found if _has_context(seam, site)] or found
    if len(found) > 1:
        lines = " and ".join(str(site.statement.lineno) for _, site in found)
        raise PlaceError(f"{seam.function} holds `{_said(seam)}` at lines {lines}", found[1][1].statement.lineno)
    scope, site = found[0]
    if seam.beside and not (scope.node and found_in(parse(seam.beside), scope.node)):
        raise PlaceError(f"{seam.function} holds no `{seam.beside}`, on which the seam relies", site.statement.lineno)
    return scope, site


def is_anchor(seam: Seam, statement: ast.stmt) -> bool:
    """Whether a statement has the form that a seam stands at."""
    pattern = parse(seam.anchor)
    if isinstance(pattern, ast.stmt):
        here = matches(pattern, statement)
    else:
        here = any(matches(pattern, node) for node in own_expressions(statement))
    return here and (not seam.holds or found_in(parse(seam.holds), statement))


def _said(seam: Seam) -> str:
    return seam.anchor + (f"` with `{seam.holds}" if seam.holds else "")


def _elsewhere(source: Source, seam: Seam) -> str:
    """Where in the file the anchor stands, for the message."""
    if not seam.anchor:
        return ""
    found = [
        f"{name or 'the module'} (line {site.statement.lineno})"
        for name, scopes in source.scopes.items()
        for scope in scopes
        for site in scope.sites
        if name != seam.function and is_anchor(seam, site.statement)
    ]
    return f"; it stands in {', '.join(found)}" if found else ""


def _has_context(seam: Seam, site: Site) -> bool:
    return len(site.context) == len(seam.context) and all(map(_same_header, seam.context, site.context))


def _same_header(asked: str, found: tuple[str, tuple[ast.expr, ...]]) -> bool:
    kind, _, header = asked.partition(" ")
    parts = header.split(" in ") if kind == "for" else [header] if header else []
    return kind == found[0] and len(parts) == len(found[1]) and all(map(matches, map(parse, parts), found[1]))


def _check_context(seam: Seam, site: Site) -> None:
    if not _has_context(seam, site):
        found = ", ".join(f"{kind} {' in '.join(map(ast.unparse, header))}".strip() for kind, header in site.context)
        raise PlaceError(
            f"it stands under `{found or seam.function}`, expected `{', '.join(seam.context) or seam.function}`",
            site.statement.lineno,
        )


def _check_names(source: Source, seam: Seam, scope: Scope, site: Site, written: frozenset[str]) -> None:
    """Every name that the text reads has a value there, and what it writes is its own or has one as well."""
    _check_own_name(source, scope)
    node = scope.node
    assert node is not None
    bound = _bound(seam, site, scope, loops_run=False) | written
    by_loops = _bound(seam, site, scope, loops_run=True) if seam.by_loops else frozenset[str]()
    stores = _stores(seam)
    for name in sorted(stores - bound):
        if name in names_of(node):
            raise PlaceError(f"`{name}`, which the seam sets, is not set on every path before", site.statement.lineno)
    for name in sorted(names_of(insertions.parsed(seam)) - stores - {"seams", insertions.HOLE}):
        has_value = name in bound or (name in seam.by_loops and name in by_loops)
        if not has_value and not _is_outer(source, scope, name):
            raise PlaceError(f"`{name}`, which the seam reads, is not set on every path before", site.statement.lineno)


def _stores(seam: Seam) -> frozenset[str]:
    if seam.where in (Where.AROUND, Where.INTO, Where.IMPORT):
        return frozenset()
    nodes = ast.walk(insertions.parsed(seam))
    return frozenset(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


def _bound(seam: Seam, site: Site, scope: Scope, loops_run: bool) -> frozenset[str]:
    """What has a value where the text goes."""
    node = scope.node
    assert node is not None
    match seam.where:
        case Where.LAST:
            place = site.block[-1]
        case Where.FIRST:
            place = insertions.first_of(site.statement.body if seam.anchor else scope.body)  # type: ignore[attr-defined]
        case _:
            place = site.statement
    behind = seam.where in (Where.AFTER, Where.LAST) and isinstance(place, _SIMPLE)
    return (bound_after if behind else bound_before)(node, place, loops_run)


def _is_outer(source: Source, scope: Scope, name: str) -> bool:
    """Whether a name that the function itself does not bind has a value from outside, when the function is made."""
    own, *around = reversed(scope.functions)
    if name in local_names(own):
        return False
    for outer in around:
        if name in local_names(outer):
            return name in bound_before(outer, own, loops_run=False)
        own = outer
    return name in _module_names(source) or hasattr(builtins, name)


def _module_names(source: Source) -> frozenset[str]:
    """Every name that the module's own statements bind."""
    module = ast.FunctionDef("", ast.arguments([], [], None, [], [], None, []), source.tree.body, [], type_params=[])
    return local_names(module)


def _check_own_name(source: Source, scope: Scope) -> None:
    """`seams` means our module: nothing else in the function has that name."""
    if any("seams" in local_names(function) for function in scope.functions):
        raise PlaceError(f"{scope.name} has a name `seams` of its own", scope.body[0].lineno)


def _in_order(placements: Iterable[Placement]) -> Iterable[Placement]:
    """Takes back each placement that stands before one of its function that has to come first."""
    last: dict[str, Placement] = {}
    for placement in placements:
        before = last.get(placement.seam.function)
        if placement.state is State.PLACED and placement.seam.where is not Where.INTO:
            if before and placement.insertions[0].offset < before.insertions[0].offset:
                reason = f"it stands before {before.seam.name}, in every known release after it"
                placement = Placement(placement.seam, State.CHANGED, placement.line, reason)
            else:
                last[placement.seam.function] = placement
        yield placement
