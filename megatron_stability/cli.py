"""The command `megatron-stability`: a table of subcommands, each imported when it is called.

Importing this module pulls in neither torch nor Megatron, so that `--help` answers at once and on any machine.
"""

import difflib
import importlib
import io
import os
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_stability import __version__, extras
from megatron_stability.errors import EXIT_FINE, EXIT_UNUSABLE, UsageError

PROGRAM = "megatron-stability"
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_UNREAD = 141  # 128 + SIGPIPE


@dataclass(frozen=True)
class Command:
    """One subcommand: where its function `(argv: list[str]) -> int` lives, and its line in the help."""

    name: str
    module: str
    function: str
    help: str


COMMANDS = (
    Command(
        "pretrain", "megatron_stability.megatron.start.command", "pretrain", "train a GPT with Megatron and this plugin"
    ),
    Command(
        "run", "megatron_stability.megatron.start.command", "run_script", "run an unmodified pretrain_gpt.py with it"
    ),
    Command("nemo", "megatron_stability.nemo.launch", "run", "train from a NeMo YAML recipe, on Megatron-Bridge"),
    Command("patch", "megatron_stability.megatron.patching.command", "run", "open the seams in an installed Megatron"),
    Command(
        "preflight",
        "megatron_stability.megatron.start.preflight_command",
        "run",
        "what a training command lacks, before it starts",
    ),
    Command("prepare-data", "megatron_stability.megatron.start.prepare_data", "run", "make data files from text"),
    Command("audit-data", "megatron_stability.data.audit.command", "run", "find bad documents before they train"),
    Command("checkpoint", "megatron_stability.checkpoints.command", "run", "list, verify, drill checkpoints"),
    Command(
        "cadence", "megatron_stability.checkpoints.cadence.command", "run", "how often to save, from measured costs"
    ),
    Command("policy", "megatron_stability.decide.command", "run", "what each preset of decide.preset does"),
    Command("report", "megatron_stability.report.command", "run", "write the HTML report of a run"),
    Command(
        "compare", "megatron_stability.fp8_compare.command", "run", "an FP8 run against its BF16 control, with a gate"
    ),
    Command("watch", "megatron_stability.watch.command", "run", "see runs from outside, and tell people"),
    Command("incident", "megatron_stability.explain.incident_command", "run", "what happened at a step, on one page"),
    Command("sample", "megatron_stability.explain.incident_command", "sample", "what stands in a sample, who read it"),
    Command(
        "triage", "megatron_stability.explain.command", "run", "likely causes of an incident, and what to run next"
    ),
    Command("replay", "megatron_stability.explain.replay_command", "run", "an incident again, one thing changed"),
    Command(
        "fp8-readiness",
        "megatron_stability.megatron.start.readiness_command",
        "run",
        "which linears would bear FP8",
    ),
    Command("doctor", "megatron_stability.doctor", "run", "what is installed, and whether FP8 can be active"),
    Command(
        "quickstart", "megatron_stability.megatron.start.quickstart", "run", "train a small GPT with and without it"
    ),
)


def usage() -> str:
    """The text of `megatron-stability --help`."""
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  {command.name:<{width}}  {command.help}" for command in COMMANDS]
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND ...",
            "",
            "Prevents, sees, decides on, undoes and explains training instabilities of Megatron pretraining.",
            "",
            "commands:",
            *lines,
            "",
            f"`{PROGRAM} COMMAND --help` explains one. `--version` prints the version.",
            f"Example: {PROGRAM} prepare-data docs/ --output data/docs",
            "Exit codes: 0 fine, 1 a finding, 2 unusable input, 130 interrupted.",
        ]
    )


def find(name: str) -> Command:
    """The command called `name`.

    Args:
        name: what the user typed.

    Returns:
        Its row of `COMMANDS`.

    Raises:
        UsageError: there is none; the message suggests the nearest name.
    """
    by_name = {command.name: command for command in COMMANDS}
    if name in by_name:
        return by_name[name]
    near = difflib.get_close_matches(name, by_name, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"the commands are {', '.join(by_name)}."
    kind = "option" if name.startswith("-") else "command"
    raise UsageError(f"there is no {kind} `{name}`; {hint}")


def call(command: Command, argv: list[str]) -> int:
    """Imports the command's module and runs it.

    Args:
        command: the row of `COMMANDS`.
        argv: the arguments after its name.

    Returns:
        The exit code.

    Raises:
        UsageError: the input is unusable, or a package that the command needs is not installed.
    """
    try:
        function: Callable[[list[str]], int] = getattr(importlib.import_module(command.module), command.function)
        return function(argv)
    except ModuleNotFoundError as error:
        extra = extras.EXTRAS.get(error.name or "")
        if extra is None:
            raise
        raise UsageError(
            f"the package `{error.name}` is not installed; `{extras.command(extra)}` brings it."
        ) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code; `argv` defaults to the process's arguments."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # a file name that is not UTF-8 is printed as its bytes
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _nobody_reads_stdout():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the interpreter's own flush at exit has where to go
        return EXIT_UNREAD


def _run(arguments: list[str]) -> int:
    if not arguments:
        print(usage(), file=sys.stderr)
        return EXIT_UNUSABLE
    if arguments[0] in ("-h", "--help"):
        print(usage())
        return EXIT_FINE
    if arguments[0] == "--version":
        print(f"{PROGRAM} {__version__}")
        return EXIT_FINE
    prefix = PROGRAM
    try:
        command = find(arguments[0])
        prefix = f"{PROGRAM} {command.name}"
        return call(command, arguments[1:])
    except UsageError as error:
        print(f"{prefix}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{prefix}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _nobody_reads_stdout() -> bool:
    """Whether standard output is a pipe whose reader is gone, as in `… | head`; other broken pipes are errors."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
