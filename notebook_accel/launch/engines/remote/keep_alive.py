"""Each end of a connection says now and then that it lives, and notices that the other one does not."""

from __future__ import annotations

from typing import Final

from ....stream.wire import BETWEEN

KEEP_ALIVE: Final = BETWEEN
KEEP_ALIVE_SECONDS: Final = 1.0
SILENCE_SECONDS: Final = 14.5
"""How long the notebook waits for anything of an agent before it takes it for lost.

A network that is down for 10 s is quiet for longer: TCP sends again after 0.2, 0.6, 1.4, 3, 6.2 and 12.6 s (RFC 6298,
from Linux's least time-out of 0.2 s), and the last news may be a second older.
"""
NOTEBOOK_SILENCE_SECONDS: Final = 30.0
"""The same of an agent: a notebook may hold Python's lock for some time."""


class KeepAlive:
    """Notices that an end says nothing any more.

    Only time between two looks counts, and of each at most a second: a process that stood still has heard nothing
    meanwhile, and what came is still to be read.

    Args:
        now: the time, by the monotonic clock.
        seconds: how long the other end may be silent.
    """

    def __init__(self, now: float, seconds: float) -> None:
        self._looked, self._seconds = now, seconds
        self._silent = 0.0

    def is_lost(self, now: float, *, heard: bool) -> bool:
        """Note a look, and return whether it has been silent for too long.

        Args:
            now: the time, by the monotonic clock.
            heard: whether something had come.
        """
        self._silent = 0.0 if heard else self._silent + min(now - self._looked, 1.0)
        self._looked = now
        return self._silent > self._seconds
