"""What the cell shows where ranks wait for others that do not come, or where no rank does anything any more."""

from __future__ import annotations

import linecache
import sysconfig
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

import psutil
import torch

from ...events import Frame, RaisedError, RecordedCollective, StackReport
from ..checks.fork_obstacles import describe_file, is_cell
from ..rank_names import name_process

_STATES: Final = {
    psutil.STATUS_STOPPED: "is stopped by a signal, SIGSTOP or SIGTSTP: `kill -CONT {pid}` lets it go on",
    psutil.STATUS_TRACING_STOP: "is stopped by a debugger that is attached to it",
    psutil.STATUS_DISK_SLEEP: "waits in the operating system, for a disk, a network file system or a driver, and no "
    "signal reaches it",
    psutil.STATUS_ZOMBIE: "has ended, and the process that started it has not noticed",
}
"""Why a process cannot go on, by its state."""
_SILENT: Final = "does not answer, so C code holds the interpreter"
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[2])
_STANDARD = sysconfig.get_path("stdlib")


def describe_wait(
    stacks: Mapping[int, StackReport],
    returned: Collection[int],
    absent: Collection[int],
    seconds: float,
    silent: Mapping[int, int] | None = None,
) -> str:
    """Return which ranks of a session's call wait for which others.

    Args:
        stacks: where each rank is that has not ended its call.
        returned: ranks that have ended it.
        absent: ranks that take no part in it.
        seconds: how long a wait must have lasted.
        silent: process ids, on this machine, of ranks that were asked and did not answer; None for none.

    Returns:
        Lines of text; empty where nobody has waited so long, or where all ranks wait for the same.
    """
    waiting = {rank: stack for rank, stack in stacks.items() if stack.collective}
    longest = max((stack.seconds for stack in waiting.values()), default=0.0)
    if longest < seconds:
        return ""
    names = {stack.collective for stack in waiting.values()}
    silent = silent or {}
    missing = sorted({*returned, *absent, *silent, *(rank for rank in stacks if rank not in waiting)})
    if not missing and len(names) == 1:
        return ""
    rows = [f"{_name_ranks(waiting)} {_has(waiting)} waited for {longest:.0f} s"]
    if missing:
        rows[0] += (
            f" in {' and '.join(sorted(names))}, which {_name_ranks(missing)} {_has(missing)} not entered:"
        )
    else:
        rows[0] += " in different collectives:"
    rows += [f"  rank {rank}: {_describe_stack(stacks[rank])}" for rank in sorted(stacks)]
    rows += [f"  rank {rank} {find_process_state(pid) or _SILENT}" for rank, pid in sorted(silent.items())]
    rows += [f"  rank {rank}: has ended the call" for rank in sorted(returned)]
    rows += [f"  rank {rank}: takes no part in the call" for rank in sorted(absent)]
    return "\n".join([*rows, "  interrupt the cell to stop the call on all ranks"])


def describe_hang(
    stacks: Mapping[int, StackReport],
    running: Mapping[int, int],
    ready: Collection[int],
    returned: Collection[int],
    seconds: float,
    states: Mapping[int, str],
    nodes: Mapping[int, str] | None = None,
) -> str:
    """Return the stack of each rank of a run, and what the ranks wait for.

    Args:
        stacks: where each rank is that has answered.
        running: process ids by rank, of ranks that have not ended.
        ready: ranks whose process could be asked.
        returned: ranks that have returned.
        seconds: how long nothing was heard of any rank.
        states: why the process of a rank cannot go on, as `find_process_state` says it; ranks without such a cause are
            left out.
        nodes: the host or node of each rank by its number, where that needs a word; None for none.

    Returns:
        Lines of text.
    """
    nodes = nodes or {}
    rows = [f"nothing was heard of {_name_ranks(running)} for {seconds:.0f} s"]
    waiting = {rank: stack.collective for rank, stack in stacks.items() if stack.collective}
    others = sorted({*returned, *stacks} - waiting.keys())
    if waiting and others:
        names = " and ".join(sorted(set(waiting.values())))
        rows[0] += (
            f": {_name_ranks(waiting)} {_has(waiting)} entered {names}, "
            f"{_name_ranks(others)} {_has(others)} not"
        )
    elif len(set(waiting.values())) > 1:
        rows[0] += ": they are in different collectives"
    for rank in sorted(running):
        who = name_process(rank, running[rank], nodes.get(rank, ""))
        who += " has returned, and its process has not ended" if rank in returned else ""
        colon = ":" if rank in returned else ""
        if rank in states:
            rows.append(f"{who}{colon} {states[rank]}")
            continue
        if rank not in ready:
            rows.append(f"{who}{colon} is still starting")
            continue
        if rank not in stacks:
            rows.append(f"{who}{colon} {_SILENT}; its stack follows")
            continue
        doing = f", in {waiting[rank]}" if rank in waiting else ""
        rows.append(f"{who}{doing}:")
        rows += [f"    {describe_frame(frame)}" for frame in _keep_users(stacks[rank].frames)] or [
            "    in no code of the user's"
        ]
        rows += [
            f"    torch's flight recorder: {_describe_collective(entry)}" for entry in stacks[rank].recorded
        ]
    rows += [f"rank {rank} has returned" for rank in sorted(returned) if rank not in running]
    return "\n".join(rows)


def find_process_state(pid: int) -> str:
    """Return why a process of this machine cannot go on, as the end of a sentence about it.

    Args:
        pid: its process id.

    Returns:
        Empty where it runs or waits as any process does.
    """
    try:
        state = psutil.Process(pid).status()
    except psutil.Error:
        return ""
    return _STATES.get(state, "").format(pid=pid)


def describe_frame(frame: Frame) -> str:
    """Return a frame's cell or file, its line number, and the text of the line."""
    text = linecache.getline(frame.filename, frame.lineno).strip()
    return f"{describe_file(frame.filename)}, line {frame.lineno}" + (f": {text}" if text else "")


def find_frame_of_error(raised: RaisedError) -> Frame | None:
    """Return the user's frame where an error was raised.

    Args:
        raised: an error of a rank. Where it was raised in no code of the user's, the one that it followed counts.

    Returns:
        The frame, None where no code of the user's was involved.
    """
    error: RaisedError | None = raised
    while error is not None:
        if (frame := find_users_frame(error.frames)) is not None:
            return frame
        error = error.context
    return None


def find_users_frame(frames: Collection[Frame]) -> Frame | None:
    """Return the innermost frame of a cell; without one, of the user's other code."""
    own = _keep_users(frames)[::-1]
    return next((frame for frame in own if is_cell(frame.filename)), own[0] if own else None)


def _describe_collective(entry: RecordedCollective) -> str:
    """Return a recorded collective as `gloo:all_reduce of 3 Float, number 7 of default_pg, has not ended`."""
    of = f" of {entry.inputs}" if entry.inputs else ""
    end = "has ended, and nothing came after it" if entry.is_over else "has not ended"
    return f"{entry.name}{of}, number {entry.number} of {entry.group}, {end}"


def _name_ranks(ranks: Collection[int]) -> str:
    words = ", ".join(map(str, sorted(ranks)))
    return f"rank {words}" if len(ranks) == 1 else f"ranks {words}"


def _has(ranks: Collection[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _describe_stack(stack: StackReport) -> str:
    frame = find_users_frame(stack.frames)
    doing = f"in {stack.collective}, " if stack.collective else ""
    return f"{doing}in code of the session" if frame is None else f"{doing}{describe_frame(frame)}"


def _keep_users(frames: Collection[Frame]) -> list[Frame]:
    """Return the frames of cells and of the user's other code."""
    libraries = (_TORCH, _OURS, _STANDARD, "<")
    return [frame for frame in frames if is_cell(frame.filename) or not frame.filename.startswith(libraries)]
