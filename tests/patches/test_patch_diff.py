"""diff.py: exact application and reversal, against difflib and `git apply`, and what it refuses."""

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patch_tools import HEADER, lines, unified

from megatron_stability.errors import UsageError
from megatron_stability.megatron.patching.diff import (
    ContextError,
    apply_text,
    parse_patch,
    read_text,
    revert_text,
    to_bytes,
)
from tests import effort

PATH = "megatron/core/x.py"
NUMBERED = "".join(f"line {n}\n" for n in range(1, 41))
# Few distinct lines, so that contexts repeat; odd line breaks, which must not split a line.
LINE = st.sampled_from(
    ["a", "b", "", " ", "-", "+x", "\\ No newline", "@@ -1 +1 @@", "--- a/x", "c\r", "d\x0ce", "é\u2028f"]
)
TEXT = st.builds(
    lambda body, end: "\n".join(body) + end if body else "", st.lists(LINE, max_size=12), st.sampled_from(["", "\n"])
)


def one(diff: str):
    """The only FileDiff of a patch made of `diff`."""
    (file_diff,) = parse_patch(HEADER + diff, "0.19.2/001-x.patch").files
    return file_diff


@given(old=TEXT, new=TEXT, context=st.integers(1, 4))
@settings(max_examples=effort.examples(150, 800), deadline=None)
def test_applies_and_reverts_what_difflib_wrote(old: str, new: str, context: int):
    diff = unified(PATH, old, new, context)
    if diff:
        assert apply_text(old, one(diff)) == new
        assert revert_text(new, one(diff)) == old


@given(old=TEXT, new=TEXT, other=TEXT)
@settings(max_examples=effort.examples(150, 800), deadline=None)
def test_fits_another_text_only_where_every_old_line_stands_in_place(old: str, new: str, other: str):
    diff = unified(PATH, old, new)
    if not diff:
        return
    try:
        result = apply_text(other, one(diff))
    except ContextError:
        return
    for hunk in one(diff).hunks:
        assert tuple(lines(other)[hunk.old_index : hunk.old_index + len(hunk.old)]) == hunk.old
        assert tuple(lines(result)[hunk.new_index : hunk.new_index + len(hunk.new)]) == hunk.new
    assert revert_text(result, one(diff)) == other


@given(data=st.binary(max_size=60))
def test_text_keeps_every_byte(tmp_path_factory, data: bytes):
    file = tmp_path_factory.mktemp("bytes") / "x.py"
    file.write_bytes(data)
    assert to_bytes(read_text(file)) == data


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (NUMBERED, NUMBERED.replace("line 5\n", "").replace("line 30\n", "line 30\nmore\n")),
        ("a\nb", "a\nb\n"),
        ("a\nb\n", "a\nc"),
        ("a\r\nb\r\n", "a\r\nb\r\nc\r\n"),
        ("", "new\n"),
        ("gone\n", ""),
        (None, "created\nwithout newline"),
    ],
)
def test_agrees_with_git_apply(tmp_path, old: str | None, new: str):
    file = tmp_path / PATH
    file.parent.mkdir(parents=True)
    if old is not None:
        file.write_bytes(old.encode())
    (tmp_path / "x.patch").write_bytes((HEADER + unified(PATH, old, new)).encode())
    subprocess.run(["git", "apply", "x.patch"], cwd=tmp_path, check=True, timeout=60)
    assert apply_text(old or "", one(unified(PATH, old, new))) == file.read_bytes().decode() == new


def test_parses_what_git_diff_writes(tmp_path):
    (tmp_path / "megatron/core").mkdir(parents=True)
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / PATH).write_text(NUMBERED)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "stock"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True, timeout=60)
    (tmp_path / PATH).write_text(NUMBERED.replace("line 7\n", "seven\n"))
    (tmp_path / "megatron/core/new.py").write_text("NEW = 1\n")
    subprocess.run([*git, "add", "."], cwd=tmp_path, check=True, timeout=60)
    diff = subprocess.run([*git, "diff", "--cached"], cwd=tmp_path, check=True, timeout=60, stdout=-1, text=True).stdout
    new, changed = parse_patch(HEADER + diff, "x.patch").files
    assert (new.path, new.creates, apply_text("", new)) == ("megatron/core/new.py", True, "NEW = 1\n")
    assert apply_text(NUMBERED, changed) == (tmp_path / PATH).read_text()


def test_header_is_read_and_may_go_on_over_lines():
    patch = parse_patch("Prose before.\n" + HEADER + unified(PATH, "a\n", "b\n") + "\n", "001-x.patch")
    assert (patch.what, patch.why, patch.upstream, patch.remove_when) == (
        "opens a seam.",
        "a test needs one.",
        "none.",
        "the test goes.",
    )


def test_a_context_line_that_an_editor_stripped_is_still_an_empty_line():
    diff = unified(PATH, "\na\n", "\nb\n").replace("\n \n", "\n\n")
    assert apply_text("\na\n", one(diff)) == "\nb\n"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (NUMBERED.replace("line 9\n", "other\n"), r"hunk 1, line 9: expected 'line 9\\n', found 'other\\n'"),
        (NUMBERED.replace("line 30\n", "line 30 \n"), r"hunk 2, line 30: expected 'line 30\\n', found 'line 30 \\n'"),
        ("added\n" + NUMBERED, r"hunk 1, line 7: .*now start at line 8, not 7"),
        ("".join(lines(NUMBERED)[:31]), r"hunk 2, line 32: .*found the end of the file"),
    ],
)
def test_an_error_names_patch_file_hunk_line_and_both_texts(found: str, said: str):
    new = NUMBERED.replace("line 10\n", "ten\n").replace("line 30\n", "thirty\n")
    with pytest.raises(ContextError, match=rf"^0.19.2/001-x.patch does not fit megatron/core/x.py: {said}"):
        apply_text(found, one(unified(PATH, NUMBERED, new)))


def test_a_new_last_line_without_newline_must_be_the_last():
    diff = unified(PATH, "a\nb\n", "a\nc")
    with pytest.raises(ContextError, match="line 3: expected the end of the file, found 'more"):
        apply_text("a\nb\nmore\n", one(diff))


def test_removing_every_line_fits_a_file_of_these_lines_only():
    with pytest.raises(ContextError, match="may only remove a whole file"):
        apply_text("a\nb\n", one(unified(PATH, "a\n", "")))


GOOD = unified(PATH, NUMBERED, NUMBERED.replace("line 5\n", "five\n").replace("line 30\n", "thirty\n"))


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        (HEADER.replace("Why:", "Because:") + GOOD, "lacks Why:"),
        (HEADER.replace("Upstream: none.", "Upstream:") + GOOD, "lacks Upstream:"),
        (HEADER + "What: again\n" + GOOD, "says 'What' twice"),
        (HEADER, "no diff follows"),
        (HEADER + GOOD[:-1], "last line has no newline"),
        (HEADER + GOOD[: GOOD.rindex(" line 33")], "ends in the middle"),
        (HEADER + GOOD.replace("@@ -27,7 +27,7 @@", "@@ -27,7 +28,7 @@"), "does not agree with the hunk before"),
        (HEADER + GOOD.replace("@@ -27,7 +27,7 @@", "@@ -4,7 +4,7 @@"), "does not agree with the hunk before"),
        (HEADER + GOOD.replace("@@ -2,7 +2,7 @@", "@@ -2,6 +2,7 @@"), "do not add up|expected '--- a/PATH'|malformed"),
        (HEADER + GOOD.replace("@@ -2,7 +2,7 @@", "@@ two @@"), "malformed hunk header"),
        (HEADER + GOOD.replace("-line 5", "*line 5"), "expected a line of the hunk"),
        (HEADER + GOOD.replace(f"b/{PATH}", "b/megatron/core/y.py"), "renames are not supported"),
        (HEADER + GOOD.replace(f"+++ b/{PATH}", "+++ /dev/null"), "deletions are not supported"),
        (HEADER + GOOD.replace(PATH, "megatron/../../x.py"), "not a plain path"),
        (HEADER + "diff --git a/x b/x\nold mode 100644\nnew mode 100755\n", "only changed and new text files"),
        (HEADER + unified(PATH, NUMBERED, NUMBERED + "more\n", 0), "has no context"),
    ],
)
def test_a_malformed_patch_is_refused(patch: str, said: str):
    with pytest.raises(UsageError, match=f"^001-x.patch.*({said})"):
        parse_patch(patch, "001-x.patch")
