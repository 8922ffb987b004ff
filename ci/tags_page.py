"""The tables of docs/tags.md, from the tags that are written.

python ci/tags_page.py --write    write them
python ci/tags_page.py --check    exit 1 if the page differs
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from megatron_stability.report import tags

PAGE = Path(__file__).parents[1] / "docs" / "tags.md"


def page(text: str) -> str:
    """The page with its tables as the tags are now."""
    for name, table in (("run", _run()), ("layers", _layers())):
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m, t=table: m[1] + t + m[2], text, flags=re.S)
    return text


def _run() -> str:
    lines = ["| Tag | Unit | Written | |", "|---|---|---|---|"]
    lines += [f"| `{tags.PREFIX}{name}` | {row.unit} | {row.when} | {row.says} |" for name, row in tags.rows().items()]
    return "\n".join(lines) + "\n"


def _layers() -> str:
    lines = ["| Tag | Unit | | Of a layer |", "|---|---|---|---|"]
    for name, (_, over_heads, row) in tags.CURVES.items():
        lines.append(
            f"| `{tags.PREFIX}{name}/LAYER` | {row.unit} | {row.says} | the {over_heads.__name__} over heads |"
        )
    lines.append(f"| `{tags.PREFIX}{tags.MAX_GAIN}/LAYER` | | max\\|γ\\| of QK-norm | |")
    return "\n".join(lines) + "\n"


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
