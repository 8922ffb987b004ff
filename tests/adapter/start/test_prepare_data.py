"""prepare-data, read back through Megatron's own IndexedDataset."""

import hashlib
import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from megatron_stability import cli
from megatron_stability.data import prepare as data
from megatron_stability.data.prepare import BIN, IDX, META, PROVENANCE, Options
from megatron_stability.data.splits import DEFAULT, ranges
from megatron_stability.errors import UsageError
from megatron_stability.megatron.start.prepare_data import prepare

pytestmark = pytest.mark.megatron

RAW = bytes(range(256)) + b"\r\n\xff\xfe no text at all"


@pytest.fixture
def corpus(tmp_path):
    """A folder with text, bytes that are not UTF-8, JSONL with awkward lines, an empty file and a file to leave out."""
    root = tmp_path / "corpus"
    (root / "b" / "deep").mkdir(parents=True)
    (root / "vendor").mkdir()
    (root / "a.txt").write_text("first\n", encoding="utf-8")
    (root / "b" / "deep" / "raw.txt").write_bytes(RAW)
    (root / "b" / "empty.txt").write_bytes(b"")
    lines = [{"text": "uno ñ 中", "id": 1}, {"text": ""}, {"id": 2, "text": "tre\nquattro"}]
    text = json.dumps(lines[0], ensure_ascii=False) + "\r\n\n" + "\n".join(json.dumps(line) for line in lines[1:])
    (root / "b" / "lines.jsonl").write_bytes(text.encode())
    (root / "vendor" / "c.txt").write_text("not ours", encoding="utf-8")
    (root / "z.bin").write_bytes(b"not text")
    return root


def provenance(prefix):
    return [json.loads(line) for line in (prefix.parent / (prefix.name + PROVENANCE)).read_text().splitlines()]


def read(prefix):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    return [np.array(dataset[i]) for i in range(len(dataset))], dataset.document_indices.tolist()


def test_megatron_reads_back_every_byte_and_the_end_of_each_document(corpus, tmp_path):
    prefix = tmp_path / "new" / "folder" / "data"
    summary = prepare([corpus], prefix, Options(exclude=("vendor",)))
    items, boundaries = read(prefix)
    texts = [b"first\n", RAW, "uno ñ 中".encode(), b"tre\nquattro"]
    assert [bytes(item[:-1].astype(np.uint8)) for item in items] == texts
    assert [int(item[-1]) for item in items] == [256] * 4
    assert boundaries == [0, 1, 2, 3, 4]
    assert (summary.documents, summary.empty_documents) == (4, 2)
    assert summary.tokens == sum(map(len, texts)) + 4
    assert summary.text_bytes == sum(map(len, texts))


def test_provenance_points_at_the_exact_bytes(corpus, tmp_path):
    prefix = tmp_path / "data"
    prepare([corpus, corpus / "a.txt"], prefix, Options(exclude=("vendor",)))
    items, _ = read(prefix)
    rows = provenance(prefix)
    assert [row["document"] for row in rows] == list(range(len(items)))
    assert [(row["input"], row["path"], row.get("line")) for row in rows] == [
        (0, "a.txt", None),
        (0, "b/deep/raw.txt", None),
        (0, "b/lines.jsonl", 1),
        (0, "b/lines.jsonl", 4),
        (1, "a.txt", None),
    ]
    for row, item in zip(rows, items, strict=True):
        there = (corpus / row["path"]).read_bytes()[row["offset"] : row["offset"] + row["bytes"]]
        text = json.loads(there)["text"].encode() if "line" in row else there
        assert text == bytes(item[:-1].astype(np.uint8))
        assert row["tokens"] == len(item)


def test_the_sidecar_names_flags_under_which_megatron_agrees_on_the_ids(corpus, tmp_path):
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    summary = prepare([corpus], tmp_path / "data")
    meta = json.loads((tmp_path / f"data{META}").read_text())
    assert meta["training_flags"] == list(summary.training_flags)
    flags = dict(zip(summary.training_flags[::2], summary.training_flags[1::2], strict=True))
    assert flags["--data-path"] == str(tmp_path / "data")
    tokenizer = build_tokenizer(
        Namespace(
            tokenizer_type=flags["--tokenizer-type"],
            vocab_size=int(flags["--vocab-size"]),
            null_tokenizer_eod_id=int(flags["--null-tokenizer-eod-id"]),
            pad_vocab_size=False,
        )
    )
    items, _ = read(tmp_path / "data")
    assert tokenizer.eod == summary.eod_id == int(items[0][-1])
    assert max(int(item.max()) for item in items) == meta["largest_id"] < tokenizer.vocab_size
    assert flags["--split"] == f"{summary.documents - 2},1,1", "Megatron's default would leave two splits empty"
    assert all(ranges(flags["--split"], len(items)).values())
    assert not all(ranges(DEFAULT, len(items)).values())
    for suffix, digest in meta["sha256"].items():
        assert hashlib.sha256((tmp_path / f"data{suffix}").read_bytes()).hexdigest() == digest


def test_two_runs_and_any_number_of_workers_give_the_same_bytes(corpus, tmp_path):
    for name, workers in (("one", 1), ("again", 1), ("three", 3)):
        prepare([corpus], tmp_path / name, Options(workers=workers))
    for suffix in (BIN, IDX, PROVENANCE):
        one, again, three = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("one", "again", "three"))
        assert one == again == three


def test_max_bytes_takes_whole_documents_in_order(corpus, tmp_path):
    summary = prepare([corpus], tmp_path / "data", Options(max_bytes=len("first\n") + len(RAW)))
    assert (summary.documents, summary.text_bytes) == (2, len("first\n") + len(RAW))
    with pytest.raises(UsageError, match="fits into --max-bytes 3"):
        prepare([corpus], tmp_path / "none", Options(max_bytes=3))


def test_without_eod_the_ids_are_the_text_alone(corpus, tmp_path):
    prepare([corpus / "a.txt"], tmp_path / "data", Options(append_eod=False))
    items, _ = read(tmp_path / "data")
    assert bytes(items[0].astype(np.uint8)) == b"first\n"


def huggingface_file(folder):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["uno due tre"] * 9, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.enable_truncation(4)  # as many published files do; a data set must not be cut
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_a_tokenizers_file_keeps_all_text_and_takes_no_special_token_from_it(tmp_path):
    from tokenizers import Tokenizer

    file = huggingface_file(tmp_path)
    text = "uno due tre <|end|> quattro, cinque ñ"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="--eod-token"):
        prepare([tmp_path / "a.txt"], tmp_path / "data", Options(tokenizer=file))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|end|>"}}')
    summary = prepare([tmp_path / "a.txt"], tmp_path / "data", Options(tokenizer=file))
    items, _ = read(tmp_path / "data")
    loaded = Tokenizer.from_file(str(file))
    assert loaded.decode(items[0][:-1].tolist(), skip_special_tokens=False) == text
    assert summary.eod_id == loaded.token_to_id("<|end|>") == items[0][-1]
    assert summary.eod_id not in items[0][:-1]
    assert summary.vocab_size == loaded.get_vocab_size()


def test_a_sentencepiece_model_round_trips(tmp_path):
    import sentencepiece

    (tmp_path / "a.txt").write_text("uno due tre quattro cinque\n" * 20, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.Train(
        input=str(tmp_path / "a.txt"), model_prefix=str(tmp_path / "m"), vocab_size=18, minloglevel=2
    )
    (tmp_path / "b.txt").write_text("due tre uno", encoding="utf-8")
    summary = prepare([tmp_path / "b.txt"], tmp_path / "data", Options(tokenizer=tmp_path / "m.model"))
    items, _ = read(tmp_path / "data")
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    assert model.decode(items[0][:-1].tolist()) == "due tre uno"
    assert (summary.eod_id, summary.vocab_size) == (model.eos_id(), 18)
    assert items[0][-1] == model.eos_id()
    with pytest.raises(UsageError, match="'</nope>' is not in the vocabulary"):
        prepare([tmp_path / "b.txt"], tmp_path / "x", Options(tokenizer=tmp_path / "m.model", eod_token="</nope>"))


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', {}, r"a\.jsonl:2 is not valid JSON"),
        ("a.jsonl", b'{"text": "x"}\n\n{"body": "y"}\n', {}, r"a\.jsonl:3 has no key 'text' \(its keys are 'body'\)"),
        ("a.jsonl", b'["x"]\n', {}, r"a\.jsonl:1 has no key 'text' \(it is not an object\)"),
        ("a.jsonl", b'{"text": 3}\n', {}, r"a\.jsonl:1 has a value under 'text' that is not text"),
        ("a.jsonl", b'{"text": "\xff"}\n', {}, r"a\.jsonl:1 is not UTF-8 at byte 10 of the line"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', {}, r"a\.jsonl:1 holds a lone surrogate"),
        ("a.jsonl", b'{"text": "x", "n": ' + b"9" * 5000 + b"}\n", {}, r"a\.jsonl:1 holds a number too long"),
        ("a.txt", b"", {}, "hold no text"),
        ("a.rst", b"x", {}, "no file that fits --pattern"),
        ("a.txt", b"x", {"workers": 0}, "--workers 0"),
        ("a.txt", b"x", {"eod_token": "</s>"}, "--eod-token needs --tokenizer"),
    ],
)
def test_bad_input_is_told_by_place_and_leaves_nothing(tmp_path, name, content, options, message):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    (folder / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        prepare([folder], out / "data", Options(**options))
    assert list(out.iterdir()) == []


def test_text_that_is_not_utf8_is_an_error_for_a_tokenizer_and_names_the_byte(tmp_path):
    file = huggingface_file(tmp_path)
    (tmp_path / "bad.txt").write_bytes(b"good \xff")
    with pytest.raises(UsageError, match=r"bad\.txt is not UTF-8 at byte 5"):
        prepare([tmp_path / "bad.txt"], tmp_path / "data", Options(tokenizer=file, eod_token="<|end|>", workers=2))
    assert not list(tmp_path.glob("data*"))


@pytest.mark.parametrize("name", ["t.json", "t.model", "t.vocab", "missing.json"])
def test_an_unusable_tokenizer_file_is_named(tmp_path, name):
    if not name.startswith("missing"):
        (tmp_path / name).write_bytes(b"\x00 nonsense")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UsageError, match=name.replace(".", r"\.")):
        prepare([tmp_path / "a.txt"], tmp_path / "data", Options(tokenizer=tmp_path / name, eod_token="x"))


def test_a_full_disk_is_told_and_leaves_nothing(corpus, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as full:
        full.setattr(data, "_write_meta", lambda *_: Path("/dev/full").write_text("x" * 10_000))
        with pytest.raises(UsageError, match=r"--output .*data cannot be written \(No space left on device\)"):
            prepare([corpus], out / "data")
    assert list(out.iterdir()) == []


def test_an_existing_data_set_is_replaced_only_on_request_and_a_failure_keeps_it(corpus, tmp_path):
    prefix = tmp_path / "data"
    prepare([corpus / "a.txt"], prefix)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("data.*")}
    with pytest.raises(UsageError, match="--overwrite"):
        prepare([corpus], prefix)
    (corpus / "broken.jsonl").write_text("{")
    with pytest.raises(UsageError, match=r"broken\.jsonl:1"):
        prepare([corpus], prefix, Options(overwrite=True))
    assert {path.name: path.read_bytes() for path in tmp_path.glob("data.*")} == before
    prepare([corpus / "b" / "lines.jsonl"], prefix, Options(overwrite=True))
    assert len(read(prefix)[0]) == 2


def test_the_command_prints_the_flags_and_refuses_a_missing_input(corpus, tmp_path, capsys):
    assert cli.main(["prepare-data", str(corpus), "--output", str(tmp_path / "data"), "--exclude", "vendor"]) == 0
    shown = capsys.readouterr().out
    assert "4 documents (2 empty ones left out)" in shown
    assert "--tokenizer-type NullTokenizer --vocab-size 257" in shown
    assert cli.main(["prepare-data", str(corpus / "nope"), "--output", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err.endswith("nope is neither a file nor a folder; check the path.\n")
    for output, said in (
        (f"{tmp_path}/new/", "is a folder"),
        (str(tmp_path / ("x" * 300)), "too long"),
        ("", "folder"),
    ):
        assert cli.main(["prepare-data", str(corpus), "--output", output]) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["prepare-data", str(corpus), "--output", str(corpus / "a.txt" / "x")]) == 2
    assert "--output" in capsys.readouterr().err


def test_what_is_unlike_text_is_told_and_bad_lines_are_kept_aside(tmp_path, capsys):
    root = tmp_path / "corpus"
    root.mkdir()
    for at, text in enumerate([b"\0" * 5000, b"a" * 20000, b"the same text", b"the same text", b"", b"caf\xe9 " * 40]):
        (root / f"{at}.txt").write_bytes(text)
    lines = ['{"text": "fine"}', "{broken", '{"text": 1}', '{"text": "fine too"}']
    (root / "l.jsonl").write_text("\n".join(lines))
    argv = ["prepare-data", str(root), "--output", str(tmp_path / "d")]
    assert cli.main(argv) == 2
    assert "l.jsonl:2" in capsys.readouterr().err
    assert cli.main([*argv, "--on-error", "quarantine"]) == 0
    out = capsys.readouterr().out
    warned = {line.split(": ")[2].split(" (")[0]: line for line in out.splitlines() if line.startswith("warning: ")}
    assert set(warned) == {"run", "repeated_4", "repeated_8", "control", "invalid", "duplicate", "empty", "unreadable"}
    assert "2 documents: unreadable" in warned["unreadable"]
    assert warned["duplicate"].endswith("3.txt")
    kept = [json.loads(line) for line in (tmp_path / "d.quarantine.jsonl").read_text().splitlines()]
    assert [(each["place"].rpartition("/")[2], each["line"]) for each in kept] == [
        ("l.jsonl:2", lines[1]),
        ("l.jsonl:3", lines[2]),
    ]
    assert [int(line["line"]) for line in provenance(tmp_path / "d") if "line" in line] == [1, 4]


def test_an_encoding_is_given_or_found(tmp_path, capsys):
    text = "Où est passée la bibliothèque? Elle a été déménagée près de l'hôtel, où l'on préfère les élèves.\n" * 4
    for encoding, given in (("cp1252", "cp1252"), ("detect", "utf-16")):
        (tmp_path / "a.txt").write_bytes(text.encode(given))
        prefix = tmp_path / encoding
        assert cli.main(["prepare-data", str(tmp_path / "a.txt"), "--output", str(prefix), "--encoding", encoding]) == 0
        assert bytes(read(prefix)[0][0][:-1].astype(np.uint8)).decode() == text
        assert json.loads((tmp_path / f"{encoding}.meta.json").read_text())["encoding"] == encoding
        assert provenance(prefix)[0]["encoding"].replace("_", "-") == given
    (tmp_path / "a.txt").write_bytes(text.encode("cp1252"))
    for encoding in ("utf-8", "klingon"):
        assert (
            cli.main(["prepare-data", str(tmp_path / "a.txt"), "--output", str(tmp_path / "e"), "--encoding", encoding])
            == 2
        )
        assert encoding in capsys.readouterr().err
