"""W&B itself, offline, and TensorBoard's files beside it: both tell of a rewind what the ledger tells."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.utils.tensorboard import SummaryWriter

from megatron_stability.config import Record
from megatron_stability.decide.episodes import Episodes
from megatron_stability.ledger import entries
from megatron_stability.ledger.ledger import Ledger, RunInfo
from megatron_stability.megatron.access.host import Host
from megatron_stability.megatron.writers import MegatronWriters
from megatron_stability.records import Action, Decision, StepRecord
from tests.e2e import artifacts
from tests.unit.steps import step

pytestmark = pytest.mark.megatron
BACK_TO, INCIDENT, LAST = 4, 6, 8


HEADER, BLOCK = 7, 32768  # of W&B's file: a LevelDB log behind a header of its own


def records(data: bytes) -> Iterator[bytes]:
    """Each record; checksum (4 bytes), length (2), kind (1: whole; 2, 3, 4: first, middle, last part), content."""
    at, parts = HEADER, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def rows(file: Path) -> list[tuple[int, dict[str, str]]]:
    """W&B's own step and values of each row of a run that was written offline."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            found.append((record.history.step.num, values))
    return found


def decided(record: StepRecord, action: Action) -> Decision:
    return Decision(step=record.step, action=action, advised=action, reason="")


def test_report_tensorboard_and_wandb_tell_one_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb: Any = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.init(project="p", name="gpt", dir=str(tmp_path), config={"lr": 1e-3})
    board = SummaryWriter(str(tmp_path / "board"))
    host = cast(Host, SimpleNamespace(writers=lambda: (board, wandb)))
    writers = MegatronWriters(host, Episodes([], 50), Record())
    monkeypatch.setattr("megatron_stability.megatron.writers.print_rank_last", lambda text: None)
    info = RunInfo(mode="act", versions={}, layout={})
    ledger = Ledger.open(tmp_path / "stability", resume_step=0, resume_sample=0, run_info=info)
    number, rewound = 1, False
    while number <= LAST:
        record = step(number, loss=4.0 - 0.1 * number - rewound)
        goes_back = number == INCIDENT and not rewound
        for sink in (ledger, writers):
            sink.write(record, decided(record, Action.REWIND if goes_back else Action.APPLY))
        if goes_back:
            ledger.rewind(BACK_TO, 8 * BACK_TO, "a rewind")
            writers.rewound(BACK_TO)
            number, rewound = BACK_TO, True
        number += 1
    wandb.finish()
    board.close()
    ledger.close()
    surviving = [(each.step, each.loss) for each in entries.read(tmp_path / "stability").surviving]
    assert [number for number, _ in surviving] == list(range(1, LAST + 1))
    first, second = sorted((rows(file) for file in tmp_path.rglob("*.wandb")), key=lambda found: found[0][0])
    assert [number for number, _ in first] == list(range(1, INCIDENT + 1))
    assert [number for number, _ in second] == list(range(BACK_TO + 1, LAST + 1))
    assert {values["stability/step/generation"] for _, values in first} == {"0"}
    assert {values["stability/step/generation"] for _, values in second} == {"1"}
    told = [(number, float(v["stability/step/loss"])) for number, v in (*first[:BACK_TO], *second)]
    assert told == surviving
    shown = dict(
        artifacts.scalars(tmp_path / "board")["stability/step/loss"]
    )  # the last row of a step, as its server does
    assert shown == pytest.approx(dict(surviving), rel=1e-6)
