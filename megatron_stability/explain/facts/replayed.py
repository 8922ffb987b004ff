"""Facts of a replay: what came again, and in which branch it did not."""

from __future__ import annotations

from megatron_stability.explain.facts.fact import Fact, Reader
from megatron_stability.explain.scene import Scene


def reproduces(scene: Scene) -> Fact | None:
    """The branch without a change was equal to the run, to the bit; one that merely met it again says nothing."""
    seen = _branch(scene, "replay")
    if seen is None or (seen["present"] and not seen["equal"]):
        return None
    return Fact(bool(seen["equal"]), f"replayed: {seen['meaning']}")


def clears(branch: str) -> Reader:
    """The incident did not come in this branch, and did in the one without a change."""

    def read(scene: Scene) -> Fact | None:
        plain, seen = _branch(scene, "replay"), _branch(scene, branch)
        if plain is None or seen is None or not plain["present"]:
            return None
        return Fact(not seen["present"], f"branch {branch}: {seen['meaning']}")

    return read


def _branch(scene: Scene, name: str) -> dict[str, object] | None:
    if scene.replay is None:
        return None
    return next((each for each in scene.replay["branches"] if each["name"] == name and not each["failure"]), None)
