"""docs/flags.md, made from the rows that the code reads.

python ci/flags_page.py --write    write it
python ci/flags_page.py --check    exit 1 if the page differs
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_stability.megatron.access.flags import flag_rows
from megatron_stability.megatron.access.flags.argument_table import Argument, Effect, own_effects, table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "flags.md"
TESTED = ROOT / "ci" / "flags_tested.tsv"  # a cell: file::test, file::a case's name, "refused", or nothing
HEAD = """# Megatron's flags beside the plugin

Made by `ci/flags_page.py` from the rows that the code reads: `access/flags/flag_rows.py` for a start,
`access/flags/arguments.tsv`
for a resume. What the plugin's own model settings can't be with is in prevention.md.
"""
RESUME = {
    Effect.MODEL: "Compared, and refused where it differs: the forward or the loss is another function",
    Effect.UPDATE: "Compared, and refused where it differs: gradients, optimizer, schedule or batch",
    Effect.DATA: "Compared, and refused where it differs: which samples come, and in which order",
    Effect.LAYOUT: "Compared, and told where it differs: how the same sums are shared out, or which kernel does them",
    Effect.INERT: "Not compared: logs, saves, timing, and what only a start from nothing reads",
    Effect.IGNORED: "Read by no part of Megatron's GPT pretraining: told where it is given",
}


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_refused(), "", *_told(), "", *_works(), "", *_resume(), ""])


def _refused() -> Iterator[str]:
    yield "## Refused at the start\n"
    yield "| Flag | With | Why, and the way out |"
    yield "|---|---|---|"
    for row in flag_rows.REFUSED:
        fine = [f"`{value}`" for value in row.fine if value not in (None, False)]
        given = f"`{row.flag}`" + f" other than {', '.join(fine)}" * bool(fine)
        yield f"| {given} | {row.when.words} | {row.why} |"


def _told() -> Iterator[str]:
    yield "## Told, since it works otherwise than alone\n"
    for row in (*flag_rows.TOLD, *flag_rows.AT_A_LOAD):
        yield f"- {row.line}"


def tested() -> Iterator[tuple[str, list[str]]]:
    """Flags, and a cell each for a skip, a rewind and a verified resume."""
    for line in TESTED.read_text(encoding="utf-8").splitlines()[1:]:
        flags, *cells = line.split("\t")
        yield flags, cells


def _works() -> Iterator[str]:
    yield "## Works, as a test shows\n"
    yield (
        "Real runs of a small model on CPUs: a step withheld, a rewind, a resume from a verified checkpoint with this "
        "flag. Files under `tests/drills` are run by hand, their cases by name. An empty cell: no test has this flag "
        "there.\n"
    )
    yield "| Flag | Skip | Rewind | Verified resume |"
    yield "|---|---|---|---|"
    for flags, cells in tested():
        yield f"| `{flags}` | {' | '.join(_cell(each) for each in cells)} |"


def _cell(cell: str) -> str:
    path, _, name = cell.partition("::")
    return f"[{name}](../{path})" if name else cell


def _resume() -> Iterator[str]:
    yield "## At a resume\n"
    yield (
        "`--stability-checkpoint-allow-changes NAME,NAME` lets what is refused differ. With `--skip-train` only the "
        "model's are refused, with `--finetune` none. Names that this table lacks, a fork's own, are refused where "
        "they are a field of the transformer's, the optimizer's or the gradient reduction's configuration, and told "
        "otherwise. What one side lacks has its release's default there.\n"
    )
    ours = own_effects()
    for effect, words in RESUME.items():
        names = [_shown(row) for row in table().values() if row.effect is effect]
        names += [f"`{name}`" for name, own in ours.items() if own is effect]
        yield f"### {words} ({len(names)})\n\n{', '.join(names)}\n"


def _shown(row: Argument) -> str:
    known = sorted(row.defaults)
    newest = max(len(each.defaults) for each in table().values())
    return f"`{row.name}`" + (f" ({known[0]})" if 0 < len(known) < newest else "")


def main(option: str) -> int:
    """As the module says; the exit code."""
    if option == "--write":
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == page():
        return 0
    print("docs/flags.md is not what the rows say; run ci/flags_page.py --write")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
