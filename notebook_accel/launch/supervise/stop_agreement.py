"""How the ranks of a run agree on where to stop, once it is asked to: the notebook's side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ...events import HoldOrder, Order, StopOrder
from .control import Control

_ANSWER_SECONDS: Final = 10.0  # whose function never asks says so at once; who stands still has work to save
_MOST_QUESTIONS: Final = 1 << 62


@dataclass(frozen=True)
class Questions:
    """How often held ranks have asked.

    Attributes:
        least: the rank that asked least often.
        most: the one that asked most often.
    """

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most < _MOST_QUESTIONS:
            raise ValueError(f"{self.least} to {self.most} questions")


ShareStop = Callable[[bool, Questions | None], tuple[bool, Questions | None]]
"""Exchanges with the launchers of other nodes how a stop stands; comes several times a second.

It takes whether this launcher is to stop the run, and the questions of its ranks, None before all are held. It returns
whether any launcher is to, and the questions of all ranks, None before all are held.
"""


def share_with_nobody(asks: bool, own: Questions | None) -> tuple[bool, Questions | None]:
    """Return how a stop stands where this launcher has all ranks."""
    return asks, own


class StopAgreement:
    """Brings the ranks to stop at the same question.

    Ranks ask again and again whether to stop (`accelerator.should_stop`). Once a stop is asked for, each rank is held
    at its next question and says how often it has asked. Then all are told to stop at the question after the latest
    one.

    Args:
        tell: sends an order to a rank.
        held: how often each held rank has asked, as that becomes known.
        control: says that the run is to stop, and how long the ranks have.
        share: the way to the launchers of other nodes, whose ranks stop at that question too.
    """

    def __init__(
        self,
        tell: Callable[[Order], None],
        held: Mapping[int, int],
        control: Control,
        share: ShareStop = share_with_nobody,
    ) -> None:
        self._tell = tell
        self._held = held
        self._control = control
        self._share = share
        self._asked_since: float | None = None
        self._is_held = self._is_agreed = False

    def is_due(self, running: Iterable[int], *, is_saving: bool = False) -> bool:
        """Return whether the ranks have to be ended from outside; comes several times a second.

        That is so where they had their time, or where one of them never asks and no checkpoint is being written. A stop
        that another node asks for is ended by that node.

        Args:
            running: ranks that have not ended.
            is_saving: whether they write a checkpoint in the background, for which they have their time too.
        """
        if self._control.signum is not None:
            return True
        asks_here, ranks = self._control.stop_is_asked, set(running)
        asks, questions = self._share(asks_here, self._count(ranks))
        if not asks:
            return False
        if not self._is_held:
            self._is_held = True
            for rank in ranks:
                self._tell(HoldOrder(rank=rank, time=time.time()))
        if questions is not None and not self._is_agreed:
            self._is_agreed = True
            for rank in ranks:
                self._tell(StopOrder(rank=rank, time=time.time(), question=questions.most + 1))
        return asks_here and self._is_over(questions, is_saving)

    def _count(self, ranks: set[int]) -> Questions | None:
        """Return the questions of the ranks here, None before all are held."""
        if not self._is_held or not ranks or not ranks <= self._held.keys():
            return None
        return Questions(min(self._held[rank] for rank in ranks), max(self._held.values()))

    def _is_over(self, questions: Questions | None, is_saving: bool) -> bool:
        now = time.monotonic()
        if self._asked_since is None:
            self._asked_since = now
        waited = now - self._asked_since
        if waited > self._control.grace or is_saving:
            return waited > self._control.grace
        if questions is not None:
            return not questions.least
        return waited > _ANSWER_SECONDS
