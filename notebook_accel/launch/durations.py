"""How long runs and calls last, by a clock that never jumps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..events import Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """When a run or a call started.

    Attributes:
        wall: in seconds since the epoch; that clock may jump.
        moment: by the monotonic clock of this machine.
    """

    wall: float = field(default_factory=time.time)
    moment: float = field(default_factory=time.monotonic)

    @classmethod
    def at(cls, wall: float) -> Start:
        """Return the start of what began on another machine, or in another process.

        Args:
            wall: when, in seconds since the epoch.
        """
        return cls(wall=wall, moment=time.monotonic() - max(0.0, time.time() - wall))

    @property
    def seconds(self) -> float:
        """The seconds since then."""
        return time.monotonic() - self.moment

    def measure(self, failure: Failure, *, is_of_here: bool = True) -> float:
        """Return the seconds until a failure; never more than have passed.

        Args:
            failure: of a rank.
            is_of_here: whether its process ran on this machine: the clock of another one is compared with ours.
        """
        after = failure.time - self.wall
        if is_of_here and failure.moment is not None:
            after = failure.moment - self.moment
        return min(max(0.0, after), self.seconds)


def format_duration(seconds: float) -> str:
    """Return a duration as people say it: `0.4 s`, `12 s`, `3 min 20 s`, `2 h 5 min`.

    Args:
        seconds: 0 or more.
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
