"""Writes the diffs of the supported releases anew, from the table of seams: `patches/VERSION/*.patch` and `seams.json`.

usage: python ci/make_patches.py STOCK_TREE...
A tree is a site-packages folder with an unpatched megatron-core of a release that has a folder in `patches/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_stability.megatron.patching.anchor.by_anchor import read_files, refusal
from megatron_stability.megatron.patching.anchor.known import known_json
from megatron_stability.megatron.patching.patch_set import patches_root
from megatron_stability.megatron.patching.series import Placed, render
from megatron_stability.megatron.patching.tree import detect_version


def write(root: Path) -> None:
    """The folder of one release."""
    files = read_files(root)
    if not all(file.holds for file in files) or any(file.applied for file in files):
        sys.exit(f"{root} is no stock tree in which every seam holds: {refusal(files)}")
    folder = patches_root() / detect_version(root)[0]
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.patch"):
        old.unlink()
    placed = [Placed(file.path, file.stock, file.placements) for file in files if file.stock is not None]
    for name, text in render(placed).items():
        (folder / f"{name}.patch").write_bytes(text.encode("utf-8", "surrogateescape"))
    (folder / "seams.json").write_text(known_json(placed), encoding="utf-8")
    print(f"{folder.name}: {len(list(folder.glob('*.patch')))} patches")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for argument in sys.argv[1:]:
        write(Path(argument))
