"""Every default and bound, as they were when the figures in the pages were measured.

    python tests/unit/test_settings.py      writes `settings.txt` anew, for a change that is meant

A default is read by no other test on purpose: tests give the values that they are about.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_stability.config import StabilityConfig

FILE = Path(__file__).with_name("settings.txt")


def plain(schema: Any) -> Any:
    """A JSON schema without its words."""
    if isinstance(schema, dict):
        return {name: plain(value) for name, value in schema.items() if name not in ("title", "description")}
    return [plain(value) for value in schema] if isinstance(schema, list) else schema


def lines() -> list[str]:
    """One a setting, so that a change is one line of a diff."""
    schema = StabilityConfig.model_json_schema()
    sections = {"StabilityConfig": schema, **schema.pop("$defs")}
    return [
        f"{name}.{field} {json.dumps(plain(value), sort_keys=True)}"
        for name, section in sorted(sections.items())
        for field, value in section.get("properties", {}).items()
    ]


def test_no_default_and_no_bound_changes_unnoticed() -> None:
    kept = FILE.read_text(encoding="utf-8").splitlines()
    assert lines() == kept, f"write {FILE.name} anew, if the change is meant: python tests/unit/{Path(__file__).name}"


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n", encoding="utf-8")
