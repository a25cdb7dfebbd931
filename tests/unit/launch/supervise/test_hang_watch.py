"""When a run that does nothing any more is told of, with what other nodes say of theirs."""

from __future__ import annotations

from collections import defaultdict

import pytest

from notebook_accel.events import Event, Lines, Order, StackReport, Unfinished
from notebook_accel.launch.supervise.hang_watch import HangWatch
from tests.unit.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("notebook_accel.launch.supervise.hang_watch.time", made)
    return made


class Ranks:
    """Rank 0, which answers where it is, others that do not, and a watch of them."""

    def __init__(self, timeout: float) -> None:
        self.shown: list[Event] = []
        self.states = defaultdict[int, str](str)
        self.signalled: list[int] = []
        self.answers = True
        self.watch = HangWatch(
            timeout,
            self.tell,
            self.shown.extend,
            self.send_signal,
            self.states.__getitem__,
            {}.get,  # type: ignore[arg-type]
        )

    def send_signal(self, rank: int, signum: int) -> None:
        self.signalled.append(rank)

    def tell(self, order: Order) -> None:
        if not self.answers or order.rank:
            return
        self.watch.take([StackReport(rank=0, time=order.time, collective="barrier", frames=())])

    def look(self) -> str:
        return self.watch.look({0: 100}, {0}, ()) or self.watch.look({0: 100}, {0}, ())


def test_what_another_node_asks_is_told_once(clock: Clock) -> None:
    ranks = Ranks(60.0)
    assert not ranks.look() and not ranks.watch.is_asking
    ranks.watch.hear_others(0.0, ask=True)
    assert ranks.watch.is_asking and "in barrier" in ranks.look() and not ranks.watch.is_asking
    ranks.watch.hear_others(0.0, ask=False)
    clock.now += 1.1  # what comes sooner may be the stacks themselves
    ranks.watch.take([Lines(rank=0, time=clock.time(), stream="stdout", texts=("goes on",))])
    assert not ranks.look() and len(ranks.shown) == 1


def test_news_of_another_node_count_but_are_not_passed_on(clock: Clock) -> None:
    ranks = Ranks(20.0)
    own = ranks.watch.news
    clock.now += 25
    ranks.watch.hear_others(clock.now - 10, ask=False)
    assert not ranks.look() and ranks.watch.news == own
    clock.now += 15
    assert "in barrier" in ranks.look()


@pytest.mark.parametrize("state", ["is stopped by a signal", ""])
def test_a_rank_that_is_stopped_is_not_taken_for_one_in_c_code(state: str, clock: Clock) -> None:
    ranks = Ranks(20.0)
    ranks.answers, ranks.states[0] = False, state
    clock.now += 25
    assert not ranks.look(), "it has some time to answer"
    clock.now += 25
    text = ranks.look()
    assert f"rank 0 (process 100) {state or 'does not answer'}" in text
    assert ("C code" in text) == (not state)
    assert ranks.signalled == ([] if state else [0]), "a stack would come when the process goes on"


def test_writes_without_newline_are_news(clock: Clock) -> None:
    ranks = Ranks(60.0)
    before = ranks.watch.news
    clock.now += 1
    ranks.watch.take([Unfinished(rank=0, time=clock.time(), stream="stdout", text="working")])
    assert ranks.watch.news > before


def test_a_call_of_a_session_begins_anew(clock: Clock) -> None:
    ranks = Ranks(20.0)
    clock.now += 25
    ranks.watch.begin()
    assert not ranks.look()
    clock.now += 25
    assert "in barrier" in ranks.look()
    clock.now += 25
    assert not ranks.look(), "it is told once"
    ranks.watch.begin()
    clock.now += 25
    assert "in barrier" in ranks.look()
