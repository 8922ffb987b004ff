"""The table of docs/preflight.md, from the checks that `preflight` makes.

python ci/preflight_page.py --write    write it
python ci/preflight_page.py --check    exit 1 if the page differs
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from megatron_stability.preflight.checks import CHECKS

PAGE = Path(__file__).parents[1] / "docs" / "preflight.md"


def page(text: str) -> str:
    """The page with its table as the checks are now."""
    rows = ["| Check | Of | Why | Mended by | From |", "|---|---|---|---|---|"]
    for name, check in CHECKS.items():
        kinds = ", ".join(check.profiles) or "all"
        rows.append(f"| {name} | {kinds} | {check.why} | {check.mend} | {check.source} |")
    table = "\n".join(rows) + "\n"
    return re.sub(r"(<!-- checks -->\n).*?(<!-- end -->)", lambda m: m[1] + table + m[2], text, flags=re.S)


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
