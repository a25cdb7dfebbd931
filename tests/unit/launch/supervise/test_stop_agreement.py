"""How ranks come to stop at the same question, and who is not waited for."""

from __future__ import annotations

import pytest

from notebook_accel.events import Held, HoldOrder, Order, StopOrder
from notebook_accel.launch.supervise import stop_agreement
from notebook_accel.launch.supervise.control import Control
from notebook_accel.launch.supervise.stop_agreement import Questions, StopAgreement
from notebook_accel.stream.record import RunRecord
from tests.unit.clock import Clock

GRACE = 30.0


class Ranks:
    """Two ranks, and what they are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr(stop_agreement, "time", self.clock)
        self.told: list[Order] = []
        self.record = RunRecord()
        self.control = Control()
        self.agreement = StopAgreement(self.told.append, self.record.held, self.control)

    def is_due(self, after: float = 0.0, *, is_saving: bool = False) -> bool:
        self.clock.now += after
        return self.agreement.is_due([0, 1], is_saving=is_saving)

    def hold(self, rank: int, questions: int) -> None:
        self.record.apply(Held(rank=rank, time=self.clock.now, questions=questions))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_nobody_is_ended_who_was_not_asked(ranks: Ranks) -> None:
    assert not ranks.is_due(1000.0) and not ranks.told


def test_ranks_that_do_not_ask_are_ended_at_once(ranks: Ranks) -> None:
    ranks.control.stop(GRACE)
    assert not ranks.is_due()
    ranks.hold(1, 5)
    ranks.hold(0, 0)
    assert ranks.is_due()


def test_ranks_that_stand_still_are_waited_for_a_while(ranks: Ranks) -> None:
    ranks.control.stop(GRACE)
    assert not ranks.is_due() and [type(order) for order in ranks.told] == [HoldOrder] * 2
    ranks.hold(1, 5)
    assert not ranks.is_due(9.9), "rank 0 may stand still"
    assert ranks.is_due(0.2)


def test_ranks_that_write_a_checkpoint_have_their_time_for_it(ranks: Ranks) -> None:
    ranks.control.stop(GRACE)
    assert not ranks.is_due(is_saving=True)
    assert not ranks.is_due(GRACE - 1.0, is_saving=True), "rank 0 may stand still"
    ranks.hold(1, 5)
    ranks.hold(0, 0)
    assert not ranks.is_due(is_saving=True) and ranks.is_due()
    assert ranks.is_due(2.0, is_saving=True)


def test_ranks_that_ask_stop_at_the_same_question_and_have_their_time(ranks: Ranks) -> None:
    ranks.control.stop(GRACE)
    ranks.is_due()
    ranks.hold(0, 7)
    ranks.hold(1, 5)
    assert not ranks.is_due(0.1)
    orders = [order for order in ranks.told if isinstance(order, StopOrder)]
    assert [(order.rank, order.question) for order in orders] == [(0, 8), (1, 8)]
    assert not ranks.is_due(GRACE - 1.0)
    assert ranks.is_due(2.0)


def test_a_signal_that_ends_this_process_leaves_no_time(ranks: Ranks) -> None:
    ranks.control.end(15)
    assert ranks.is_due()


def test_a_shorter_grace_counts(ranks: Ranks) -> None:
    ranks.control.stop(GRACE)
    ranks.is_due()
    for rank in (0, 1):
        ranks.hold(rank, 1)
    assert not ranks.is_due(2.0)
    ranks.control.stop(0.0)
    assert ranks.is_due(0.1)


class Others:
    """The launchers of other nodes: what they were told, and what they say."""

    def __init__(self) -> None:
        self.told: list[tuple[bool, Questions | None]] = []
        self.says: tuple[bool, Questions | None] = (False, None)

    def share(self, asks: bool, own: Questions | None) -> tuple[bool, Questions | None]:
        self.told.append((asks, own))
        return asks or self.says[0], self.says[1]


@pytest.fixture
def others(ranks: Ranks) -> Others:
    made = Others()
    ranks.agreement = StopAgreement(ranks.told.append, ranks.record.held, ranks.control, made.share)
    return made


def test_a_stop_of_another_node_holds_the_ranks_here_and_ends_none(ranks: Ranks, others: Others) -> None:
    assert not ranks.is_due() and not ranks.told
    others.says = (True, None)
    assert not ranks.is_due(1000.0) and [type(order) for order in ranks.told] == [HoldOrder] * 2
    ranks.hold(0, 7)
    assert not ranks.is_due() and others.told[-1] == (False, None)
    ranks.hold(1, 0)
    assert not ranks.is_due() and others.told[-1] == (False, Questions(0, 7))
    others.says = (True, Questions(0, 9))
    assert not ranks.is_due(1000.0), "the node that asks ends the run"
    orders = [order for order in ranks.told if isinstance(order, StopOrder)]
    assert [(order.rank, order.question) for order in orders] == [(0, 10), (1, 10)]


@pytest.mark.parametrize(("least", "is_due"), [(5, False), (0, True)])
def test_the_node_that_asks_counts_the_questions_of_all(
    ranks: Ranks, others: Others, least: int, is_due: bool
) -> None:
    ranks.control.stop(GRACE)
    assert not ranks.is_due() and others.told[-1] == (True, None)
    ranks.hold(0, 7)
    ranks.hold(1, 5)
    assert not ranks.is_due(9.0), "ranks of others may stand still"
    others.says = (True, Questions(least, 8))
    assert ranks.is_due() == is_due
    assert ranks.told[-1] == StopOrder(rank=1, time=ranks.told[-1].time, question=9)
    assert ranks.is_due(GRACE)
