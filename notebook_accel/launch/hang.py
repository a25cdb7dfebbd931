"""What is told where ranks wait for others that do not come, or where nothing goes on at all."""

from __future__ import annotations

import linecache
import sysconfig
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from ..events import Frame, RaisedError, Recorded, Where
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


def told(
    wheres: Mapping[int, Where],
    running: Mapping[int, int],
    started: Collection[int],
    ended: Collection[int],
    seconds: float,
) -> str:
    """Return the stack of each rank, and what the ranks wait for.

    Args:
        wheres: where each rank is that has answered.
        running: process ids by rank.
        started: ranks that have been asked.
        ended: ranks that have returned.
        seconds: for which nothing was heard of any of them.
    """
    rows = [f"nothing was heard of {_ranks(running)} for {seconds:.0f} s"]
    waiting = {rank: where.collective for rank, where in wheres.items() if where.collective}
    others = sorted([*ended, *(rank for rank in wheres if rank not in waiting)])
    if waiting and others:
        names = " and ".join(sorted(set(waiting.values())))
        rows[0] += f": {_ranks(waiting)} {_has(waiting)} entered {names}, {_ranks(others)} {_has(others)} not"
    elif len(set(waiting.values())) > 1:
        rows[0] += ": they are in different collectives"
    for rank in sorted(running):
        who = f"rank {rank} (process {running[rank]})"
        if rank not in started:
            rows.append(f"{who} is still starting")
            continue
        if rank not in wheres:
            rows.append(f"{who} does not answer, so C code holds the interpreter; its stack follows")
            continue
        rows.append(f"{who}{f', in {waiting[rank]}' if rank in waiting else ''}:")
        rows += [f"    {spot(frame)}" for frame in _users(wheres[rank].frames)] or [
            "    in no code of the user's"
        ]
        rows += [f"    torch's flight recorder: {_collective(entry)}" for entry in wheres[rank].recorded]
    rows += [f"rank {rank} has returned" for rank in sorted(ended)]
    return "\n".join(rows)


def _collective(entry: Recorded) -> str:
    """Return a recorded collective as `gloo:all_reduce of 3 Float, number 7 of default_pg, has not ended`."""
    of = f" of {entry.inputs}" if entry.inputs else ""
    end = "has ended, and nothing came after it" if entry.is_over else "has not ended"
    return f"{entry.name}{of}, number {entry.number} of {entry.group}, {end}"


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
    own = _users(frames)[::-1]
    return next((frame for frame in own if is_cell(frame.filename)), own[0] if own else None)


def _users(frames: Collection[Frame]) -> list[Frame]:
    """Return the frames of cells and of the user's other code."""
    libraries = (_TORCH, _OURS, _STANDARD, "<")
    return [frame for frame in frames if is_cell(frame.filename) or not frame.filename.startswith(libraries)]
