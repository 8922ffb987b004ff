"""How a value that somebody else wrote is repeated: short, without control characters, and without secrets.

Errors (`UsageError` does it by itself), lines of the log, the ledger, bundles, reports and printed recipes all go
through here. A secret is known by the name of its key, or as the value of an environment variable that looks like one.
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

LONGEST = 4000  # characters of one message
MASK = "***"
LEAST = 12  # characters of an environment variable's value that may be a secret

# --- short and plain --------------------------------------------------------------------------------------------------

# C0 but tab and line feed, DEL, C1, and what turns the direction or the line without being seen.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """The text with its control characters written out (`\\x1b`): a terminal shows it and obeys nothing in it."""
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode("ascii"), text)


def short(text: str, longest: int = LONGEST) -> str:
    """Beginning and end of a long text, with its length in between."""
    if len(text) <= longest:
        return text
    return f"{text[: longest * 2 // 3]} ... ({len(text):,} characters) ... {text[-(longest // 4) :]}"


class _Brief(reprlib.Repr):
    """As `repr`, in time and size that do not grow with the value."""

    def __init__(self) -> None:
        super().__init__(
            maxlevel=3, maxdict=4, maxlist=6, maxtuple=6, maxset=6, maxstring=200, maxlong=40, maxother=200
        )

    def repr_int(self, x: int, level: int) -> str:
        return f"an integer of {x.bit_length()} bits" if x.bit_length() > 1000 else super().repr_int(x, level)


def brief(value: Any) -> str:
    """`repr` of a value of any size, in bounded time: what is left out shows as dots."""
    return _Brief().repr(value)


def said(text: str) -> str:
    """A message as it may be shown: short, plain and without secrets."""
    return masked_text(plain(short(text)))


def say(text: str, speaks: bool = True) -> None:
    """One line of ours on a run's log.

    Args:
        text: as `said` repeats it.
        speaks: whether this rank is the one that says it.
    """
    if speaks:
        print(said(f"> megatron-stability: {text}"), flush=True)


# --- secrets ----------------------------------------------------------------------------------------------------------

# Words of a name after which every value is a secret, and words that make one where they end the name.
_ALWAYS = frozenset({"apikey", "secret", "secrets", "password", "passwd", "passphrase", "pwd", "credential"})
_ALWAYS_PAIRS = frozenset({("api", "key"), ("access", "key"), ("private", "key"), ("signing", "key")})
_AT_END = frozenset({"key", "token", "auth", "authorization", "cookie", "credentials", "bearer", "pat"})
# Of a tokenizer, of JSON and of sorting, and of what is measured a token: no secrets.
_HARMLESS = frozenset({"eod", "eos", "bos", "pad", "unk", "cls", "sep", "mask", "fim", "prefix", "middle", "suffix"})
_HARMLESS |= {"jsonl", "text", "sort", "special", "image", "per", "a"}
# Variables of schedulers, shells and libraries, whose values are names, versions and switches.
_KNOWN = re.compile(
    r"(SLURM|PMIX?|OMPI|TORCH|PYTORCH|NCCL|CUDA|CUBLAS|NVIDIA|NVTE|PYTHON|PYTEST|LC|LS|LESS|XDG|DBUS|KUBERNETES|CONDA|"
    r"VIRTUAL|MASTER|HOST|LANG|TERM|COLORTERM|USER|LOGNAME|SHELL|PS\d|SSH|OMP|MKL|KMP|UCX|DEBIAN|PIP|UV)(?![A-Z0-9])"
    r"|HOSTNAME|PYTHON\w*|\w*VERSION\w*"
)
_NUMBER = re.compile(r"[+-]?(0x[0-9a-fA-F]+|[\d.,:_-]*\d(e[+-]?\d+)?)")
_LOGIN = re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]+(?=@)")
_ASSIGNED = re.compile(
    r"""(?<![\w.\-])(?P<name>[\w.\-]++)(?P<sign>['"]?\s*=\s*|['"]\s*:\s*)(?P<value>'[^']*'|"[^"]*"|[^\s'",;)}\]]+)"""
)


def is_secret_name(name: str) -> bool:
    """Whether a key of this name (`logger.comet_api_key`, `hfToken`, `DB-PASSWORD`) holds a secret."""
    return _certain(words := _words(name)) or bool(
        words and words[-1] in _AT_END and not (len(words) > 1 and words[-2] in _HARMLESS)
    )


def _words(name: str) -> list[str]:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return [word for word in re.split(r"[^a-z0-9]+", spaced) if word]


def _certain(words: list[str]) -> bool:
    pairs = pairwise(words)
    return any(word in _ALWAYS or word.endswith("apikey") for word in words) or any(p in _ALWAYS_PAIRS for p in pairs)


def masked(value: Any, name: str = "") -> Any:
    """A nest of mappings, sequences and scalars with its secrets replaced by `MASK`.

    Args:
        value: any value; what is no mapping, list, tuple, text or number stays as it is.
        name: the key under which it stands.

    Returns:
        A value of the same form; other keys and values unchanged.
    """
    if isinstance(value, Mapping):
        hidden = "secret" if is_secret_name(name) else ""  # so is all that is below it
        return {_key(key): masked(item, hidden or str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [masked(item, name) for item in value]
    if type(value) is tuple:
        return tuple(masked(item, name) for item in value)
    if isinstance(value, str):
        if value and is_secret_name(name) and not _is_special_token(value):
            return MASK
        return MASK if value in _environment().whole else masked_text(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and _certain(_words(name)):
        return MASK
    return value


def secret_names(value: Any, name: str = "") -> Iterator[str]:
    """The dotted names of what `masked` hides in a nest."""
    hidden = masked(value, name.rpartition(".")[2])
    if isinstance(value, Mapping) and not is_secret_name(name.rpartition(".")[2]):
        for key, item in value.items():
            yield from secret_names(item, f"{name}.{key}" if name else str(key))
    elif hidden != value:
        yield name


def _key(key: Any) -> Any:
    return masked_text(key) if isinstance(key, str) else key


def _is_special_token(value: str) -> bool:
    return value[0] + value[-1] == "<>"


def masked_text(text: str) -> str:
    """A sentence without the secrets of the environment, logins of URLs, and values after `NAME_OF_A_SECRET=`."""
    found = _ASSIGNED.sub(_without_value, _LOGIN.sub(rf"\1:{MASK}", masked_values(text)))
    return text if found == text else found


def masked_values(text: str) -> str:
    """A text of any kind, such as a page with scripts, without the secrets of the environment; nothing else changes."""
    inside = _environment().inside
    return text if inside is None else inside.sub(MASK, text)


def _without_value(found: re.Match[str]) -> str:
    value = found["value"].strip("'\"")
    name = found["name"]  # `key=value` by itself speaks of a form
    hide = name != "key" and is_secret_name(name) and value and value != "None" and not _NUMBER.fullmatch(value)
    return f"{name}{found['sign']}{MASK}" if hide else found.group()


class _Secrets(NamedTuple):
    inside: re.Pattern[str] | None  # of variables that are named like secrets: wherever they stand in a text
    whole: frozenset[str]  # of all others that look like one: where a value is nothing else


def _environment() -> _Secrets:
    return _secrets(tuple(os.environ.items()))


@lru_cache(maxsize=4)
def _secrets(environment: tuple[tuple[str, str], ...]) -> _Secrets:
    inside, whole = set(), set()
    for name, value in environment:
        if not _looks_secret(value):
            continue
        words = _words(name)
        if _certain(words) or not _AT_END.isdisjoint(words):
            inside.add(value)
        elif not ("/" in value or re.search(r"\s", value) or _KNOWN.match(name)):
            whole.add(value)
    longest_first = sorted(inside, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first))) if inside else None
    return _Secrets(pattern, frozenset(inside | whole))


def _looks_secret(value: str) -> bool:
    """Long enough, and neither a number (or version, or date), a path nor a boolean; of these none has 12 letters."""
    if len(value) < LEAST or _NUMBER.fullmatch(value):
        return False
    return not value.startswith(("/", "./", "../", "~"))
