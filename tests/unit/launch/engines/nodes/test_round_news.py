"""What nodes of a round tell each other, through a store of this process."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch.distributed import HashStore

from notebook_accel.launch.engines.nodes import round_news
from notebook_accel.launch.engines.nodes.outcomes import RestartCause
from notebook_accel.launch.engines.nodes.round_news import RoundNews
from notebook_accel.launch.supervise.stop_agreement import Questions
from notebook_accel.trust import plain
from notebook_accel.trust.plain import MalformedError
from tests.unit.clock import Clock


@dataclass
class Round:
    """Three nodes; each look is a second after the last one."""

    clock: Clock
    store: HashStore = field(default_factory=HashStore)
    ended: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.nodes = [
            RoundNews(self.store, place, 3, self._write, self._read, lambda: self.ended) for place in range(3)
        ]

    def _write(self, name: str, kind: Any, value: Any) -> None:
        self.store.set(name, plain.encode(kind, value, proven=False))

    def _read(self, name: str, kind: Any) -> Any:
        try:
            return plain.load(kind, json.loads(self.store.get(name)), proven=False)
        except ValueError as error:
            raise MalformedError(str(error)) from None

    def stop(self, place: int, asks: bool, *own: int) -> tuple[bool, Questions | None]:
        self.clock.now += 1.0
        return self.nodes[place].share_stop(asks, Questions(*own) if own else None)

    def news(self, place: int, news: float = 0.0, *, ask: bool = False) -> tuple[float, bool]:
        self.clock.now += 1.0
        return self.nodes[place].share_news(news, ask=ask, every=5.0)


@pytest.fixture
def a_round(monkeypatch: pytest.MonkeyPatch) -> Round:
    clock = Clock()
    monkeypatch.setattr(round_news, "time", clock)
    return Round(clock)


def test_all_nodes_learn_of_a_stop_and_of_its_question(a_round: Round) -> None:
    assert a_round.stop(0, False) == (False, None)
    assert a_round.stop(1, True) == (True, None) == a_round.stop(0, False)
    assert a_round.stop(0, False, 2, 7) == (True, None) == a_round.stop(1, True, 3, 3)
    a_round.ended = {2}
    assert a_round.stop(0, False, 2, 7) == (True, Questions(2, 7)) == a_round.stop(1, True, 3, 3)


def test_questions_of_a_node_that_has_ended_count_for_all(a_round: Round) -> None:
    """Else those that look before and after its end would stop at different ones."""
    a_round.stop(1, True)
    for place, own in enumerate([(2, 7), (3, 3), (1, 9)]):
        a_round.stop(place, False, *own)
    a_round.ended = {2}
    assert a_round.stop(0, False, 2, 7)[1] == a_round.stop(1, True, 3, 3)[1] == Questions(1, 9)


def test_what_a_stranger_writes_stops_nobody(a_round: Round) -> None:
    a_round.stop(0, True)
    a_round.store.set("held 2", "[]")
    a_round.stop(1, False, 3, 3)
    assert a_round.stop(0, True, 2, 7) == (True, None)
    a_round.store.set("hang 2", "{}")
    for place in (0, 1):
        is_told = a_round.nodes[place].share_hang(f"hang of {place}")
    assert is_told and a_round.nodes[1].hang == "hang of 0\nhang of 1"


def test_news_of_one_node_are_those_of_all(a_round: Round) -> None:
    assert a_round.news(0) == (0.0, False)
    began = a_round.clock.now
    assert a_round.news(1, began) == (0.0, False), "its own are none of others"
    heard, _ = a_round.news(0)
    assert heard > began
    assert a_round.news(1, began + 1.0) == (0.0, False) and a_round.news(0) == (heard, False), "too soon"
    a_round.clock.now += 5.0
    a_round.news(1, a_round.clock.now)
    assert a_round.news(0)[0] > heard


def test_who_asks_where_ranks_are_is_heard_once(a_round: Round) -> None:
    assert a_round.news(0, ask=True) == (0.0, False)
    assert [a_round.news(1)[1] for _ in range(2)] == [True, False]
    assert not a_round.news(0, ask=True)[1]
    a_round.news(0)
    a_round.news(0, ask=True)
    assert a_round.news(1)[1]


def test_reports_of_all_nodes_come_together(a_round: Round) -> None:
    assert not a_round.nodes[0].hang
    assert not a_round.nodes[0].share_hang("hang of 0") and not a_round.nodes[2].share_hang("hang of 2")
    a_round.ended = {1}
    for place in (0, 2):
        assert a_round.nodes[place].share_hang(f"hang of {place}")
        assert a_round.nodes[place].hang == "hang of 0\nhang of 2"


def test_each_node_finds_why_another_one_starts_again(a_round: Round) -> None:
    """What came first explains what followed from it; what a stranger wrote explains nothing."""
    assert [each.find_cause() for each in a_round.nodes] == [None] * 3
    follows = RestartCause(text="connection closed", follows=True)
    a_round.nodes[0].share_cause(follows)
    a_round.store.set("cause 1", "[]")
    assert [each.find_cause() for each in a_round.nodes] == [None, follows, follows]
    first = RestartCause(text="ValueError")
    a_round.nodes[2].share_cause(first)
    assert [each.find_cause() for each in a_round.nodes] == [first, first, follows]
