"""What a run reads, without files."""

from __future__ import annotations

from typing import Any

from megatron_stability.checkpoints.manifest import DataFile


class Read:
    """As `RunFiles`, of whose files it is told."""

    def __init__(self, data: tuple[DataFile, ...] = (), tokenizer: str = "t") -> None:
        self.hashes, self.data = {"code": "c", "tokenizer": tokenizer}, data

    def found(self) -> Read:
        return self

    def known(self) -> dict[str, Any]:
        return {"hashes": self.hashes, "data": self.data}


def data_file(prefix: str, blocks: str) -> DataFile:
    return DataFile(split="all", weight=None, prefix=prefix, size=4, index="i", blocks=blocks)


DATA = (data_file("a", "1"), data_file("b", "2"))
