"""Each finding once, never in a flood, none lost; on a clock of the test's own."""

from __future__ import annotations

from megatron_stability.decide.urgency import Urgency
from megatron_stability.watch.alerts import Alerts
from megatron_stability.watch.findings import Finding, Kind


class Post:
    """Keeps what was sent; refuses while it is down."""

    def __init__(self) -> None:
        self.bodies: list[str] = []
        self.down = False

    def __call__(self, title: str, body: str) -> bool:
        if not self.down:
            self.bodies.append(body)
        return not self.down


def finding(what: str = "x", *, page: bool = True, event: bool = False) -> Finding:
    urgency = Urgency.PAGE if page else Urgency.DIGEST
    return Finding(run="a", kind=Kind.STORAGE, what=what, urgency=urgency, text=f"{what} is wrong", event=event)


def test_what_lasts_is_told_once_and_its_end_once() -> None:
    post = Post()
    alerts = Alerts(post, settle=100)
    for now in range(0, 1000, 10):
        alerts.look([finding()] if now < 500 else [], now)
    assert post.bodies == ["a: x is wrong", "over after 500 s: a: x is wrong"]


def test_what_flaps_is_one_alert_and_one_digest() -> None:
    post = Post()
    alerts = Alerts(post, settle=100)
    for now in range(0, 2000, 10):
        alerts.look([finding()] if now < 1000 and now % 20 == 0 else [], now)
    assert post.bodies == ["a: x is wrong", "came and went 50 times in 990 s, over after 990 s: a: x is wrong"]


def test_what_flaps_for_days_is_one_digest_a_day() -> None:
    post = Post()
    alerts = Alerts(post, settle=100, digest=86400)
    for now in range(0, 3 * 86400, 50):
        alerts.look([finding()] if now % 100 == 0 else [], now)
    assert len(post.bodies) == 3
    assert post.bodies[1].startswith("came and went 865 times in 86400 s, and holds")


def test_more_than_the_limit_waits_and_goes_out_together() -> None:
    post = Post()
    alerts = Alerts(post, per_hour=3)
    for now in range(20):
        alerts.look([finding(f"n{now}", event=True)], now)
    assert len(post.bodies) == 3
    alerts.look([], 3600)
    assert len(post.bodies) == 4
    told = "\n".join(post.bodies)
    assert all(f"a: n{number} is wrong" in told for number in range(20))


def test_what_was_not_delivered_is_sent_again() -> None:
    post = Post()
    alerts = Alerts(post)
    post.down = True
    alerts.look([finding()], 0)
    assert alerts.undelivered
    post.down = False
    alerts.look([finding()], 31)
    assert post.bodies == ["a: x is wrong"]
    assert not alerts.undelivered


def test_what_wakes_nobody_waits_for_the_digest() -> None:
    post = Post()
    alerts = Alerts(post, digest=1000)
    for now in range(0, 2500, 100):
        alerts.look([finding("x", page=False, event=True), finding("y", page=False)], now)
    assert post.bodies == ["a: x is wrong\na: y is wrong"]


def test_an_event_is_told_once_whatever_comes_after() -> None:
    post = Post()
    alerts = Alerts(post, settle=10)
    for now in (0, 10, 1000, 2000):
        alerts.look([finding(event=True)] if now != 1000 else [], now)
    assert post.bodies == ["a: x is wrong"]
