"""command.py: exit codes, JSON, messages; and where an installed wheel keeps its patches."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patch_tools import PATCHED, STOCK, contents, write, write_series

import megatron_stability
from megatron_stability.megatron.patching import on_disk
from megatron_stability.megatron.patching.anchor.seam_table import SEAMS
from megatron_stability.megatron.patching.command import run
from megatron_stability.megatron.patching.patch_headers import HEADERS
from megatron_stability.megatron.patching.tree import installed_root
from tests.patches.small_megatron import FILES, GPT, small_megatron


def command(root: Path, patches: Path, *argv: str) -> int:
    return run([*argv, "--target", str(root)], patches)


def test_exit_codes_follow_the_state_of_the_tree(root, patches, capsys):
    def codes() -> tuple[int, int]:
        return command(root, patches, "check"), command(root, patches, "status")

    assert codes() == (0, 1)
    assert command(root, patches, "apply") == 0
    assert codes() == (0, 0)
    assert command(root, patches, "apply") == 0
    write(root, {"megatron/core/second.py": STOCK["megatron/core/second.py"]})
    assert codes() == (1, 1)
    assert "half applied" in capsys.readouterr().out
    assert command(root, patches, "apply") == 2
    assert command(root, patches, "revert") == 0
    assert codes() == (0, 1)
    write(root, {"megatron/core/second.py": "changed\n"})
    assert codes() == (2, 2)


def test_check_writes_nothing(root, patches):
    command(root, patches, "check")
    assert (root / "megatron/core/second.py").read_text() == STOCK["megatron/core/second.py"]
    assert not (root / "megatron/core/seam.py").exists()


def test_apply_and_revert_say_whether_they_changed_anything(root, patches, capsys):
    for action, said in (
        ("apply", "files changed"),
        ("apply", "nothing to do"),
        ("revert", "files changed"),
        ("revert", "nothing to do"),
    ):
        assert command(root, patches, action) == 0
        assert capsys.readouterr().out.splitlines()[-1].endswith(said)
    assert command(root, patches, "apply", "--json") == 0
    assert json.loads(capsys.readouterr().out)["changed"] == list(PATCHED)


def test_json_tells_state_digest_files_and_headers(root, patches, capsys):
    assert command(root, patches, "apply", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["megatron_core"], told["patch_set"]) == ("applied", "0.19.2", "0.19.2")
    assert told["digest"] == on_disk.apply(root, patches).patch_set.digest
    assert told["files"] == dict.fromkeys(PATCHED, "patched")
    assert told["patches"][0] == {
        "name": "0.19.2/001-part.patch",
        "what": "opens a seam.",
        "why": "a test needs one.",
        "upstream": "none.",
        "remove_when": "the test goes.",
        "files": ["megatron/core/first.py", "megatron/core/seam.py"],
    }


def test_check_gives_a_row_for_each_seam_of_any_tree(tmp_path, capsys):
    root = small_megatron(tmp_path / "clone", {GPT: FILES[GPT].replace("labels is None", "not labels")})
    before = contents(root)
    assert run(["check", "--target", str(root)]) == 1
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if re.match(r"  \d{3} ", line)]
    assert len(rows) == len(SEAMS) + 1
    assert "megatron-core 0.77.0 (digest" in out
    assert re.search(r"009 final_logits +gone +megatron/core/models/gpt/gpt_model.py:6", out)
    assert "GPTModel._postprocess: GPTModel._postprocess holds no `if labels is None: ...`" in out
    assert re.search(r"step_begins +moved by -\d+ lines .*; the function around it is another", out)
    assert "missing: get_args of megatron.training" in out
    assert f"{len(SEAMS)} of {len(SEAMS) + 1} seams hold" in out
    assert contents(root) == before


def test_check_as_json_and_as_diffs(tmp_path, capsys):
    root = small_megatron(tmp_path / "clone")
    assert run(["check", "--json", "--target", str(root)]) == 1  # seams hold, but a page of Megatron lacks names
    told = json.loads(capsys.readouterr().out)
    assert told["compared_with"] == "0.19.2"
    row = next(row for row in told["seams"] if row["seam"] == "update_done")
    assert (row["file"], row["function"], row["patch"]) == ("megatron/training/training.py", "train_step", 5)
    assert row["there"].startswith("log_max_attention_logit")
    assert {need["what"] for need in told["missing"]} >= {"unwrap_model", "args.padded_vocab_size"}
    run(["check", "--diff", "--target", str(root)])
    diffs = capsys.readouterr().out
    assert "+        seams.update_done(update_successful)\n" in diffs
    assert diffs.count("What: ") == len(HEADERS)


def test_check_of_a_release_is_clean_before_and_after(tmp_path, capsys):
    root = tmp_path / "tree"
    shutil.copytree(
        installed_root() / "megatron", root / "megatron", ignore=shutil.ignore_patterns("__pycache__", "*.so", "bridge")
    )
    for info in installed_root().glob("megatron_core-*.dist-info"):
        shutil.copytree(info, root / info.name)
    for _ in range(2):
        assert run(["check", "--target", str(root)]) == 0
        out = capsys.readouterr().out
        assert "moved" not in out
        assert "; all it reads is there" in out
        assert run(["apply", "--target", str(root)]) == 0
        capsys.readouterr()


def test_bad_input_is_one_sentence_on_standard_error(tmp_path, patches, capsys):
    assert command(tmp_path, patches, "status") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("megatron-stability patch: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("argv", [[], ["aply"], ["apply", "--targt", "x"]])
def test_bad_arguments_exit_with_2(argv):
    with pytest.raises(SystemExit) as stop:
        run(argv)
    assert stop.value.code == 2


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit):
        run(["--help"])
    assert "megatron-stability patch apply --target" in capsys.readouterr().out


def test_an_installed_wheel_finds_its_patches_and_needs_no_megatron(tmp_path, root):
    site = tmp_path / "env/lib/python/site-packages"
    shutil.copytree(Path(megatron_stability.__file__).parent, site / "megatron_stability")
    shared = write_series(tmp_path / "env/share/megatron-stability/patches")
    record = "".join(f"{os.path.relpath(p, site)},,\n" for p in sorted(shared.rglob("*.patch")))
    info = "megatron_stability-0.1.0.dist-info"
    write(
        site,
        {
            f"{info}/METADATA": "Metadata-Version: 2.1\nName: megatron-stability\nVersion: 0.1.0\n",
            f"{info}/RECORD": record,
        },
    )
    code = "import sys; from megatron_stability.megatron.patching.command import run; sys.exit(run(sys.argv[1:]))"
    env = {**os.environ, "PYTHONPATH": str(site)}
    result = subprocess.run(
        [sys.executable, "-c", code, "apply", "--target", str(root)], env=env, cwd=tmp_path, timeout=60, check=False
    )
    assert result.returncode == 0
    assert (root / "megatron/core/second.py").read_text() == PATCHED["megatron/core/second.py"]
