"""An argument is read by a name that the table knows, or not at all."""

from __future__ import annotations

import ast
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_stability
from megatron_stability.megatron.access.flags import argument_table, flag_rows

pytestmark = pytest.mark.megatron
ROOT = Path(megatron_stability.__file__).parent
FILES = sorted(path for room in ("megatron", "nemo") for path in (ROOT / room).rglob("*.py"))
READERS = {"argument", "is_set", "given"}
NAMESPACES = {"args", "self._args"}


def calls(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield node


def test_nobody_reads_one_with_a_default_of_their_own() -> None:
    own = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in FILES
        if path.name != "argument_table.py"
        for call in calls(path)
        if ast.unparse(call.func) == "getattr" and len(call.args) == 3 and ast.unparse(call.args[0]) in NAMESPACES
    ]
    assert own == []


def test_every_name_that_is_read_is_known() -> None:
    read = {
        call.args[1].value
        for path in FILES
        for call in calls(path)
        if ast.unparse(call.func).rpartition(".")[2] in READERS and len(call.args) == 2
        if isinstance(call.args[1], ast.Constant)
    }
    assert len(read) > 20
    for name in read:
        argument_table.argument(Namespace(), str(name))


@pytest.mark.parametrize("read", [argument_table.argument, argument_table.is_set, argument_table.given])
def test_a_name_that_the_table_lacks_fails_also_where_the_namespace_has_it(read: object) -> None:
    assert callable(read)
    with pytest.raises(LookupError, match="tp_only_amax_red is no argument"):
        read(Namespace(tp_only_amax_red=True), "tp_only_amax_red")


def test_where_it_is_absent() -> None:
    empty = Namespace()
    assert argument_table.argument(empty, "fp8_recipe") == "delayed"
    assert argument_table.argument(empty, "group_query_attention") is True, "Bridge has no such flag"
    assert argument_table.given(empty, "seed") is None
    assert [row.name for row in flag_rows.REFUSED if row.given(empty) is not None] == []


def test_tuples_of_names_are_known() -> None:
    from megatron_stability.megatron.access import skipped
    from megatron_stability.megatron.access.flags import cuda_graphs
    from megatron_stability.megatron.observers import hooks
    from megatron_stability.megatron.start import pretrain_gpt

    names = (
        "dynamic_context_parallel",
        *skipped._NOT_WITH,
        *cuda_graphs._OLDER,
        *hooks._NO_PLAIN_MASTERS,
        *pretrain_gpt.NOT_CARRIED,
    )
    assert {name: argument_table.is_set(Namespace(), name) for name in names} == dict.fromkeys(names, False)
