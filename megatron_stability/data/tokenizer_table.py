"""The bytes that each id of a tokenizer stands for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_stability import files
from megatron_stability.data.byte_classes import ByteClasses, of_table
from megatron_stability.data.tokenizers import BYTE_VALUES
from megatron_stability.errors import UsageError

SPACE = "▁"  # how SentencePiece writes a space


def _byte_level() -> Mapping[str, int]:
    """How byte-level BPE vocabularies write bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(BYTE_VALUES) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(rest)}


BYTE_LEVEL = MappingProxyType(_byte_level())


def byte_classes(file: Path | None) -> ByteClasses:
    """Of a tokenizer.

    Args:
        file: `*.json` (tokenizers) or `*.model` (SentencePiece); None for bytes, ids 0 to 255 and one for the end.

    Raises:
        UsageError: the file is of another kind or damaged.
    """
    if file is None:
        return of_table([*(bytes([byte]) for byte in range(BYTE_VALUES)), b""])
    if file.suffix == ".model":
        return of_table(_of_sentencepiece(file))
    try:
        said = files.read_json(file)
        return of_table(_of_tokenizers(said))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"--tokenizer {file}: its vocabulary can't be read ({error!r})") from None


def _of_tokenizers(said: Any) -> list[bytes]:
    model = said["model"]
    words = model["vocab"]
    numbered = words.items() if isinstance(words, dict) else ((word, at) for at, (word, _) in enumerate(words))
    by_id = {int(at): word for word, at in numbered}
    special = {int(each["id"]): each["content"] for each in said.get("added_tokens") or ()}
    level = "ByteLevel" in str(said.get("decoder")) or "ByteLevel" in str(said.get("pre_tokenizer"))
    table = [b""] * (1 + max(max(by_id, default=-1), max(special, default=-1)))
    for at, word in by_id.items():
        if at not in special:
            table[at] = _bytes_of(word, level)
    return table


def _bytes_of(word: str, level: bool) -> bytes:
    if level and all(character in BYTE_LEVEL for character in word):
        return bytes(BYTE_LEVEL[character] for character in word)
    if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):  # byte fallback
        return bytes([int(word[3:5], 16)])
    return word.replace(SPACE, " ").removeprefix("##").encode()


def _of_sentencepiece(file: Path) -> list[bytes]:
    from sentencepiece import SentencePieceProcessor

    processor: Any = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(files.read_bytes(file))
    except (OSError, RuntimeError) as error:
        raise UsageError(f"--tokenizer {file} is not a SentencePiece model ({error}).") from error
    silent = (processor.IsControl, processor.IsUnknown, processor.IsUnused)
    return [
        b"" if any(each(at) for each in silent) else _bytes_of(processor.IdToPiece(at), level=False)
        for at in range(processor.GetPieceSize())
    ]
