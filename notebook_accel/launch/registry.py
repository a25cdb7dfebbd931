"""The runs and sessions of this process, and the devices that each of them holds."""

from __future__ import annotations

import atexit
import os
import resource
import signal
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from .. import devices, environ, probes, runtime, tpu
from ..errors import LaunchError
from .durations import Start
from .engines.base import Engine
from .engines.detached.folder import find_holders
from .job import Job
from .run import MakeSink, Run

_DESCRIPTORS_OF_EACH: Final = 11
_DESCRIPTORS_OF_ALL: Final = 24
"""How many descriptors the start of a run takes at most: for each worker, and for the store and what waits."""
_KEPT: Final = 8  # runs that have ended
_LAST_SECONDS: Final = 2.0
_CHANGING: Final = threading.RLock()
"""For changes of the list of runs. A finalizer of what is dropped may launch itself."""


def open_run(job: Job, engine: Engine, sinks: Sequence[MakeSink], start: Start | None = None) -> Run:
    """Make a run that is ready to start, and reserve devices for it that no other run holds.

    Args:
        job: what to run.
        engine: starts the processes.
        sinks: make what shows the run.
        start: when it was launched; by default now.

    Returns:
        The run. It is listed by `runs`, unless the job is `quiet`.

    Raises:
        LaunchError: too few devices are free, and the message says which run holds which; or too few descriptors.
    """
    starts_here = engine.on_this_node and job.attached is None
    if starts_here and engine.has_workers:
        require_descriptors(job.local_world_size)
    for ended in runtime.runs():
        ended.forget_variables()  # until now a debugger could show them; now the new run needs the memory
    if starts_here and job.device_kind is not devices.CPU:
        job = reserve_devices(job)
    run = Run(job, engine, sinks, start)
    if not job.quiet:
        _add(run)
    return run


def require_descriptors(workers: int) -> None:
    """Look whether this process may open as many descriptors as some workers take.

    Where one is missing in the middle of a start, torch's store tries to connect for minutes, and multiprocessing loses
    ends of pipes.

    Args:
        workers: how many start on this node.

    Raises:
        LaunchError: it may not.
    """
    count = _DESCRIPTORS_OF_EACH * workers + _DESCRIPTORS_OF_ALL
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        free = limit - len(os.listdir("/dev/fd"))
    except OSError:  # not even for the list
        free = 0
    if limit != resource.RLIM_INFINITY and free < count:
        who = "1 worker takes" if workers == 1 else f"{workers} workers take"
        raise LaunchError(
            f"{who} {count} open files, of which this process can open {free}: raise the limit on open files "
            "(ulimit -n), or start fewer processes"
        )


def runs() -> list[Run]:
    """Return the runs of this process, oldest first: all that still run, and eight that have ended, or a few more."""
    return list(runtime.runs())


def add_session(session: Any) -> None:
    """Add a session to the list of sessions. The list alone does not keep a session alive.

    Args:
        session: has `is_over`, `job` and `close`, as `session.Session` does.
    """
    known = runtime.sessions()
    known[:] = [reference for reference in known if reference() is not None]
    known.append(weakref.ref(session))
    atexit.unregister(_close_sessions)
    atexit.register(_close_sessions)  # before multiprocessing's exit handler, which waits for all processes


def sessions() -> list[Any]:
    """Return the open sessions of this process, oldest first."""
    living = [reference() for reference in list(runtime.sessions())]
    return [session for session in living if session is not None and not session.is_over]


def reserve_devices(job: Job) -> Job:
    """Reserve devices that no other run or session holds.

    Args:
        job: a job that runs on this node.

    Returns:
        The job with the devices in `holds`. If these are not the first ones, its environment makes only them visible.

    Raises:
        LaunchError: too few devices are free. The message says which run holds which device.
    """
    kind = job.device_kind
    if kind is devices.CPU or (kind is devices.XLA and not tpu.is_here(job.environment)):
        return job
    by_user = job.environment.get(kind.visible) if kind.visible else None
    outer = environ.get(kind.visible) if kind.visible else None
    present = tpu.chips(job.environment) if kind is devices.XLA else devices.count(kind)
    ids = _split_ids(by_user) or _split_ids(outer) or [str(number) for number in range(present)]
    needed = present if job.tpu_mode == "spmd" else job.local_world_size
    living = [*(run for run in runtime.runs() if not run.is_over), *sessions()]
    holders = {**find_holders(), **{device: repr(each) for each in living for device in each.job.holds}}
    if by_user is not None or not job.distributed or kind.visible is None:
        usable = ids[:needed]  # by the user, or the first ones: this process sees all
    else:
        usable = ids
    free = [device for device in usable if device not in holders]
    if len(free) < needed:
        held = "; ".join(f"{device} by {holders[device]}" for device in usable if device in holders)
        raise LaunchError(
            f"{job.name} needs {needed} {kind.label if needed == 1 else kind.plural}, and "
            f"{len(free) or 'none'} of {', '.join(usable)} {'is' if len(free) == 1 else 'are'} free ({held}): wait for "
            "a run, stop it (`notebook_accel.runs()` lists them), close a session, or use fewer processes"
        )
    reserved = tuple(free[:needed])
    environment = dict(job.environment)
    if kind.visible and job.distributed and list(reserved) != ids[:needed]:
        environment[kind.visible] = ",".join(reserved)
    return replace(job, holds=reserved, environment=environment)


def _split_ids(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _add(run: Run) -> None:
    """Add a run to the list, and drop the oldest ones that have ended."""
    known = runtime.runs()
    atexit.unregister(_end_all)
    atexit.register(
        _end_all
    )  # again at each run: it has to run before the exit handlers of imported libraries
    with _CHANGING:
        run.number = max((old.number for old in known), default=0) + 1
        known.append(run)
        for old in [old for old in known if old.is_over][:-_KEPT]:
            known.remove(old)
    if run.job.background:
        _handle_idle_interrupts()


def _end_all() -> None:
    """Stop all runs that do not go on by themselves when this process exits: their threads end without doing so."""
    living = _list_own()
    for run in living:
        run.request_break_off()
    for run in living:
        run.wait(_LAST_SECONDS)


def _list_own() -> list[Run]:
    """Return the living runs, without those that this process has as a copy of the one that made them."""
    return [run for run in runtime.runs() if not run.is_over and run.owner == os.getpid()]


def _close_sessions() -> None:
    for session in sessions():
        session.close()


def _handle_idle_interrupts() -> None:
    """Let an interrupt stop background runs while no cell runs. ipykernel alone would ignore it."""
    kernel: Any = getattr(probes.find_shell(), "kernel", None)
    if getattr(kernel, "saved_sigint_handler", None) == signal.SIG_IGN:
        kernel.saved_sigint_handler = _on_interrupt


def _on_interrupt(signum: int, frame: Any) -> None:
    for run in _list_own():
        run.request_break_off()
