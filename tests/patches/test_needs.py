"""needs.py: what the adapter reads of Megatron is there in supported releases, and missed by name where it is not."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from megatron_stability.megatron.patching.adapter import needs
from megatron_stability.megatron.patching.adapter.needs import missing_needs
from megatron_stability.megatron.patching.adapter.needs_table import ATTRIBUTES
from tests.patches.patch_tools import stock_megatrons

PACKAGE = Path(needs.__file__).parents[2]


@pytest.mark.parametrize("release", ["0.18.2", "0.19.2"])
def test_nothing_is_missing_in_a_supported_release(release):
    assert missing_needs(stock_megatrons()[release]) == ()


def test_the_table_of_attributes_is_what_the_adapter_reads():
    for need in ATTRIBUTES:
        nodes = list(ast.walk(ast.parse((PACKAGE / need.read_by).read_bytes())))
        read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        read |= {node.value for node in nodes if isinstance(node, ast.Constant)}  # by getattr
        assert set(need.names) <= read, need


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """The sources of the installed release, to change."""
    stock = stock_megatrons()["0.19.2"]
    shutil.copytree(stock / "megatron", tmp_path / "megatron", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return tmp_path


@pytest.mark.parametrize(
    ("file", "old", "new", "missed"),
    [
        ("megatron/core/utils.py", "def get_model_config(", "def our_model_config(", "get_model_config"),
        ("megatron/core/optimizer/distrib_optimizer.py", "model_param_gbuf_map", "our_map", "model_param_gbuf_map"),
        ("megatron/core/optimizer/optimizer.py", "chained_optimizers", "links", "ChainedOptimizer.chained_optimizers"),
        ("megatron/training/arguments.py", "def parse_args(", "def our_args(", "parse_args"),
        ("megatron/core/distributed/param_and_grad_buffer.py", "grad_data", "flat", "_ParamAndGradBuffer.grad_data"),
        ("megatron/core/utils.py", "is_hybrid_cp: bool", "hybrid: bool", "get_batch_on_this_cp_rank(is_hybrid_cp=)"),
        ("megatron/core/transformer/identity_op.py", "class IdentityOp(", "class SameOp(", "IdentityOp"),
    ],
)
def test_what_a_fork_renamed_is_missed_by_name(fork, file, old, new, missed):
    text = (fork / file).read_text()
    assert old in text
    (fork / file).write_text(text.replace(old, new))
    assert any(missed in need.what for need in missing_needs(fork))


def test_a_module_that_moved_is_missed(fork):
    (fork / "megatron/core/fp8_utils.py").rename(fork / "megatron/core/low_precision.py")
    missing = missing_needs(fork)
    assert ("is_first_last_bf16_layer", "there is no such module") in {(need.what, need.reason) for need in missing}
    assert all(need.read_by.startswith("megatron/") for need in missing)


def test_an_argument_without_a_declaration_is_missed(fork):
    for file in (fork / "megatron").rglob("*.py"):
        text = file.read_text()
        file.write_text(text.replace("padded_vocab_size", "rounded").replace("padded-vocab-size", "rounded"))
    assert "args.padded_vocab_size" in {need.what for need in missing_needs(fork)}
