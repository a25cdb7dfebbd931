"""How the ranks of a run that is asked to stop agree on where: the notebook's side."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from ..events import HoldOrder, StopOrder
from ..stream.inbox import Inbox
from ..stream.record import RunRecord
from .control import Control

_ANSWER_SECONDS: Final = 1.0


class Agreement:
    """Holds all ranks at their next question once a stop is asked for, and tells them the one to stop at."""

    def __init__(self, inbox: Inbox, record: RunRecord, control: Control) -> None:
        self._inbox = inbox
        self._record = record
        self._control = control
        self._held_since: float | None = None
        self._told = False

    def is_time(self, running: Iterable[int]) -> bool:
        """Return whether to end the ranks that run: a stop was asked for, and they had their time or do not ask."""
        if not self._control.stop_is_asked:
            return False
        now = time.monotonic()
        ranks = set(running)
        if self._held_since is None:
            self._held_since = now
            for rank in ranks:
                self._inbox.tell(HoldOrder(rank=rank, time=time.time()))
        questions = self._record.held
        waited = now - self._held_since
        if not self._told and ranks <= questions.keys():
            self._told = True
            last = max(questions.values()) + 1
            for rank in ranks:
                self._inbox.tell(StopOrder(rank=rank, time=time.time(), question=last))
        if self._told and not all(questions[rank] for rank in ranks):
            return True
        return waited > (self._control.grace if self._told else min(_ANSWER_SECONDS, self._control.grace))
