"""Time in tests: a clock that goes on when it is told to, and waits for what comes at some time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""For what comes at once on an idle machine."""


class Clock:
    """Stands for the module `time` in a module that is tested."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Wait until something holds; AssertionError where it does not within some seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.005)


def wait_in(thread: threading.Thread, function: str) -> None:
    """Wait until a thread stands in a function of this name, or in one that it calls."""

    def stands() -> bool:
        frame = sys._current_frames().get(thread.ident or 0)
        while frame is not None and frame.f_code.co_name != function:
            frame = frame.f_back
        return frame is not None

    wait_until(stands)
