"""This process's runs, and which devices those that still run hold."""

from __future__ import annotations

import atexit
import signal
import sys
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from .. import devices, environ, runtime, tpu
from ..errors import LaunchError
from .job import Job

if TYPE_CHECKING:
    from .run import Run

_KEPT: Final = 8
_LAST_SECONDS: Final = 2.0
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_VISIBLE_CHIPS: Final = "TPU_VISIBLE_CHIPS"


def runs() -> list[Run]:
    """Return this process's runs, oldest first: all that still run, and the last that ended."""
    return list(runtime.runs())


def add_session(session: Any) -> None:
    """Note a session, as long as somebody else holds it."""
    known = runtime.sessions()
    known[:] = [reference for reference in known if reference() is not None]
    known.append(weakref.ref(session))
    atexit.unregister(_close_sessions)
    atexit.register(_close_sessions)  # before multiprocessing's own, which waits for all processes


def sessions() -> list[Any]:
    """Return this process's sessions that are not closed, oldest first."""
    found = [reference() for reference in list(runtime.sessions())]
    return [session for session in found if session is not None and not session.is_over]


def add(run: Run) -> None:
    """Note a run; old ones that ended are forgotten."""
    known = runtime.runs()
    atexit.unregister(_end_all)
    atexit.register(_end_all)  # before the exit handlers of what an engine has imported
    known.append(run)
    ended = [old for old in known if old.is_over]
    for old in ended[: max(0, len(ended) - _KEPT)]:
        known.remove(old)
    if run.job.background:
        _take_idle_interrupts()


def settled(job: Job) -> Job:
    """Return the job with devices that no other run holds.

    Raises:
        LaunchError: there are too few; it says which run holds which.
    """
    if not isinstance(job.engine, str) and not job.engine.on_this_node:
        return job
    kind = job.device_kind
    if kind is devices.CPU or (kind is devices.XLA and not tpu.is_here(job.environment)):
        return job
    visible = _VISIBLE_CHIPS if kind is devices.XLA else _VISIBLE
    chosen = job.environment.get(visible)
    every = tpu.chips(job.environment) if kind is devices.XLA else devices.count(kind)
    ids = _ids(chosen) or _ids(environ.get(visible)) or [str(number) for number in range(every)]
    needed = every if job.tpu_mode == "spmd" else job.local_world_size
    living = [*(run for run in runtime.runs() if not run.is_over), *sessions()]
    holders = {device: holder for holder in living for device in holder.job.holds}
    free = [device for device in ids if device not in holders]
    if chosen is not None or not job.distributed:  # by hand, or this process's first
        free = [device for device in ids[:needed] if device not in holders]
    if len(free) < needed:
        held = "; ".join(f"{device} by {holders[device]!r}" for device in ids if device in holders)
        raise LaunchError(
            f"{job.name} needs {needed} {kind.label if needed == 1 else kind.plural}, and "
            f"{len(free) or 'none'} of {', '.join(ids)} {'is' if len(free) == 1 else 'are'} free ({held}): wait for a "
            "run, stop it (`notebook_accel.runs()` lists them), close a session, or use fewer processes"
        )
    taken = tuple(free[:needed])
    moved = kind.name in ("cuda", "xla") and job.distributed and list(taken) != ids[:needed]
    environment = {**job.environment, visible: ",".join(taken)} if moved else job.environment
    return replace(job, holds=taken, environment=environment)


def _ids(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _end_all() -> None:
    """Stop what still runs when this process ends: threads of it would not see to it."""
    living = [run for run in runtime.runs() if not run.is_over]
    for run in living:
        run.request_stop(0.0)
    for run in living:
        run.wait(_LAST_SECONDS)


def _close_sessions() -> None:
    for session in sessions():
        session.close()


def _take_idle_interrupts() -> None:
    """Let the kernel's interrupt stop background runs while no cell runs; ipykernel ignores it then."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    kernel: Any = getattr(shell, "kernel", None)
    if getattr(kernel, "saved_sigint_handler", None) == signal.SIG_IGN:
        kernel.saved_sigint_handler = _on_interrupt


def _on_interrupt(signum: int, frame: Any) -> None:
    for run in runtime.runs():
        if not run.is_over:
            run.request_stop(0.0)
