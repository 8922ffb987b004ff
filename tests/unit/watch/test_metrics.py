"""What Prometheus gets, and that the dashboard asks for nothing else; the examples can be read."""

from __future__ import annotations

import json
import re
import shlex
import socket
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from megatron_stability.errors import UsageError
from megatron_stability.ledger.ledger import Ledger
from megatron_stability.watch import command
from megatron_stability.watch.checks import findings
from megatron_stability.watch.heartbeat import Heartbeat
from megatron_stability.watch.metrics import PREFIX, Exporter
from megatron_stability.watch.run import WatchedRun
from tests.unit.watch import writer

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/watch"


@pytest.fixture
def exporter(tmp_path: Path) -> Exporter:
    """After a look at a run in which everything is known."""
    with Ledger.open(tmp_path, resume_step=0, resume_sample=0, run_info=writer.INFO) as ledger:
        for number in range(1, 9):
            writer.step(ledger, number, signals={"log_z/mean": 5.5})
        ledger.saving(8)
    heart = Heartbeat(tmp_path, rank=0, seconds=10, node="node1")
    heart.begin()
    run = WatchedRun('runs/"a"\n', tmp_path)
    while not run.beats:
        run.look()
    made = Exporter()
    made.looked([run], findings(run, command.Limits(free_percent=101), began=0))
    heart.close()
    return made


def _exposed(exporter: Exporter) -> dict[str, dict[str, float]]:
    text = generate_latest(exporter.registry).decode()
    return {
        family.name: {json.dumps(sample.labels, sort_keys=True): sample.value for sample in family.samples}
        for family in text_string_to_metric_families(text)
    }


def test_every_metric_has_a_value_of_the_run(exporter: Exporter) -> None:
    exposed = _exposed(exporter)
    assert {name for name, values in exposed.items() if not values} == set()
    run = {"run": 'runs/"a"\n'}
    assert exposed[f"{PREFIX}step"] == {json.dumps(run): 8}
    assert exposed[f"{PREFIX}loss"] == {json.dumps(run): 3.0}
    assert exposed[f"{PREFIX}checkpoint_pending"] == {json.dumps(run): 1}
    assert exposed[f"{PREFIX}signal"] == {json.dumps({"name": "log_z/mean"} | run): 5.5}
    assert exposed[f"{PREFIX}findings"][json.dumps({"kind": "storage"} | run)] == 1
    assert exposed[f"{PREFIX}findings"][json.dumps({"kind": "stall"} | run)] == 0


def test_every_query_of_the_dashboard_names_an_exposed_metric(exporter: Exporter) -> None:
    board = json.loads((EXAMPLES / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    assert len(queries) > 15
    named = [re.findall(r"\b[a-z_]*megatron[a-z_]*\b", query) for query in queries]
    assert all(named)
    exposed = _exposed(exporter)
    assert {name for names in named for name in names} <= set(exposed)
    labels = {
        label
        for query in queries
        for label in re.findall(r"[{,]\s*(\w+)\s*[=!]", query) + re.findall(r", (\w+)\)", query)
    }
    assert labels <= {label for values in exposed.values() for each in values for label in json.loads(each)}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_it_is_served_and_a_taken_port_is_one_sentence(exporter: Exporter) -> None:

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"--metrics-port: 127.0.0.1:{port} can't be taken"):
            exporter.serve("127.0.0.1", port)
    exporter.serve("127.0.0.1", port)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert f"{PREFIX}step" in answer.read().decode()


def test_the_examples_call_the_command_as_it_is() -> None:
    unit = (EXAMPLES / "megatron-stability-watch.service").read_text().replace("\\\n", " ")
    start = next(line for line in unit.splitlines() if line.startswith("ExecStart="))
    deployment = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    slurm = (EXAMPLES / "watch.slurm").read_text().replace("\\\n", " ")
    exec_ = next(line for line in slurm.splitlines() if line.startswith("exec ")).replace('"$@"', "runs/a")
    calls = [
        shlex.split(start.removeprefix("ExecStart="))[1:],
        [*container["command"][1:], *container["args"]],
        shlex.split(re.sub(r"\$\{[^}]*\}", "x", exec_))[2:],
    ]
    for call in calls:
        assert call[0] == "watch"
        options = command.parser().parse_args(call[1:])
        assert options.runs
        assert options.notify_file
        assert options.dead_man
