"""The command's table, exit codes and messages; no test here imports torch or Megatron in this process."""

import os
import subprocess
import sys
import types

import pytest

from megatron_stability import __version__, cli, extras
from megatron_stability.errors import UsageError


@pytest.fixture
def command(monkeypatch):
    """Puts a module with one function in the place of `report`'s, and returns a setter for that function."""

    def place(function):
        module = types.ModuleType("megatron_stability.report.command")
        module.run = function
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return place


def test_importing_the_command_pulls_in_neither_torch_nor_megatron():
    code = "import sys, megatron_stability.cli; print({'torch', 'megatron', 'numpy'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "set()"


def test_help_and_version_go_to_stdout(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr()
    assert all(f"  {command.name} " in shown.out for command in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"megatron-stability {__version__}\n"


def test_no_command_shows_the_help_on_stderr_and_is_unusable_input(capsys):
    assert cli.main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "usage:" in shown.err


def test_an_unknown_command_gets_the_nearest_name(capsys):
    assert cli.main(["prepare_data"]) == 2
    assert capsys.readouterr().err == (
        "megatron-stability: there is no command `prepare_data`; did you mean `prepare-data`?\n"
    )
    assert cli.main(["--verbose"]) == 2
    assert "no option `--verbose`; the commands are pretrain," in capsys.readouterr().err


def test_a_command_gets_its_arguments_and_gives_its_exit_code(command):
    seen = []
    command(lambda argv: seen.append(argv) or 1)
    assert cli.main(["report", "--json", "x"]) == 1
    assert seen == [["--json", "x"]]


def test_unusable_input_is_one_sentence_without_a_traceback(command, capsys):
    def fail(argv):
        raise UsageError("--out is not writable; choose another folder.")

    command(fail)
    assert cli.main(["report"]) == 2
    assert capsys.readouterr().err == "megatron-stability report: --out is not writable; choose another folder.\n"


def test_an_interrupt_ends_with_the_shell_code(command):
    def interrupt(argv):
        raise KeyboardInterrupt

    command(interrupt)
    assert cli.main(["report"]) == 130


def test_a_missing_extra_is_named_and_any_other_missing_module_is_a_programming_error(command, capsys):
    def need(name):
        def run(argv):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        return run

    command(need("megatron.core"))
    assert cli.main(["report"]) == 2
    assert extras.command("megatron") in capsys.readouterr().err
    command(need("my_own_helpers"))
    with pytest.raises(ModuleNotFoundError, match="my_own_helpers"):
        cli.main(["report"])


def test_a_file_name_that_is_not_utf8_is_printed_as_its_bytes():
    code = (
        "import sys, megatron_stability.cli as cli; cli.usage = lambda: 'a' + chr(0xDCFF); sys.exit(cli.main(['-h']))"
    )
    shown = subprocess.run([sys.executable, "-X", "utf8", "-c", code], capture_output=True, timeout=60)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, b"a\xff\n", b"")


def test_a_reader_that_leaves_early_is_no_error_and_any_other_broken_pipe_is(command):
    read, write = os.pipe()
    os.close(read)  # the reader is gone before the first word
    shown = subprocess.run(
        [sys.executable, "-m", "megatron_stability.cli", "--help"], stdout=write, stderr=subprocess.PIPE, timeout=60
    )
    os.close(write)
    assert (shown.returncode, shown.stderr) == (cli.EXIT_UNREAD, b"")

    def other(argv):
        raise BrokenPipeError("a worker's")

    command(other)
    with pytest.raises(BrokenPipeError, match="a worker's"):
        cli.main(["report"])
