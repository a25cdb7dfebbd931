"""In a worker: the stack of a thread, the collective that it waits in, and how long the stack has not changed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from ...events import Frame

BACKWARD: Final = "backward"
_TORCH: Final = "torch/distributed/distributed_c10d.py"
_OURS: Final = "notebook_accel/comm/torch_dist.py"
_COMM: Final = "notebook_accel.comm.base"  # not imported here: a script may do without torch
_ENGINE: Final = "_engine_run_backward"
_SHUTDOWN: Final = threading._shutdown.__code__  # type: ignore[attr-defined]
_OWN_FOLDERS: Final = tuple(str(Path(__file__).parents[2] / name) for name in ("launch", "session"))


@dataclass(frozen=True, kw_only=True, slots=True)
class StackState:
    """The stack of a thread.

    Attributes:
        collective: that the thread waits in, or `backward`; empty where it is in neither.
        seconds: how long the stack has looked like this, as far as somebody looked.
        frames: the user's, outermost first.
    """

    collective: str
    seconds: float
    frames: Sequence[Frame]


class StackWatch:
    """Looks at a thread now and then; once it waits, at its end, for a thread that was left, at that one.

    Args:
        thread: the thread's identifier.
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._mark: tuple[tuple[int, int], ...] = ()
        self._since = 0.0

    def look(self) -> StackState:
        """Return where the thread is."""
        stack = _read_stack(self._thread)
        if any(frame.f_code is _SHUTDOWN for frame in stack):
            stack = next(filter(None, map(_read_stack, _list_left())), stack)
        now = time.monotonic()
        mark = tuple((id(frame), frame.f_lasti) for frame in stack)
        if mark != self._mark:
            self._mark, self._since = mark, now
        return StackState(
            collective=find_collective(stack),
            seconds=now - self._since,
            frames=[_describe(frame) for frame in _drop_ours(stack)],
        )


def find_collective(stack: Sequence[FrameType]) -> str:
    """Return the outermost collective in a stack.

    Args:
        stack: frames, outermost first.

    Returns:
        The collective's name; `backward` where the thread is in a backward pass, which may wait for one; else empty.
    """
    for frame in stack:
        code = frame.f_code
        place = code.co_filename.replace("\\", "/")
        if place.endswith(_TORCH) and code.co_name != "wrapper":
            return code.co_name
        if place.endswith(_OURS) and hasattr(getattr(sys.modules.get(_COMM), "Comm", None), code.co_name):
            return code.co_name
        if code.co_name == _ENGINE:
            return BACKWARD
    return ""


def _list_left() -> list[int]:
    """Return the threads that the interpreter waits for at its end."""
    here = (threading.main_thread(), threading.current_thread())
    return [one.ident for one in threading.enumerate() if one.ident and not one.daemon and one not in here]


def _read_stack(thread: int) -> list[FrameType]:
    """Return a thread's frames, outermost first; empty where it has ended."""
    frames = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _drop_ours(stack: Sequence[FrameType]) -> Sequence[FrameType]:
    """Return the frames of the launched function; those that lead to it are ours, and in a fork also the notebook's."""
    for number in range(len(stack) - 1, -1, -1):
        if stack[number].f_code.co_filename.startswith(_OWN_FOLDERS):
            return stack[number + 1 :]
    return stack


def _describe(frame: FrameType) -> Frame:
    code = frame.f_code
    return Frame(
        filename=code.co_filename,
        lineno=frame.f_lineno or code.co_firstlineno,
        first_lineno=code.co_firstlineno,
        name=code.co_name,
        qualname=getattr(code, "co_qualname", code.co_name),
    )
