"""The end of loader processes whose iterator failed, which torch leaves to the end of the last reference to it."""

from __future__ import annotations

import contextlib
from typing import Any


def end_processes(error: BaseException, kept: Any) -> None:
    """End the loader processes of the iterators that an error came through.

    The frames of its traceback hold them as long as somebody holds the error, as a notebook does until the next one.
    There is no other way to one that failed before it was whole: where a process is killed while the others start.

    The frame that caught the error is left out: where it was asked for its variables, it keeps them, the error too.

    Args:
        error: what an iterator of torch or torchdata raised, or a function that it called.
        kept: the iterator that goes on with the next epoch, because the processes are persistent; or None.
    """
    trace = error.__traceback__ and error.__traceback__.tb_next
    found: dict[int, Any] = {}
    frames = []
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if hasattr(owner, "_shutdown_workers") and owner is not kept:
            found[id(owner)] = owner
        if found:
            frames.append(trace.tb_frame)
        trace = trace.tb_next
    for owner in found.values():
        with contextlib.suppress(Exception):  # the error is what counts: torch's own ends do not raise either
            owner._shutdown_workers()
    for (
        frame
    ) in frames:  # one that was not whole yet has queues whose pipes nobody closes while its frames hold them
        with contextlib.suppress(RuntimeError):  # it still runs
            frame.clear()
            _ = frame.f_locals  # which takes out of what it gave above what is no longer there
