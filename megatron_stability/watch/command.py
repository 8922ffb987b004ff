"""`megatron-stability watch`: runs seen from outside, and people told."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from megatron_stability.errors import EXIT_FINDING, EXIT_FINE
from megatron_stability.watch import checks, screen
from megatron_stability.watch.alerts import Alerts
from megatron_stability.watch.findings import Finding
from megatron_stability.watch.follow import folder_of
from megatron_stability.watch.limits import Limits
from megatron_stability.watch.notify import DeadMan, Notifier, on_stderr
from megatron_stability.watch.run import WatchedRun

INTERVAL = 10.0


def run(argv: Sequence[str]) -> int:
    """The command.

    Args:
        argv: its arguments.

    Returns:
        With `--once` 1 where something is wrong, else 0. Without, 0 after SIGTERM.

    Raises:
        UsageError: no run there, or a service, file or port that can't be used.
    """
    options = parser().parse_args(argv)
    limits = limits_of(options)
    runs = [WatchedRun(str(path), folder_of(path), options.checkpoints) for path in options.runs]
    if options.once:
        return _once(runs, limits, options.json)
    Watcher(options, runs, limits).forever()
    return EXIT_FINE


def limits_of(options: argparse.Namespace) -> Limits:
    """As the flags have them."""
    return Limits(
        stall=options.stall,
        start=options.start_limit,
        save=options.save_limit,
        node=options.node_limit,
        free_percent=options.min_free,
    )


def _once(runs: Sequence[WatchedRun], limits: Limits, as_json: bool) -> int:
    found = _look(runs, limits, time.time())
    if as_json:
        told = [screen.as_json(each, found) for each in runs]
        json.dump(told, sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
    else:
        Console(soft_wrap=True).print(screen.view(runs, found, time.strftime("%F %T %Z")))
    return EXIT_FINDING if found else EXIT_FINE


def _look(runs: Sequence[WatchedRun], limits: Limits, began: float) -> list[Finding]:
    found = []
    for each in runs:
        each.look()
        found += checks.findings(each, limits, began)
    return found


class Watcher:
    """Looks once an interval until it is told to end."""

    def __init__(self, options: argparse.Namespace, runs: Sequence[WatchedRun], limits: Limits) -> None:
        self._runs, self._limits, self._interval = runs, limits, options.interval
        named = bool(options.notify or options.notify_file)
        send = Notifier(options.notify, options.notify_file).send if named else on_stderr
        self._alerts = Alerts(
            send, per_hour=options.per_hour, settle=options.settle, digest=options.digest_hours * 3600
        )
        self._dead_man = DeadMan(options.dead_man) if options.dead_man else None
        self._tell: Callable[[Sequence[WatchedRun], Sequence[Finding]], None] | None = None
        if options.metrics_port is not None:
            from megatron_stability.watch.metrics import Exporter

            exporter = Exporter()
            exporter.serve(options.metrics_address, options.metrics_port)
            self._tell = exporter.looked
        self._over = threading.Event()

    def forever(self) -> None:
        """Until SIGTERM, or Ctrl-C; on a terminal with the view, else with what is told alone."""
        signal.signal(signal.SIGTERM, lambda *_: self._over.set())
        console, began = Console(), time.time()
        if console.is_terminal:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while not self._over.is_set():
                    found = self.step(began)
                    live.update(screen.view(self._runs, found, time.strftime("%F %T %Z")), refresh=True)
                    self._over.wait(self._interval)
        while not self._over.is_set():
            self.step(began)
            self._over.wait(self._interval)

    def step(self, began: float) -> list[Finding]:
        """One look, and what follows from it.

        Args:
            began: Unix time at which the watcher began.
        """
        found = _look(self._runs, self._limits, began)
        if self._tell is not None:
            self._tell(self._runs, found)
        self._alerts.look(found, time.monotonic())
        if self._dead_man is not None and not self._alerts.undelivered:
            self._dead_man.alive(time.monotonic())
        return found


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return value


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(
        prog="megatron-stability watch",
        description="Watches runs from outside: a process of its own, in no collective, that reads their folders. It "
        "tells of stalls, silent nodes, NaN, incidents, halts, failed or late checkpoints and full file systems.",
        epilog="example: megatron-stability watch runs/a runs/b --notify-file alerts.conf --dead-man "
        "https://hc-ping.com/UUID (docs/watch.md)",
    )
    made.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's folder")
    made.add_argument("--once", action="store_true", help="print and exit: 1 where something is wrong; sends nothing")
    made.add_argument("--json", action="store_true", help="with --once: print everything as JSON")
    made.add_argument("--interval", type=_seconds, default=INTERVAL, metavar="S", help="between looks (10)")
    made.add_argument("--checkpoints", type=Path, help="the --save folder, where it is not the ledger's parent")
    who = made.add_argument_group("who is told")
    who.add_argument(
        "--notify", action="append", default=[], metavar="URL", help="an apprise URL; more than one may be"
    )
    who.add_argument("--notify-file", type=Path, metavar="FILE", help="apprise URLs, one a line; in no process list")
    who.add_argument("--dead-man", metavar="URL", help="pinged once a minute while the watcher works")
    who.add_argument(
        "--per-hour", type=int, default=12, metavar="N", help="messages an hour at most (12); none is lost"
    )
    who.add_argument("--settle", type=_seconds, default=300.0, metavar="S", help="away for so long, it is over (300)")
    who.add_argument("--digest-hours", type=_seconds, default=24.0, metavar="H", help="between digests (24)")
    who.add_argument("--metrics-port", type=int, metavar="PORT", help="serve metrics to Prometheus")
    who.add_argument("--metrics-address", default="127.0.0.1", metavar="IP", help="where (127.0.0.1)")
    least = Limits()
    limits = made.add_argument_group("from where on")
    limits.add_argument("--stall", type=_seconds, metavar="S", help="without a step (20 median steps, 120 at least)")
    limits.add_argument(
        "--start-limit", type=_seconds, default=least.start, metavar="S", help="to the first step (3600)"
    )
    limits.add_argument("--save-limit", type=_seconds, default=least.save, metavar="S", help="for a checkpoint (1800)")
    limits.add_argument("--node-limit", type=_seconds, default=least.node, metavar="S", help="without a heartbeat (60)")
    limits.add_argument(
        "--min-free", type=_seconds, default=least.free_percent, metavar="PERCENT", help="of storage (5)"
    )
    return made
