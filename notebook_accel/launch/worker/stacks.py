"""In a worker: the stack of a thread, and the collective that it waits in."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from ...events import Frame

BACKWARD: Final = "backward"
_TORCH: Final = "torch/distributed/distributed_c10d.py"
_OURS: Final = "notebook_accel/comm/torch_dist.py"
_COMM: Final = "notebook_accel.comm.base"  # not imported here: a script may do without torch
_ENGINE: Final = "_engine_run_backward"
_OWN_FOLDERS: Final = tuple(str(Path(__file__).parents[2] / name) for name in ("launch", "session"))


def read_stack(thread: int) -> list[FrameType]:
    """Return the frames of a thread, outermost first; empty where it has ended.

    Args:
        thread: its identifier.
    """
    frames = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


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


def describe_users_frames(stack: Sequence[FrameType]) -> list[Frame]:
    """Return the frames of the launched function; those that lead to it are ours, and in a fork also the notebook's."""
    for number in range(len(stack) - 1, -1, -1):
        if stack[number].f_code.co_filename.startswith(_OWN_FOLDERS):
            return [_describe(frame) for frame in stack[number + 1 :]]
    return [_describe(frame) for frame in stack]


def _describe(frame: FrameType) -> Frame:
    code = frame.f_code
    return Frame(
        filename=code.co_filename,
        lineno=frame.f_lineno or code.co_firstlineno,
        first_lineno=code.co_firstlineno,
        name=code.co_name,
        qualname=getattr(code, "co_qualname", code.co_name),
    )
