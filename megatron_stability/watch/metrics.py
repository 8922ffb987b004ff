"""What a scrape by Prometheus sees; the dashboard in examples/watch is made of these names."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_stability.errors import UsageError
from megatron_stability.watch.findings import Finding, Kind
from megatron_stability.watch.run import WatchedRun

PREFIX = "megatron_stability_"
#: Gauges with the label `run`: name, sentence.
GAUGES = {
    "step": "Last step that ended.",
    "generation": "Of the trajectory; a resume or rewind begins a new one.",
    "loss": "Loss of the last step, nats per token.",
    "grad_norm": "Global gradient norm before clipping, last step.",
    "learning_rate": "Of the last step.",
    "step_seconds": "Median of the last steps.",
    "tokens_per_second": "Tokens of the last step over the median step.",
    "seconds_left": "Until --train-iters, at the median step.",
    "ledger_age_seconds": "Since the ledger grew.",
    "checkpoint_step": "Step of the newest checkpoint that was begun.",
    "checkpoint_pending": "1 while that checkpoint is not complete.",
    "storage_free_ratio": "Of the file system that holds the ledger, the lesser of bytes and inodes.",
    "open_episodes": "Episodes that are open.",
}
#: Gauges with further labels.
LABELLED = {
    "heartbeat_age_seconds": ("Since the node's heartbeat changed.", "node"),
    "signal": ("A signal of the last step, by its name in the ledger.", "name"),
    "findings": ("What is wrong now, by kind.", "kind"),
}


class Exporter(Collector):
    """Serves the last look; nothing is read from files at a scrape."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: list[Metric] = []
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def serve(self, address: str, port: int) -> None:
        """Answer scrapes from a thread.

        Raises:
            UsageError: the port can't be taken.
        """
        try:
            start_http_server(port, addr=address, registry=self.registry)
        except OSError as error:
            raise UsageError(f"--metrics-port: {address}:{port} can't be taken ({error.strerror})") from None

    def looked(self, runs: Sequence[WatchedRun], findings: Sequence[Finding]) -> None:
        """Take over what a look found."""
        metrics = list(_metrics(runs, findings))
        with self._lock:
            self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at a scrape."""
        with self._lock:
            yield from self._metrics


def _metrics(runs: Sequence[WatchedRun], findings: Sequence[Finding]) -> Iterator[Metric]:
    for name, sentence in GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + name, sentence, labels=["run"])
        for run in runs:
            value = _value(run, name)
            if value is not None:
                gauge.add_metric([run.name], float(value))
        yield gauge
    for name, (sentence, label) in LABELLED.items():
        gauge = GaugeMetricFamily(PREFIX + name, sentence, labels=["run", label])
        for run in runs:
            for key, value in _labelled(run, name, findings).items():
                gauge.add_metric([run.name, key], value)
        yield gauge


def _value(run: WatchedRun, name: str) -> float | None:
    last = run.steps[-1] if run.steps else None
    seconds = sorted(run.step_seconds)
    if name in ("loss", "grad_norm", "learning_rate"):
        return getattr(last, name, None)
    values = {
        "step": run.step,
        "generation": run.process.generation if run.process else None,
        "step_seconds": seconds[len(seconds) // 2] if seconds else None,
        "tokens_per_second": run.tokens_per_second,
        "seconds_left": run.seconds_left,
        "ledger_age_seconds": run.line_age,
        "checkpoint_step": run.saves[-1].step if run.saves else None,
        "checkpoint_pending": run.saving is not None,
        "storage_free_ratio": run.space.percent / 100 if run.space else None,
        "open_episodes": len(run.open),
    }
    return values[name]


def _labelled(run: WatchedRun, name: str, findings: Sequence[Finding]) -> dict[str, float]:
    if name == "heartbeat_age_seconds":
        return {node: run.beat_age(node) for node, beat in run.beats.items() if beat.state == "training"}
    if name == "signal":
        return dict(run.steps[-1].signals) if run.steps else {}
    kinds = Counter(each.kind for each in findings if each.run == run.name)
    return {kind.value: float(kinds[kind]) for kind in Kind}
