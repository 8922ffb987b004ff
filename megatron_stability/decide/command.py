"""`megatron-stability policy`: what each preset of `decide.preset` does."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from megatron_stability.decide import presets
from megatron_stability.decide.config import Decide
from megatron_stability.errors import EXIT_FINE, UsageError

EXAMPLE = "example: megatron-stability policy show field"


def run(argv: Sequence[str]) -> int:
    """List the presets, or show one.

    Args:
        argv: the arguments after the command's name.

    Returns:
        The exit code.

    Raises:
        UsageError: there is no such preset.
    """
    parser = argparse.ArgumentParser("megatron-stability policy", description=__doc__, epilog=EXAMPLE)
    parser.add_argument("--json", action="store_true", help="for machines")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the presets, a line each", epilog="example: megatron-stability policy list")
    show = commands.add_parser("show", help="a preset as a file: copy it to change it", epilog=EXAMPLE)
    show.add_argument("name", help=f"one of {', '.join(presets.NAMES)}")
    args = parser.parse_args(argv)
    if args.command == "list":
        listed = {name: presets.about(name) for name in presets.NAMES}
        default = {name: " (default)" if name == presets.DEFAULT else "" for name in listed}
        lines = [f"{name}{default[name]}: {about}" for name, about in listed.items()]
        print(json.dumps(listed, indent=1) if args.json else "\n".join(lines))
        return EXIT_FINE
    try:
        shown = presets.text(args.name)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if args.json:
        print(Decide.model_validate({"preset": args.name}).model_dump_json(indent=1))
    else:
        print(shown, end="")
    return EXIT_FINE
