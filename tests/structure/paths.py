"""Counts how many files of ours one call goes through, and how often it switches between them.

To find out where a call goes, print what `trace` returns:

    call()  # warm up: imports and caches do not count
    print(trace(call))
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from tests.structure.source import FOLDERS, ROOT

_OURS = tuple(f"{folder}/" for folder in FOLDERS.values())


@dataclass(frozen=True, kw_only=True)
class CallPath:
    """The files of ours that one call went through.

    Attributes:
        files: the files that were entered, each once, in the order of their first call.
        switches: number of calls from one file into another one, by (caller, callee).
        functions: number of calls, by (file, function).
    """

    files: tuple[str, ...]
    switches: Counter[tuple[str, str]]
    functions: Counter[tuple[str, str]]

    @property
    def num_files(self) -> int:
        """Files that were entered."""
        return len(self.files)

    @property
    def num_switches(self) -> int:
        """Calls from one file into another one."""
        return sum(self.switches.values())

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.num_files} files, {self.num_switches} switches",
                *(f"  {file}" for file in self.files),
                "switches:",
                *(f"  {count:3} {caller} -> {callee}" for (caller, callee), count in self.switches.items()),
            ]
        )


def trace(
    function: Callable[[], Any], *, until: Callable[..., Any] | None = None, threads: bool = False
) -> CallPath:
    """Call the function and return its path through our files.

    What counts:

    - A call is the start of a Python function whose code is in `notebook_accel/` or `widgets/`: also of a method, a
      property, a lambda, a generator, a comprehension. Not counted: C functions, returns, generators that go on,
      and methods that a dataclass generates.
    - A switch is a call from a function of one file into a function of another file. Code of others in between is
      looked through: where torch's DataLoader calls our sampler, the caller is the function of ours that called
      the DataLoader.
    - The first call comes from the test. It enters a file and is no switch.

    Args:
        function: what to call, without arguments. Call it once before, so that imports and caches do not count.
        until: stop counting at the first call of this function or method; that call still counts.
        threads: count the threads too that start meanwhile. The first call of a thread is no switch.

    Raises:
        ValueError: `until` was not called.
    """
    files: dict[str, None] = {}
    switches: Counter[tuple[str, str]] = Counter()
    functions: Counter[tuple[str, str]] = Counter()
    last = None if until is None else inspect.unwrap(until).__code__
    is_done = False

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal is_done
        if is_done or event != "call" or not _is_ours(frame.f_code) or _is_resumed(frame):
            return
        file = _short(frame.f_code)
        files.setdefault(file)
        functions[file, frame.f_code.co_name] += 1
        caller = frame.f_back
        while caller is not None and not _is_ours(caller.f_code):
            caller = caller.f_back
        if caller is not None and _short(caller.f_code) != file:
            switches[_short(caller.f_code), file] += 1
        is_done = frame.f_code is last

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # what finalizes others' garbage is not on the path
    if threads:
        threading.setprofile(count)
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
        if threads:
            threading.setprofile(None)  # type: ignore[arg-type]
    if last is not None and not is_done:
        raise ValueError(f"{function} did not call {until}")
    return CallPath(files=tuple(files), switches=switches, functions=functions)


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_OURS)


def _is_resumed(frame: FrameType) -> bool:
    """Return whether a generator goes on here: Python reports that as a call."""
    if sys.version_info < (3, 11):
        return frame.f_lasti != -1
    return (
        frame.f_code.co_code[frame.f_lasti + 1] & 3 != 0
    )  # the argument of RESUME, 0 where a function starts


def _short(code: CodeType) -> str:
    return code.co_filename.removeprefix(f"{ROOT}/")
