"""Text files that are not UTF-8, made so: by a name that is given, or found by charset-normalizer."""

from __future__ import annotations

import codecs
from dataclasses import replace

from megatron_stability.data.sources import Document
from megatron_stability.errors import UsageError

DETECT = "detect"


def decoded(document: Document, encoding: str | None) -> Document:
    """A document with its text in UTF-8; JSONL lines are UTF-8 already.

    Args:
        document: as it was read.
        encoding: a codec's name, "detect", or None for the bytes as they are.

    Raises:
        UsageError: there is no such encoding, the text is not in it, or none fits.
    """
    if encoding is None or document.line is not None:
        return document
    if encoding == DETECT:
        return _detected(document)
    try:
        text = document.text.decode(codecs.lookup(encoding).name).encode()
        return replace(document, text=text, encoding=encoding)
    except LookupError:
        raise UsageError(f"--encoding {encoding}: Python knows no such encoding") from None
    except UnicodeError as error:
        raise UsageError(f"{document.place()} is not {encoding} ({error}); leave the file out, or --encoding") from None


def _detected(document: Document) -> Document:
    """A guess where it is no UTF-8: short texts of one byte a character fit several encodings."""
    try:
        document.text.decode()
        return document
    except UnicodeDecodeError:
        from charset_normalizer import from_bytes

        best = from_bytes(document.text).best()
        if best is None:
            raise UsageError(
                f"{document.place()}: no encoding fits it; leave it out, or give --encoding NAME"
            ) from None
        return replace(document, text=str(best).encode(), encoding=best.encoding)
