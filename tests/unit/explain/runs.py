"""Ledgers of small runs with one thing wrong, as a run writes them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_stability.ledger.entries import AnyEntry, LedgerView, RunEntry, StepEntry
from megatron_stability.records import Action, Tier, Verdict

BATCH, TOKENS = 8, 512.0
Change = Callable[[int, dict[str, Any]], None]


def verdict(step: int, detector: str, tier: Tier = Tier.LARGE, reason: str = "") -> Verdict:
    """What a detector said, with numbers of no importance."""
    return Verdict(
        detector=detector, tier=tier, step=step, value=9.0, threshold=1.0, reason=reason or f"{detector} spoke"
    )


def settings(**changed: Any) -> dict[str, Any]:
    """Of a `run` line."""
    return {"num_layers": 24, "lr": 3e-4, "adam_beta2": 0.95, **changed}


@dataclass
class Run:
    """A healthy run of one process at a falling loss; `wrong` changes the fields of a step."""

    steps: int = 160
    generation: int = 1
    first: int = 1
    seed: int = 0
    world: int = 4
    settings: dict[str, Any] = field(default_factory=settings)
    versions: dict[str, str] = field(default_factory=lambda: {"torch": "2.11"})
    data: dict[str, str] = field(default_factory=lambda: {"data_path": "a", "seed": "1"})
    signals: bool = True
    wrong: Change = lambda number, fields: None

    def entries(self) -> list[AnyEntry]:
        """The lines of this process."""
        noise = random.Random(self.seed)
        lines: list[AnyEntry] = [
            RunEntry(
                generation=self.generation,
                schema_version=1,
                resumed_step=self.first - 1,
                resumed_sample=(self.first - 1) * BATCH,
                settings=self.settings,
                versions=self.versions,
                data=self.data,
                layout={"world_size": self.world},
            )
        ]
        for number in range(self.first, self.first + self.steps):
            fields: dict[str, Any] = {
                "loss": 3.0 + 2.0 * 0.98**number + noise.gauss(0, 0.02),
                "grad_norm": 1.0 + abs(noise.gauss(0, 0.1)),
                "learning_rate": 3e-4,
                "tokens": TOKENS,
                "fate": "trained",
                "action": Action.APPLY,
                "signals": self._signals(noise) if self.signals else {},
            }
            self.wrong(number, fields)
            fields.setdefault("advised", fields["action"])
            lines.append(
                StepEntry(
                    generation=self.generation,
                    step=number,
                    first_sample=(number - 1) * BATCH,
                    **({"samples": BATCH} | fields),
                )
            )
        return lines

    def _signals(self, noise: random.Random) -> dict[str, float]:
        return {
            "data/repeated": 0.02 + abs(noise.gauss(0, 0.005)),
            "data/entropy": 4.0 + noise.gauss(0, 0.05),
            "attention/max_logit": 8.0 + noise.gauss(0, 0.2),
            "step_seconds": 1.0 + abs(noise.gauss(0, 0.02)),
            "ranks/weights": 0.0,
            "log_z/sum": 0.3 * 256,
            "log_z/weight": 256.0,
        }


def view(*runs: Run) -> LedgerView:
    """One ledger of processes that follow one another."""
    return LedgerView(tuple(entry for run in runs for entry in run.entries()))


def at(step: int, **fields: Any) -> Change:
    """A change of one step's fields; `signals` are added to those it has."""

    def change(number: int, known: dict[str, Any]) -> None:
        if number == step:
            apply(known, fields)

    return change


def since(step: int, until: int = 10**9, **fields: Any) -> Change:
    """A change of every step from one on; a callable value gets the number of steps since."""

    def change(number: int, known: dict[str, Any]) -> None:
        if step <= number < until:
            apply(known, {name: each(number - step) if callable(each) else each for name, each in fields.items()})

    return change


def both(*changes: Change) -> Change:
    """One after the other."""

    def change(number: int, known: dict[str, Any]) -> None:
        for each in changes:
            each(number, known)

    return change


def apply(known: dict[str, Any], fields: dict[str, Any]) -> None:
    """Set fields, and add signals."""
    known |= {name: value for name, value in fields.items() if name != "signals"}
    known["signals"] = {**known["signals"], **fields.get("signals", {})}
