"""A run on a Megatron without diffs of its own: what it says of itself, and what it says before the first step."""

from __future__ import annotations

import pytest

from megatron_stability.errors import UsageError
from megatron_stability.megatron.patching import install_digest
from megatron_stability.megatron.patching.tree import read_tree
from tests.patches.small_megatron import small_megatron

pytestmark = pytest.mark.megatron


@pytest.mark.known_release
def test_a_known_release_says_nothing(monkeypatch):
    monkeypatch.setattr(install_digest.dist, "get_rank", lambda: 0)
    assert "megatron_tree" not in install_digest.versions()
    assert install_digest.missing_names() is None


def test_versions_say_the_tree_and_rank_0_says_what_is_missing(tmp_path, monkeypatch):
    root = small_megatron(tmp_path / "clone")
    monkeypatch.setattr(install_digest, "installed_root", lambda: root)
    assert install_digest.versions()["megatron_tree"] == read_tree(root).said
    monkeypatch.setattr(install_digest.dist, "get_rank", lambda: 1)
    assert install_digest.missing_names() is None
    monkeypatch.setattr(install_digest.dist, "get_rank", lambda: 0)
    said = install_digest.missing_names()
    assert said.startswith("unknown Megatron 0.77.0 (digest ")
    assert "unwrap_model of megatron.core.utils (there is no such module)" in said
    assert "docs/porting.md" in said


def test_a_tree_that_lost_a_seam_since_is_an_error(tmp_path, monkeypatch):
    root = small_megatron(tmp_path / "clone", {"megatron/training/arguments.py": "import argparse\n"})
    monkeypatch.setattr(install_digest, "installed_root", lambda: root)
    with pytest.raises(UsageError, match="arguments_ready: there is no parse_and_validate_args"):
        install_digest.versions()
