"""How the ranks of a run agree on where to stop, once it is asked to: the notebook's side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

from ...events import HoldOrder, Order, StopOrder
from ...stream.record import RunRecord
from .control import Control

_ANSWER_SECONDS: Final = 10.0  # whose function never asks says so at once; who stands still has work to save


class StopAgreement:
    """Brings the ranks to stop at the same question.

    Ranks ask again and again whether to stop (`accelerator.should_stop`). Once a stop is asked for, each rank is held
    at its next question and says how often it has asked. Then all are told to stop at the question after the latest
    one.

    Args:
        tell: sends an order to a rank.
        record: says how often each held rank has asked.
        control: says that the run is to stop, and how long the ranks have.
    """

    def __init__(self, tell: Callable[[Order], None], record: RunRecord, control: Control) -> None:
        self._tell = tell
        self._record = record
        self._control = control
        self._held_since: float | None = None
        self._is_agreed = False

    def is_due(self, running: Iterable[int], *, is_saving: bool = False) -> bool:
        """Return whether the ranks have to be ended from outside; comes several times a second.

        That is so where they had their time, or where one of them never asks and no checkpoint is being written.

        Args:
            running: ranks that have not ended.
            is_saving: whether they write a checkpoint in the background, for which they have their time too.
        """
        if not self._control.stop_is_asked:
            return False
        if self._control.signum is not None:
            return True
        now = time.monotonic()
        ranks = set(running)
        if self._held_since is None:
            self._held_since = now
            for rank in ranks:
                self._tell(HoldOrder(rank=rank, time=time.time()))
        questions = self._record.held
        waited = now - self._held_since
        if not self._is_agreed and ranks <= questions.keys():
            self._is_agreed = True
            last = max(questions.values()) + 1
            for rank in ranks:
                self._tell(StopOrder(rank=rank, time=time.time(), question=last))
        if waited > self._control.grace or is_saving:
            return waited > self._control.grace
        if self._is_agreed:
            return not all(questions[rank] for rank in ranks)
        return waited > _ANSWER_SECONDS
