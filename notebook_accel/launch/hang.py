"""What is told where some ranks of a call wait for others that do not come."""

from __future__ import annotations

import linecache
import sysconfig
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from ..events import Frame, RaisedError, Where
from .kernel_state import is_cell, place_of

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_STANDARD = sysconfig.get_path("stdlib")


def sentence(
    wheres: Mapping[int, Where], ended: Collection[int], absent: Collection[int], seconds: float
) -> str:
    """Return what to tell, empty where nobody has waited for `seconds`, or all wait for the same.

    Args:
        wheres: where each rank is that has not ended its call.
        ended: ranks that have ended it.
        absent: ranks that take no part in it.
        seconds: from which on a wait is told.
    """
    waiting = {rank: where for rank, where in wheres.items() if where.collective}
    longest = max((where.seconds for where in waiting.values()), default=0.0)
    if longest < seconds:
        return ""
    names = {where.collective for where in waiting.values()}
    missing = sorted([*ended, *absent, *(rank for rank in wheres if rank not in waiting)])
    if not missing and len(names) == 1:
        return ""
    rows = [f"{_ranks(waiting)} {_has(waiting)} waited for {longest:.0f} s"]
    if missing:
        rows[0] += f" in {' and '.join(sorted(names))}, which {_ranks(missing)} {_has(missing)} not entered:"
    else:
        rows[0] += " in different collectives:"
    rows += [f"  rank {rank}: {_line(wheres[rank])}" for rank in sorted(wheres)]
    rows += [f"  rank {rank}: has ended the call" for rank in sorted(ended)]
    rows += [f"  rank {rank}: takes no part in the call" for rank in sorted(absent)]
    return "\n".join([*rows, "  interrupt the cell to stop the call on all ranks"])


def _ranks(ranks: Collection[int]) -> str:
    words = ", ".join(map(str, sorted(ranks)))
    return f"rank {words}" if len(ranks) == 1 else f"ranks {words}"


def _has(ranks: Collection[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _line(where: Where) -> str:
    frame = place_in(where.frames)
    doing = f"in {where.collective}, " if where.collective else ""
    if frame is None:
        return f"{doing}in code of the session"
    return f"{doing}{spot(frame)}"


def spot(frame: Frame) -> str:
    """Return a frame's cell or file with its line."""
    text = linecache.getline(frame.filename, frame.lineno).strip()
    return f"{place_of(frame.filename)}, line {frame.lineno}" + (f": {text}" if text else "")


def place_of_error(raised: RaisedError) -> Frame | None:
    """Return where an error was raised; one that comes while another is passed on says little, that one more."""
    error: RaisedError | None = raised
    while error is not None:
        if (frame := place_in(error.frames)) is not None:
            return frame
        error = error.context
    return None


def place_in(frames: Collection[Frame]) -> Frame | None:
    """Return the innermost frame of a cell; without one, of the user's other code."""
    stack = list(frames)[::-1]
    own = [frame for frame in stack if not frame.filename.startswith((_TORCH, _OURS, _STANDARD, "<"))]
    return next((frame for frame in stack if is_cell(frame.filename)), own[0] if own else None)
