"""Waits for other nodes, and what is said of one that is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ....errors import LaunchError
from ...supervise.stop_agreement import Questions

_NOTICE_SECONDS = (3.0, 10.0, 30.0)
_LATER_SECONDS = 60.0
_JOIN_SECONDS = 900.0


class PeerWait:
    """A wait for other nodes: it is reported now and then, and ends.

    Args:
        seconds: how long it lasts at most; then it ends with a LaunchError.
        who: the name of the one that waits.
        tell: takes a sentence for the cell.
        check: called at each look; its exception ends the wait.
    """

    def __init__(
        self, seconds: float, who: str, tell: Callable[[str], None], check: Callable[[], None]
    ) -> None:
        self._seconds = seconds
        self._who = who
        self._tell = tell
        self._check = check
        self._began = time.monotonic()
        self._num_reports = 0

    @property
    def waited(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._began

    @property
    def is_reported(self) -> bool:
        """Whether the cell has shown it."""
        return self._num_reports > 0

    def look(self, whom: str, end: str = "") -> None:
        """Report the wait where that is due; comes several times a second.

        Args:
            whom: the name of those who are waited for.
            end: the text of the error, in place of one with their name.

        Raises:
            LaunchError: it has lasted too long.
        """
        self._check()
        if self.waited > self._seconds:
            raise LaunchError(
                end
                or f"{self._who} waited {self._seconds:g} s for {whom}; "
                "rdzv_conf={'join_timeout': seconds} sets how long"
            )
        later = _NOTICE_SECONDS[-1] + _LATER_SECONDS * (self._num_reports - len(_NOTICE_SECONDS) + 1)
        due = _NOTICE_SECONDS[self._num_reports] if self._num_reports < len(_NOTICE_SECONDS) else later
        if self.waited >= due:
            self._num_reports += 1
            self._tell(f"{self._who} waits for {whom}, for {self.waited:.0f} s now")


@dataclass
class StopState:
    """How a stop of an attempt stands.

    Attributes:
        is_asked: whether a node asks for it.
        is_held: whether the others know the questions of the ranks here.
        questions: of the ranks of all nodes, None before all are held.
    """

    is_asked: bool = False
    is_held: bool = False
    questions: Questions | None = None


def describe_lost_host(name: str, address: str) -> str:
    """Return that the node is gone without which the run cannot go on, and what to do.

    Args:
        name: the node's number and host.
        address: where the nodes meet.
    """
    return (
        f"{name} at {address}, which holds the run together, is gone: its run was stopped, its kernel has ended, "
        "or it is cut off the network; run the cell again on all nodes"
    )


def read_join_seconds(settings: Mapping[str, Any]) -> float:
    """Return how many seconds a node waits for the others.

    Args:
        settings: the launch's `rdzv_conf`.
    """
    return float(settings.get("join_timeout", settings.get("timeout", _JOIN_SECONDS)))
