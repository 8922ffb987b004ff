"""The two tables of docs/triage.md, from the rules that `triage` weighs.

python ci/triage_page.py --write    write them
python ci/triage_page.py --check    exit 1 if the page differs
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from megatron_stability.explain.facts import FACTS
from megatron_stability.explain.rules import CAUSES, RULES, Class

PAGE = Path(__file__).parents[1] / "docs" / "triage.md"


def page(text: str) -> str:
    """The page with its tables as the rules are now."""
    for name, table in (("causes", _causes()), ("facts", _facts())):
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m, t=table: m[1] + t + m[2], text, flags=re.S)
    return text


def _causes() -> str:
    rows = ["| Class | Cause | Claim | Next | Prevents |", "|---|---|---|---|---|"]
    for name, cause in CAUSES.items():
        if cause.kind is not Class.NONE:
            commands = "; ".join(f"`{each}`" for each in cause.next)
            rows.append(f"| {cause.kind} | {name} | {cause.says} | {commands} | {cause.prevents} |")
    return "\n".join(rows) + "\n"


def _facts() -> str:
    rows = ["| Fact | For | Against | Measured by |", "|---|---|---|---|"]
    for rule in RULES:
        weights = [(cause, weight, f"{abs(weight):g}") for cause, weight in rule.holds.items()]
        weights += [(cause, weight, f"({abs(weight):g})") for cause, weight in rule.fails.items()]
        cells = [
            ", ".join(f"{cause} {said}" for cause, weight, said in weights if (weight > 0) is positive)
            for positive in (True, False)
        ]
        rows.append(f"| {rule.fact} | {cells[0]} | {cells[1]} | {FACTS[rule.fact].flag or 'every run'} |")
    return "\n".join(rows) + "\n"


def main(option: str) -> int:
    """Write the page, or compare it; 1 where it differs."""
    written = PAGE.read_text(encoding="utf-8")
    if option == "--write":
        PAGE.write_text(page(written), encoding="utf-8")
        return 0
    return int(page(written) != written)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ("--write", "--check"):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
