"""How well the data guard's scores find planted faults in real text, code and non-English text, and at what price.

    python benchmarks/data_guard.py --text '/usr/share/perl/**/*.pod' --code '/usr/lib/python3/**/*.py' \\
        --other '/usr/share/locale/*/LC_MESSAGES/*.mo'

Real documents are drawn from files of this machine, by seed; half of the files trained the tokenizer and the limits'
bounds (`--half 0`), the other half is measured (`--half 1`). Each fault is planted in copies of clean documents, at
0.1, 1 and 10 % of the documents; limits are calibrated on the corpus with the faults in it, as an audit does. A row for
each fault: the recall at each share, and the score that finds it best alone, with the area under its ROC.
"""

from __future__ import annotations

import argparse
import base64
import glob
import json
import random
import re
import string
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_stability.data import limits, scores
from megatron_stability.data.byte_classes import of_table
from megatron_stability.data.scores import LOW, SCORES, Counts
from megatron_stability.data.tokenizer_table import BYTE_LEVEL

SHARES = (0.001, 0.01, 0.1)
VOCABULARY = 32000


def catalogue(file: str) -> str:
    """The translations of a gettext catalogue."""
    import gettext

    with open(file, "rb") as stream:
        messages = gettext.GNUTranslations(stream)._catalog.values()
    return "\n".join(text for text in messages if isinstance(text, str))


def pieces(text: str, size: int) -> list[str]:
    """Documents of about `size` characters, ended at a line."""
    found, at = [], 0
    while at + size // 4 < len(text) and len(found) < 8:
        end = text.find("\n", at + size)
        end = len(text) if end < 0 else end
        found.append(text[at:end])
        at = end + 1
    return found


def documents(patterns: list[str], count: int, half: int, rng: random.Random, read: Callable[[str], str]) -> list[str]:
    """Documents of different contents from the files of one half."""
    files = sorted({file for pattern in patterns for file in glob.glob(pattern, recursive=True)})
    rng.shuffle(files)
    found: dict[str, None] = {}
    for file in files:
        if len(found) >= count:
            break
        if hash_of(Path(file).name) % 2 != half:
            continue
        try:
            text = read(file)
        except (OSError, ValueError, IndexError):
            continue
        for piece in pieces(text, rng.choice((1500, 4000, 12000))):
            if len(piece) > 300:
                found.setdefault(piece)
    return list(found)[:count]


def hash_of(name: str) -> int:
    """The same in every process."""
    return sum(ord(c) * 31**i for i, c in enumerate(name)) >> 3


# --- faults: text of a clean document in, bytes out -----------------------------------------------------------------


def junk_html(text: str, rng: random.Random) -> bytes:
    items = [f'<li class="nav-item"><a href="/{rng.randrange(999)}" data-id="{rng.randrange(9999)}">Item</a></li>'
             for _ in range(len(text) // 70 + 4)]  # fmt: skip
    return ("<ul>" + "".join(items) + "</ul>").encode()


def shuffled(text: str, rng: random.Random) -> bytes:
    data = list(text.encode())
    rng.shuffle(data)
    return bytes(data)


def minified(text: str, rng: random.Random) -> bytes:
    def name() -> str:
        return rng.choice(string.ascii_letters)

    parts = [
        f"function {name()}({name()},{name()}){{return {name()}.{name()}({name()}[{rng.randrange(99)}]"
        f"||!{rng.randrange(2)},{name()}&&{name()}?{name()}:null)}}"
        for _ in range(len(text) // 60 + 4)
    ]
    return "".join(parts).encode()


FAULTS: dict[str, Callable[[str, random.Random], bytes]] = {
    "repeats": lambda text, rng: (text[: rng.choice((30, 80, 200))] * (len(text) // 30 + 8))[: len(text)].encode(),
    "Latin-1 bytes": lambda text, rng: re.sub(r"e", "é", text).encode("latin-1", "ignore"),
    "encoded twice": lambda text, rng: re.sub(r"e", "é", text).encode().decode("latin-1").encode(),
    "encoded twice, CP1252": lambda text, rng: re.sub(r"'|e", "é", text).encode().decode("cp1252", "ignore").encode(),
    "one token": lambda text, rng: rng.choice("a -\x00").encode() * len(text),
    "NULs": lambda text, rng: text.encode()[: len(text) // 2] + b"\0" * (len(text) // 2),
    "markup": junk_html,
    "huge numbers": lambda text, rng: "".join(rng.choice(string.digits) for _ in text).encode(),
    "number tables": lambda text, rng: " ".join(str(rng.randrange(10**8)) for _ in range(len(text) // 9)).encode(),
    "shuffled bytes": shuffled,
    "base64": lambda text, rng: base64.b64encode(rng.randbytes(len(text) * 3 // 4)),
    "minified code": minified,
    "random ids": lambda text, rng: b"",
}


def plant(name: str, text: str, rng: random.Random, tokenizer: Encoder) -> np.ndarray:
    """Ids of a faulty document."""
    if name == "random ids":  # as by another tokenizer
        return np.array([rng.randrange(len(tokenizer.table)) for _ in range(len(text) // 4)])
    return tokenizer.encode(FAULTS[name](text, rng))


class Encoder:
    """A byte-level BPE tokenizer of the tuning half, that takes bytes which are no UTF-8 too."""

    def __init__(self, texts: list[str]) -> None:
        self.tokenizer = Tokenizer(models.BPE())
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
        self.tokenizer.train_from_iterator(texts, trainer)
        vocabulary = sorted(self.tokenizer.get_vocab().items(), key=lambda pair: pair[1])
        self.table = [bytes(BYTE_LEVEL[c] for c in word) for word, _ in vocabulary]
        self.single = {each[0]: at for at, each in enumerate(self.table) if len(each) == 1}

    def encode(self, data: bytes) -> np.ndarray:
        """Bytes that are no UTF-8 become their own ids."""
        found: list[int] = []
        for part in re.split(rb"((?:[\x80-\xff])+)", data):
            try:
                found += self.tokenizer.encode(part.decode()).ids
            except UnicodeDecodeError:
                found += [self.single[byte] for byte in part]
        return np.array(found)


def auc(good: np.ndarray, bad: np.ndarray) -> float:
    """Area under the ROC: how often a bad document's value is above a good one's; half where they are equal."""
    ordered = np.sort(good)
    below, at_most = np.searchsorted(ordered, bad, "left"), np.searchsorted(ordered, bad, "right")
    return float(((below + at_most) / 2).mean() / len(good))


def measured(ids: list[np.ndarray], classes) -> tuple[dict[str, np.ndarray], np.ndarray, limits.Limits]:
    """Scores of all documents, their lengths, and the limits that they calibrate, as the audit finds them."""
    starts = np.concatenate([[0], np.cumsum([len(each) for each in ids])])
    flat = np.concatenate(ids)
    counts = Counts(len(classes.high), classes)
    counts.add(flat, starts)
    model = counts.model()
    found = scores.score(flat, starts, classes, model)
    return found, np.diff(starts), limits.calibrate(found, np.diff(starts), len(classes.high))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind in ("text", "code", "other"):
        parser.add_argument(f"--{kind}", required=True, nargs="+", metavar="GLOB")
    parser.add_argument("--documents", type=int, default=3000, help="clean ones")
    parser.add_argument("--half", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    readers = (args.text, 0.4, _read), (args.code, 0.4, _read), (args.other, 0.2, catalogue)
    train = [
        text for globs, share, read in readers for text in documents(globs, int(share * args.documents), 0, rng, read)
    ]
    others = documents(args.other, args.documents, 0, rng, catalogue)  # so that the tokenizer knows every language
    encoder = Encoder([*train, *others])
    classes = of_table(encoder.table)
    clean = train if args.half == 0 else [
        text for glob_, share, read in readers for text in documents(glob_, int(share * args.documents), 1, rng, read)
    ]  # fmt: skip
    good = [encoder.encode(text.encode()) for text in clean]
    found, lengths, bounds = measured(good, classes)
    flagged = np.max(list(bounds.beyond(found, lengths).values()), axis=0) > 1
    rows = {
        "clean": {"documents": len(good), "flagged": flagged.mean(), "tokens": lengths[flagged].sum() / lengths.sum()}
    }
    for name, values in found.items():
        print(
            f"{name:16}",
            np.quantile(values, (0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1)).round(3),
            bounds.limit[name],
        )
    if args.half == 0:
        for at in np.flatnonzero(flagged):
            print(limits.reasons(bounds.beyond(found, lengths), at, found, bounds), repr(clean[at][:90]))
    for name in FAULTS:
        rows[name] = _row(name, clean, good, encoder, classes, rng)
        print(name, json.dumps(rows[name]), flush=True)
    print("clean", json.dumps(rows["clean"]))


def _row(name: str, clean: list[str], good: list[np.ndarray], encoder: Encoder, classes, rng: random.Random) -> dict:
    row: dict = {}
    for share in SHARES:
        count = max(3, round(share * len(good) / (1 - share)))
        bad = [plant(name, rng.choice(clean), rng, encoder) for _ in range(count)]
        found, lengths, bounds = measured(good + bad, classes)
        beyond = bounds.beyond(found, lengths)
        flagged = np.max(list(beyond.values()), axis=0) > 1
        row[f"recall at {share}"] = round(float(flagged[len(good) :].mean()), 3)
        row[f"false at {share}"] = round(float(flagged[: len(good)].mean()), 4)
    areas = {each: auc(*(sign * found[each][part] for part in (slice(len(good)), slice(len(good), None))))
             for each in SCORES if each in found for sign in [-1 if each in LOW else 1]}  # fmt: skip
    best = max(areas, key=areas.__getitem__)
    row["best"], row["area"] = best, round(areas[best], 3)
    row["medians"] = {each: round(float(np.median(found[each][len(good) :])), 3) for each in found}
    row["missed"] = {
        each: round(float(beyond[each][len(good) :].min()), 2)
        for each in beyond
        if beyond[each][len(good) :].min() > 0.5
    }
    row["areas"] = {each: round(area, 2) for each, area in areas.items()}
    return row


def _read(file: str) -> str:
    return Path(file).read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
