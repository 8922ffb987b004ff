"""The flags of `prepare-data`."""

import argparse
from pathlib import Path

from megatron_stability.data.sources import DEFAULT_PATTERNS


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    flags = argparse.ArgumentParser(
        prog="megatron-stability prepare-data",
        description="Makes Megatron's .bin and .idx from text, with the source of every document beside them.",
        epilog="example: megatron-stability prepare-data docs/ notes.jsonl --output data/notes --pattern '*.md'",
        allow_abbrev=False,
    )
    flags.add_argument("inputs", nargs="+", metavar="INPUT", help="text file, .jsonl file, or folder (recursive)")
    flags.add_argument("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin, .idx and two sidecars")
    flags.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer .json or .model; bytes without it")
    flags.add_argument("--eod-token", metavar="TOKEN", help="token that ends a document, where FILE does not say")
    flags.add_argument("--append-eod", action=argparse.BooleanOptionalAction, default=True, help="default: on")
    flags.add_argument("--jsonl-key", default="text", metavar="KEY", help="key of the text in JSONL (default: text)")
    flags.add_argument(
        "--pattern", action="append", metavar="GLOB", help=f"files of folders (default: {' '.join(DEFAULT_PATTERNS)})"
    )
    flags.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="paths of folders to leave out")
    flags.add_argument("--max-bytes", type=int, metavar="N", help="stop before the document that would pass N bytes")
    flags.add_argument("--workers", type=int, default=1, metavar="N", help="threads that encode (default: 1)")
    flags.add_argument("--overwrite", action="store_true", help="replace a data set of the same prefix")
    flags.add_argument(
        "--follow-links", action="store_true", help="take files that links in folders lead to, out of them"
    )
    flags.add_argument(
        "--on-error", choices=("stop", "quarantine"), default="stop", help="of a bad JSONL line (default: stop)"
    )
    flags.add_argument(
        "--encoding", metavar="NAME", help="of text files; `detect` finds it; without it bytes are taken"
    )
    flags.add_argument("--json", action="store_true", help="print the summary as JSON")
    return flags
