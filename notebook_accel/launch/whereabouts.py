"""Where a thread is: its stack, the collective that it waits in, and since when nothing of it has changed."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from ..comm.base import Comm
from ..events import Frame

BACKWARD: Final = "backward"
_TORCH: Final = "torch/distributed/distributed_c10d.py"
_OURS: Final = "notebook_accel/comm/torch_dist.py"
_ENGINE: Final = "_engine_run_backward"
_OWN_FOLDERS: Final = tuple(str(Path(__file__).parents[1] / name) for name in ("launch", "session"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What a look at a thread showed; `events.Where` says what the fields mean."""

    collective: str
    seconds: float
    frames: Sequence[Frame]


class Whereabouts:
    """Looks at a thread now and then."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._mark: tuple[tuple[int, int], ...] = ()
        self._since = 0.0

    def look(self) -> Seen:
        """Say where the thread is."""
        stack = _stack(self._thread)
        now = time.monotonic()
        mark = tuple((id(frame), frame.f_lasti) for frame in stack)
        if mark != self._mark:
            self._mark, self._since = mark, now
        return Seen(
            collective=collective_of(stack),
            seconds=now - self._since,
            frames=[_frame(frame) for frame in _users(stack)],
        )


def collective_of(stack: Sequence[FrameType]) -> str:
    """Return the outermost collective in a stack, `backward` where it waits for one there; empty for none."""
    for frame in stack:
        code = frame.f_code
        place = code.co_filename.replace("\\", "/")
        if place.endswith(_TORCH) and code.co_name != "wrapper":
            return code.co_name
        if place.endswith(_OURS) and hasattr(Comm, code.co_name):
            return code.co_name
        if code.co_name == _ENGINE:
            return BACKWARD
    return ""


def _stack(thread: int) -> list[FrameType]:
    """Return a thread's frames, outermost first, without what runs it."""
    frames = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _users(stack: Sequence[FrameType]) -> Sequence[FrameType]:
    """Return the frames within the launched function: below it are ours, and in a fork the notebook's."""
    for number in range(len(stack) - 1, -1, -1):
        if stack[number].f_code.co_filename.startswith(_OWN_FOLDERS):
            return stack[number + 1 :]
    return stack


def _frame(frame: FrameType) -> Frame:
    code = frame.f_code
    return Frame(
        filename=code.co_filename,
        lineno=frame.f_lineno or code.co_firstlineno,
        first_lineno=code.co_firstlineno,
        name=code.co_name,
        qualname=getattr(code, "co_qualname", code.co_name),
    )
