"""What the cell shows where no rank does anything any more."""

from __future__ import annotations

import linecache
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from ... import probes
from ...events import Frame, RecordedCollective, StackReport
from ..process_table import find_state
from ..rank_names import name_process

_STATES: Final = {
    "stopped": "is stopped by a signal, SIGSTOP or SIGTSTP: `kill -CONT {pid}` lets it go on",
    "tracing-stop": "is stopped by a debugger that is attached to it",
    "disk-sleep": "waits in the operating system, for a disk, a network file system or a driver, and no "
    "signal reaches it",
}
"""Why a process cannot go on, by its state."""
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[2])
_STANDARD = sysconfig.get_path("stdlib")


def describe_hang(
    stacks: Mapping[int, StackReport],
    running: Mapping[int, int],
    ready: Collection[int],
    returned: Collection[int],
    absent: Collection[int],
    seconds: float,
    states: Mapping[int, str],
    nodes: Mapping[int, str],
) -> str:
    """Return the stack of each rank, and what the ranks wait for.

    Args:
        stacks: where each rank is that has answered.
        running: process ids by rank, of ranks that have not ended.
        ready: ranks whose process could be asked.
        returned: ranks that have returned.
        absent: ranks that take no part in the call of a session.
        seconds: how long nothing was heard of any rank.
        states: why the process of a rank cannot go on, as `find_process_state` says it; ranks without such a cause are
            left out.
        nodes: the host or node of each rank by its number, where that needs a word.

    Returns:
        Lines of text.
    """
    head = f"nothing was heard of {_name_ranks(running)} for {seconds:.0f} s"
    waiting = {rank: stack.collective for rank, stack in stacks.items() if stack.collective}
    others = {*returned, *absent, *stacks} - waiting.keys()
    if waiting and others:
        names = " and ".join(sorted(set(waiting.values())))
        head += f": {_name_ranks(waiting)} {_has(waiting)} entered {names}, {_name_ranks(others)} {_has(others)} not"
    elif len(set(waiting.values())) > 1:
        head += ": they are in different collectives"
    rows = [head]
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
            rows.append(f"{who}{colon} does not answer, so C code holds the interpreter; its stack follows")
            continue
        stack = stacks[rank]
        rows.append(f"{who}, in {stack.collective}:" if stack.collective else f"{who}:")
        rows += [f"    {describe_frame(frame)}" for frame in _keep_users(stack.frames)] or [
            "    in no code of the user's"
        ]
        rows += [f"    torch's flight recorder: {_describe_collective(entry)}" for entry in stack.recorded]
    rows += [f"rank {rank} has returned" for rank in sorted(returned) if rank not in running]
    rows += [f"rank {rank} takes no part in the call" for rank in sorted(absent)]
    return "\n".join(rows)


def find_process_state(pid: int) -> str:
    """Return why a process of this machine cannot go on, as the end of a sentence about it.

    Args:
        pid: its process id.

    Returns:
        Empty where it runs or waits as any process does.
    """
    return _STATES.get(find_state(pid), "").format(pid=pid)


def describe_frame(frame: Frame) -> str:
    """Return a frame's cell or file, its line number, and the text of the line."""
    text = linecache.getline(frame.filename, frame.lineno).strip()
    return f"{probes.describe_file(frame.filename)}, line {frame.lineno}" + (f": {text}" if text else "")


def find_users_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of a cell; without one, of the user's other code; None where there is none."""
    own = _keep_users(frames)[::-1]
    return next((frame for frame in own if probes.is_cell(frame.filename)), own[0] if own else None)


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


def _keep_users(frames: Collection[Frame]) -> list[Frame]:
    """Return the frames of cells and of the user's other code."""
    libraries = (_TORCH, _OURS, _STANDARD, "<")
    return [
        frame
        for frame in frames
        if probes.is_cell(frame.filename) or not frame.filename.startswith(libraries)
    ]
