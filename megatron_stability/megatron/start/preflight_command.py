"""`megatron-stability preflight -- COMMAND`: what is known to go wrong, looked for in a training command.

Nothing is started and Megatron is not imported: flags are read by `arguments.tsv`, so it runs on a login node in a
second. What a flag may not be, Megatron's own parser says when `pretrain` judges it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from rich.markup import escape

from megatron_stability import config as tree
from megatron_stability import terminal
from megatron_stability.errors import EXIT_FINDING, EXIT_FINE, UsageError
from megatron_stability.megatron.access.flags import argument_table
from megatron_stability.preflight.checks import CHECKS, PROFILES, applies, judge, profile_of
from megatron_stability.preflight.judges import Found, Outcome
from megatron_stability.preflight.plan import Plan, free_bytes

COLOURS = {Outcome.PASS: "green", Outcome.WARN: "yellow", Outcome.FAIL: "bold red", Outcome.SKIP: "dim"}
ORDER = (Outcome.SKIP, Outcome.PASS, Outcome.WARN, Outcome.FAIL)
LAUNCHERS = frozenset({"--nproc", "--nproc-per-node", "--nproc_per_node", "--cpu"})  # ours and torchrun's


def run(argv: Sequence[str]) -> int:
    """The command.

    Args:
        argv: its options, `--`, and a training command.

    Returns:
        1 where a check fails, else 0.

    Raises:
        UsageError: there is no training command, or a setting of the plugin is impossible.
    """
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:at])
    flags = training_flags(words[at + 1 :])
    plan, unknown = read(flags)
    profile = options.profile or profile_of(plan)
    found = {name: each for name, each in judge(plan).items() if applies(name, profile)}
    if options.json:
        rows = {name: {"outcome": each.outcome.value, "says": each.says} | _row(name) for name, each in found.items()}
        json.dump({"profile": profile, "checks": rows, "unknown_flags": unknown}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        _show(found, profile, unknown, options.all)
    return EXIT_FINDING if any(each.outcome is Outcome.FAIL for each in found.values()) else EXIT_FINE


def training_flags(command: Sequence[str]) -> list[str]:
    """Megatron's flags of a training command: what follows `pretrain` or the script.

    Args:
        command: `pretrain FLAGS`, `run SCRIPT FLAGS`, or any launcher's line up to a script and its flags.

    Raises:
        UsageError: there are none.
    """
    scripts = [at for at, word in enumerate(command) if word == "pretrain" or word.endswith(".py")]
    flags = list(command[scripts[0] + 1 :]) if scripts else list(command)
    if not flags or not flags[0].startswith("-"):
        raise UsageError(
            "after -- stands a training command: -- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ..."
        )
    return flags


def read(flags: Sequence[str]) -> tuple[Plan, list[str]]:
    """A plan from Megatron's flags and the plugin's, and the flags that nobody here knows.

    Args:
        flags: as on the command line.

    Raises:
        UsageError: a setting of the plugin is impossible.
    """
    own, rest = tree.add_flags(argparse.ArgumentParser(allow_abbrev=False, add_help=False)).parse_known_args(
        list(flags)
    )
    rows = {row.flag: row for row in argument_table.table().values() if row.flag}
    values: dict[str, Any] = {name: row.newest_default for name, row in argument_table.table().items()}
    unknown = []
    for flag, words in _groups(rest):
        row = rows.get(flag)
        if row is not None:
            values[row.name] = _value(words, row.newest_default)
        elif flag not in LAUNCHERS:
            unknown.append(flag)
    config = tree.load(overrides=vars(own))
    return Plan(values, config, dict(os.environ), free_bytes(values["save"])), unknown


def _groups(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each flag with the words up to the next one; `--flag=value` too."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            found.append((flag, [value] if equals else []))
        elif found:
            found[-1][1].append(word)
    return found


def _value(words: Sequence[str], default: Any) -> Any:
    """As Megatron's parser would give it, for what the checks read: a switch, a number, a word or several."""
    if not words:
        return not default if isinstance(default, bool) else True
    values = [_literal(word) for word in words]
    return values[0] if len(values) == 1 else values


def _literal(word: str) -> Any:
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return word
    return value if isinstance(value, int | float) else word


def _row(name: str) -> dict[str, str]:
    check = CHECKS[name]
    return {"why": check.why, "mend": check.mend, "source": check.source}


def _show(found: dict[str, Found], profile: str, unknown: Sequence[str], everything: bool) -> None:
    console = terminal.console()
    shown = {name: each for name, each in found.items() if everything or each.outcome in (Outcome.WARN, Outcome.FAIL)}
    for name, each in sorted(shown.items(), key=lambda item: -ORDER.index(item[1].outcome)):
        row = _row(name)
        console.print(f"[{COLOURS[each.outcome]}]{each.outcome.upper()}[/] [bold]{name}[/bold]: {escape(each.says)}")
        if each.outcome in (Outcome.WARN, Outcome.FAIL):
            console.print(f"     {row['why']} ({row['source']})", markup=False, highlight=False)
            console.print(f"     mended by {row['mend']}", markup=False, highlight=False)
    counts = [f"{sum(each.outcome is outcome for each in found.values())} {outcome}" for outcome in Outcome]
    console.print(f"profile {profile}: {', '.join(counts)}", markup=False)
    if unknown:
        console.print(f"not looked at, for no check reads them: {', '.join(unknown)}", markup=False, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-stability preflight",
        usage="megatron-stability preflight [--profile P] [--all] [--json] -- TRAINING COMMAND",
        description="Looks for what is known to go wrong in a training command, before it starts. Nothing is run.",
        epilog="example: megatron-stability preflight -- torchrun --nproc-per-node 8 pretrain_gpt.py FLAGS ... "
        "Exit codes: 0 nothing must break, 1 a check fails, 2 unusable input.",
        allow_abbrev=False,
    )
    parser.add_argument("--profile", choices=PROFILES, help="kind of run whose checks are made (default: by the flags)")
    parser.add_argument("--all", action="store_true", help="show what passes and what is not known, too")
    parser.add_argument("--json", action="store_true", help="print every check as JSON")
    return parser
