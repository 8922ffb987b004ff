"""Text to token ids for `prepare-data`: bytes, a `tokenizers` JSON file or a SentencePiece model.

The ids alone go into the data set, so that training needs no tokenizer file: Megatron's NullTokenizer, given the
vocabulary size and the end-of-document id, stands in for any of them.
"""

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_stability import files
from megatron_stability.errors import UsageError

Ids = npt.NDArray[np.int64]
BYTE_VALUES = 256


class Tokenizer(Protocol):
    """What `prepare-data` asks of a tokenizer."""

    kind: str
    vocab_size: int
    """V: one more than the largest id."""
    eod_id: int

    def encode(self, text: bytes) -> Ids:
        """Ids [n] of a text given as UTF-8; UnicodeDecodeError where the tokenizer needs characters and gets none."""


class ByteTokenizer:
    """Ids 0..255 are the bytes themselves, 256 ends a document. Any input is valid and comes back exactly."""

    kind = "bytes"
    vocab_size = BYTE_VALUES + 1
    eod_id = BYTE_VALUES

    def encode(self, text: bytes) -> Ids:
        """Ids [len(text)]."""
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)


class HuggingFaceTokenizer:
    """A `tokenizer.json` of the `tokenizers` library. Text that spells a special token stays text."""

    kind = "tokenizers"

    def __init__(self, file: Path, eod_token: str | None) -> None:
        from tokenizers import Tokenizer as Loaded

        try:
            self._tokenizer = Loaded.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise UsageError(f"--tokenizer {file} is not a tokenizers JSON file ({error}).") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        token = eod_token if eod_token is not None else _eos_token_beside(file)
        if token is None:
            raise UsageError(f"--tokenizer {file} does not say which token ends a document; name it with --eod-token.")
        eod_id = self._tokenizer.token_to_id(token)
        if eod_id is None:
            raise UsageError(f"--eod-token {token!r} is not in the vocabulary of {file}.")
        self.eod_id: int = eod_id

    def encode(self, text: bytes) -> Ids:
        """Ids of the text alone, without the special tokens that a template would add."""
        return np.asarray(self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False).ids, dtype=np.int64)


class SentencePieceTokenizer:
    """A SentencePiece `.model`. Control pieces never come out of text."""

    kind = "sentencepiece"

    def __init__(self, file: Path, eod_token: str | None) -> None:
        from sentencepiece import SentencePieceProcessor

        self._processor: Any = SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(files.read_bytes(file))
        except RuntimeError as error:
            raise UsageError(f"--tokenizer {file} is not a SentencePiece model ({error}).") from error
        self.vocab_size: int = self._processor.GetPieceSize()
        if eod_token is None:
            self.eod_id: int = self._processor.eos_id()
            if self.eod_id < 0:
                raise UsageError(f"--tokenizer {file} has no end-of-sentence piece; name one with --eod-token.")
        else:
            self.eod_id = self._processor.PieceToId(eod_token)
            if self._processor.IdToPiece(self.eod_id) != eod_token:
                raise UsageError(f"--eod-token {eod_token!r} is not in the vocabulary of {file}.")

    def encode(self, text: bytes) -> Ids:
        """Ids of the text, without begin or end pieces."""
        return np.asarray(self._processor.EncodeAsIds(text.decode("utf-8")), dtype=np.int64)


def load(file: Path | None, eod_token: str | None) -> Tokenizer:
    """The tokenizer that `--tokenizer` names; bytes without it.

    Args:
        file: `*.json` (tokenizers) or `*.model` (SentencePiece), or None.
        eod_token: the token that ends a document, where the file does not say or says otherwise.

    Returns:
        A tokenizer ready to encode.

    Raises:
        UsageError: the file is missing, of another kind or corrupt, or the token is not in it.
    """
    if file is None:
        if eod_token is not None:
            raise UsageError("--eod-token needs --tokenizer; byte-level data always end a document with id 256.")
        return ByteTokenizer()
    if not file.is_file():
        raise UsageError(f"--tokenizer {file} is not a file.")
    if file.suffix == ".json":
        return HuggingFaceTokenizer(file, eod_token)
    if file.suffix == ".model":
        return SentencePieceTokenizer(file, eod_token)
    raise UsageError(f"--tokenizer {file} must end in .json (tokenizers) or .model (SentencePiece).")


def describe(tokenizer: Tokenizer, file: Path | None) -> dict[str, Any]:
    """What the sidecar keeps of the tokenizer: kind, file name and SHA-256, vocabulary size, EOD id."""
    identity = {} if file is None else {"file": file.name, "sha256": hashlib.sha256(files.read_bytes(file)).hexdigest()}
    return {"kind": tokenizer.kind, **identity, "vocab_size": tokenizer.vocab_size, "eod_id": tokenizer.eod_id}


def training_flags(tokenizer: Tokenizer) -> list[str]:
    """Megatron's flags under which a model reads these ids."""
    return [
        *("--tokenizer-type", "NullTokenizer"),
        *("--vocab-size", str(tokenizer.vocab_size)),
        *("--null-tokenizer-eod-id", str(tokenizer.eod_id)),
    ]


def _eos_token_beside(file: Path) -> str | None:
    """The `eos_token` of a `tokenizer_config.json` in the same folder, as transformers saves it."""
    config = file.with_name("tokenizer_config.json")
    if not config.is_file():
        return None
    try:
        token = files.read_json(config).get("eos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{config} is not a JSON object; mend it, or name the token with --eod-token.") from error
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str | None):
        raise UsageError(f"{config}: its eos_token is no token; mend it, or name the token with --eod-token.")
    return token
