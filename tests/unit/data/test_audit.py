"""`audit-data` on corpora with planted faults, and on files that are damaged."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from pyarrow import parquet

from megatron_stability import cli
from megatron_stability.data.audit import inputs
from tests.unit.data.maker import make

EOD = 256


def text(rng, words=220):
    stems = ["".join(rng.choice("etaoinshrdlu") for _ in range(rng.randint(2, 8))) for _ in range(400)]
    return " ".join(rng.choice(stems) for _ in range(words)) + "."


def corpus(folder, extra=(), count=120, eod=True):
    """A byte-level data set: documents of words, then the given ones."""
    rng = random.Random(5)
    documents = [list(text(rng).encode()) + [EOD] * eod for _ in range(count)]
    return make(folder / "d", [*documents, *extra])


def audit(capsys, *argv):
    code = cli.main(["audit-data", *map(str, argv), "--json"])
    out = capsys.readouterr()
    return code, json.loads(out.out) if out.out else out.err


def ids(data):
    return [*data, EOD]


BAD = {
    "run": ids(b"a" * 900),
    "repeated": ids(b"buy now and save! " * 60),
    "control": ids(b"\0" * 40 + text(random.Random(1)).encode()),
    "invalid": ids("".join("é" + c for c in text(random.Random(2))).encode("latin-1")),
    "mojibake": ids("".join("é" + c for c in text(random.Random(3))).encode().decode("latin-1").encode()),
    "markup": ids(b"".join(b'<a href="%d">x</a>' % n for n in range(90))),
    "digits": ids(b"".join(b"%d" % (n * 7919) for n in range(300))),
}


def test_what_is_bad_is_listed_and_what_is_good_is_not(tmp_path, capsys):
    prefix = corpus(tmp_path, BAD.values())
    code, told = audit(capsys, prefix, "--tokenizer-bytes", "--output", tmp_path / "out", "--workers", 1)
    assert code == 1
    lines = [json.loads(line) for line in (tmp_path / "out" / "skip.jsonl").read_text().splitlines()]
    by_document = {line["document"]: line["reasons"] for line in lines}
    assert sorted(by_document) == list(range(120, 120 + len(BAD)))
    for at, name in enumerate(BAD):
        assert any(reason.startswith(name) for reason in by_document[120 + at]), (name, by_document[120 + at])
    assert [line["score"] for line in lines] == sorted((line["score"] for line in lines), reverse=True)
    table = parquet.read_table(tmp_path / "out" / "scores")
    assert table.num_rows == 120 + len(BAD)
    assert table["tokens"].to_pylist()[120:] == [len(each) for each in BAD.values()]
    assert told["sets"][0]["documents"] == table.num_rows


def test_clean_text_passes(tmp_path, capsys):
    code, told = audit(capsys, corpus(tmp_path), "--tokenizer-bytes", "--output", tmp_path / "out", "--workers", 1)
    assert (code, told["findings"]) == (0, [])


def test_an_excerpt_is_shown_where_asked_and_escaped(tmp_path, capsys):
    prefix = corpus(tmp_path, [ids(b"<script>alert(1)</script>" * 60)])
    common = (prefix, "--tokenizer-bytes", "--output", tmp_path / "out", "--workers", 1)
    audit(capsys, *common)
    page = (tmp_path / "out" / "audit.html").read_text()
    assert "alert(1)" not in page
    audit(capsys, *common, "--text")
    page = (tmp_path / "out" / "audit.html").read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>" not in page


def test_structural_faults_are_all_found(tmp_path, capsys):
    good = [10, 11, 12, 13, 14, EOD]
    documents = [[n % 250, *range(n, n + 40 + n % 9), EOD] for n in range(60)]
    prefix = make(tmp_path / "d", [*documents, good, good, [], [1, 2, 3], [400, 5, EOD]])
    code, told = audit(capsys, prefix, "--tokenizer-bytes", "--output", tmp_path / "out", "--workers", 1)
    assert code == 1
    found = "\n".join(told["findings"])
    assert "1 documents have ids outside the vocabulary" in found
    assert "1 of 64 documents do not end with the end-of-document id 256" in found
    assert "1 documents are empty" in found
    assert told["duplicates"] == 1
    assert "1 of 64 documents are equal to an earlier one" in found


def test_documents_cut_at_one_length(tmp_path, capsys):
    rng = np.random.RandomState(1)
    documents = [rng.randint(0, 200, min(int(n), 64)).tolist() for n in rng.randint(20, 100, 200)]
    code, told = audit(capsys, make(tmp_path / "d", documents), "--output", tmp_path / "out", "--workers", 1)
    assert code == 1
    assert any("exactly 64 tokens" in each for each in told["findings"])


def test_an_audit_goes_on_where_it_was_and_refuses_another(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(inputs, "TASK", 4000)
    prefix = corpus(tmp_path, BAD.values())
    common = (prefix, "--tokenizer-bytes", "--output", tmp_path / "out", "--workers", 1)
    first = audit(capsys, *common)
    parts = sorted((tmp_path / "out" / "scores").iterdir())
    assert len(parts) > 5
    before = [part.stat().st_mtime_ns for part in parts]
    parts[2].unlink()
    assert audit(capsys, *common) == first
    after = [part.stat().st_mtime_ns for part in parts]
    assert [was == now for was, now in zip(before, after, strict=True)] == [at != 2 for at in range(len(parts))]
    (tmp_path / "else").mkdir()
    other = corpus(tmp_path / "else", count=50)
    code, told = audit(capsys, other, "--output", tmp_path / "out", "--workers", 1)
    assert code == 2
    assert "--overwrite" in told
    assert audit(capsys, other, "--output", tmp_path / "out", "--workers", 1, "--overwrite")[0] != 2


def test_processes_find_what_one_finds(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(inputs, "TASK", 40000)
    prefix = corpus(tmp_path, BAD.values(), count=300)
    one = audit(capsys, prefix, "--tokenizer-bytes", "--output", tmp_path / "a", "--workers", 1)[1]
    two = audit(capsys, prefix, "--tokenizer-bytes", "--output", tmp_path / "b", "--workers", 2)[1]
    assert {**one, "output": None} == {**two, "output": None}


def test_a_long_document_is_looked_at_in_parts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(inputs, "CHUNK", 1024)
    prefix = corpus(tmp_path, [[*text(random.Random(4), 900).encode(), *b"a" * 3000, EOD]])
    audit(capsys, prefix, "--tokenizer-bytes", "--output", tmp_path / "out", "--workers", 1)
    lines = [json.loads(line) for line in (tmp_path / "out" / "skip.jsonl").read_text().splitlines()]
    assert {line["document"] for line in lines} == {120}
    assert all(line["first"] >= 1024 for line in lines)
    assert parquet.read_table(tmp_path / "out" / "scores").num_rows > 121


def test_text_json_and_parquet_are_read_as_documents(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(inputs, "TASK", 30000)
    rng = random.Random(6)
    texts = [text(rng) for _ in range(100)] + ["a" * 900, ""]
    import pyarrow as pa

    folder = tmp_path / "in"
    folder.mkdir()
    parquet.write_table(pa.table({"text": texts}), folder / "a.parquet")
    lines = [json.dumps({"text": each}) for each in texts]
    (folder / "b.jsonl").write_text("\n".join(lines) + "\n{broken\n")
    (folder / "c.txt").write_text(texts[0])
    code, told = audit(capsys, folder, "--output", tmp_path / "out", "--workers", 1)
    assert code == 1
    assert (told["sets"][0]["documents"], told["sets"][0]["empty"]) == (203, 2)
    assert told["duplicates"] == 102
    assert "{broken" in (folder / "b.jsonl").read_text()
    assert told["sets"][0]["unreadable"][0][1] == sum(len(line) + 1 for line in lines)


@pytest.mark.parametrize("fault", ["magic", "cut index", "cut tokens", "dtype", "none", "missing", "suffix"])
def test_damaged_files_are_one_sentence(tmp_path, capsys, fault):
    prefix = make(tmp_path / "d", [] if fault == "none" else [[1, 2, 3]])
    index, data = tmp_path / "d.idx", tmp_path / "d.bin"
    if fault == "magic":
        index.write_bytes(b"x" * 60)
    elif fault == "cut index":
        index.write_bytes(index.read_bytes()[:40])
    elif fault == "cut tokens":
        data.write_bytes(data.read_bytes()[:-2])
    elif fault == "dtype":
        raw = bytearray(index.read_bytes())
        raw[17] = 4
        index.write_bytes(raw)
    elif fault == "missing":
        prefix = str(tmp_path / "else")
    elif fault == "suffix":
        prefix = str(index)
    code, told = audit(capsys, prefix, "--output", tmp_path / "out")
    assert code == 2
    assert len(told.strip().splitlines()) == 1


def test_the_seed_preset_is_refused_where_it_does_not_fit(tmp_path, capsys):
    prefix = corpus(tmp_path)
    common = (prefix, "--tokenizer-bytes", "--output", tmp_path / "out", "--preset", "seed")
    code, told = audit(capsys, *common)
    assert code == 2
    assert "--force" in told
    code, told = audit(capsys, *common, "--force", "--workers", 1)
    assert code == 1
    assert any("seed preset" in each for each in told["findings"])


def test_near_duplicates(tmp_path, capsys):
    rng = random.Random(8)
    base = text(rng, 400)
    prefix = corpus(tmp_path, [ids(base.encode()), ids((base + " one more").encode())])
    common = (prefix, "--tokenizer-bytes", "--output", tmp_path / "out", "--workers", 1)
    code, _ = audit(capsys, *common, "--near-duplicates")
    assert code == 1
    line = json.loads((tmp_path / "out" / "near_duplicates.jsonl").read_text())
    assert (line["document"], line["like"][1]) == (121, 120)
